"""Every request on record: in the journal before its answer begins, and again, as a ledger row, when it is settled.

What is in the journal gets into the ledger whatever becomes of this process (`posting`, `recovery`). Knows nothing of
databases.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import deque
from collections.abc import Sequence
from typing import Protocol

from gateway.domain.ids import RequestId
from gateway.domain.ledger import LedgerRow, Opening
from gateway.domain.record import RequestRecord
from gateway.domain.usage import EngineTimings, Outcome, TokenUsage, over_parts
from gateway.errors import Unavailable
from gateway.journal.records import MAX_PROGRESS, Closed, Opened, Progress
from gateway.journal.writer import JournalFull, JournalWriter
from gateway.services.ports import Clock, Readiness, Recorder, Running

logger = logging.getLogger(__name__)

SYNC_EVERY_S = 0.1
PROGRESS_EVERY_S = 1.0
MOST_UNPOSTED = 10_000
"""Settled requests that are kept to be told of until they are in the ledger. Of more, which only a database that is
down for long can bring about, the oldest are told of when it is back."""
_NO_TIMINGS = EngineTimings()
_PROBE = Progress({RequestId(" " * 4096): 0})
"""Says nothing, and is longer than any row and than what is left of a disk's last block: if there is room for this one,
there is room for others."""


class _Open:
    """A request that is not settled; `told` is the number of output tokens that the journal has of it."""

    __slots__ = ("opened_s", "opening", "running", "told")

    def __init__(self, opening: Opening, opened_s: float, running: Running) -> None:
        self.opening = opening
        self.opened_s = opened_s
        self.running = running
        self.told = 0


class MeteringRecorder:
    """Implements `gateway.services.ports.Recorder` over a journal.

    Args:
        journal: only this object appends to it and syncs it.
    """

    def __init__(self, journal: JournalWriter, clock: Clock) -> None:
        self._journal = journal
        self._clock = clock
        self._open: dict[RequestId, _Open] = {}
        self._unwritten: deque[LedgerRow] = deque()
        self._unposted: dict[RequestId, LedgerRow] = {}
        self._next_progress_s = 0.0
        self._trouble = ""  # why the journal took no record; empty once it takes them again
        self._must_reopen = False

    def opened(self, opening: Opening, running: Running) -> None:
        """As the port says. `running` is asked for its usage about once a second, so that a crash of everything still
        charges what was told."""
        try:
            self._journal.append(Opened(opening))
        except JournalFull as e:
            self._trouble = str(e)
            logger.error("a request was refused: the journal takes no records (%s)", e)  # noqa: TRY400 - no bug
            raise Unavailable("The server cannot keep records right now. Please try again shortly.") from e
        self._open[opening.request_id] = _Open(opening, self._clock.monotonic(), running)

    def settled(self, record: RequestRecord) -> None:
        row = row_of(record)
        self._open.pop(row.request_id, None)
        self._unwritten.append(row)
        self._unposted[row.request_id] = row
        if len(self._unposted) > MOST_UNPOSTED:
            del self._unposted[next(iter(self._unposted))]
        try:
            self._write_rows()
        except JournalFull as e:
            self._trouble = str(e)
            logger.error(  # noqa: TRY400 - no bug
                "%d settled requests wait for the journal to take them (%s)", len(self._unwritten), e
            )

    def readiness(self) -> Readiness:
        """Whether requests can be put on record."""
        return Readiness(not self._trouble, f"the journal takes no records: {self._trouble}" if self._trouble else "")

    def is_open(self, request_id: str) -> bool:
        """The request was opened and is not settled yet."""
        return RequestId(request_id) in self._open

    def find(self, request_id: RequestId) -> Opening | LedgerRow | None:
        """A request of this process: its row if it is settled and not known to be in the ledger yet, else its opening
        if it is open."""
        row = self._unposted.get(request_id)
        if row is not None:
            return row
        is_open = self._open.get(request_id)
        return None if is_open is None else is_open.opening

    def posted(self, rows: Sequence[LedgerRow]) -> None:
        """These are in the ledger."""
        for row in rows:
            self._unposted.pop(row.request_id, None)

    @property
    def num_unwritten(self) -> int:
        """Settled requests that the journal did not take yet."""
        return len(self._unwritten)

    async def run(self) -> None:
        """Keep the journal safe, until cancelled."""
        while True:
            await asyncio.sleep(SYNC_EVERY_S)
            if self._clock.monotonic() >= self._next_progress_s:
                self._next_progress_s = self._clock.monotonic() + PROGRESS_EVERY_S
                self._write_progress()
            await self.flush()

    async def flush(self) -> None:
        """Put the journal right if something has happened to it, write what could not be written before, and make all
        of it survive a loss of power."""
        self._catch_up()
        if not self._journal.is_dirty:
            return
        try:
            await asyncio.to_thread(self._journal.sync)
        except OSError as e:
            logger.error("the journal could not be synced (error %s)", e.errno)  # noqa: TRY400 - no bug

    def _catch_up(self) -> None:
        try:
            self._must_reopen |= self._journal.mend()
            if self._must_reopen:
                self._reopen()
            self._write_rows()
            if self._trouble:
                self._journal.append(_PROBE)
        except JournalFull as e:
            if not self._trouble:
                logger.error("the journal takes no records (%s)", e)  # noqa: TRY400 - no bug
            self._trouble = str(e)
        else:
            if self._trouble:
                logger.warning("the journal takes records again")
            self._trouble = ""

    def _reopen(self) -> None:
        """Say again of all open requests that they are, and how much they were told. Raises `JournalFull`."""
        for request in self._open.values():
            self._journal.append(Opened(request.opening))
            request.told = 0
        self._next_progress_s = 0.0
        self._must_reopen = False

    def _write_rows(self) -> None:
        """Raises `JournalFull`; those that it did not take stay."""
        while self._unwritten:
            self._journal.append(Closed(self._unwritten[0]))
            self._unwritten.popleft()

    def _write_progress(self) -> None:
        before_s = self._clock.monotonic() - PROGRESS_EVERY_S
        counts: dict[RequestId, int] = {}
        for request_id, request in self._open.items():
            if request.opened_s <= before_s:
                num_tokens = request.running.usage.completion_tokens
                if num_tokens != request.told:
                    request.told = counts[request_id] = num_tokens
        items = iter(counts.items())
        try:
            while part := dict(itertools.islice(items, MAX_PROGRESS)):
                self._journal.append(Progress(part))
        except JournalFull as e:
            self._trouble = str(e)
            logger.error("progress of requests is not on record (%s)", e)  # noqa: TRY400 - no bug


class Recorders:
    """Several recorders as one; the first may refuse a request, and is told first.

    Implements `gateway.services.ports.Recorder`.
    """

    def __init__(self, metering: MeteringRecorder, *others: Recorder) -> None:
        self._metering = metering
        self._others = others

    def opened(self, opening: Opening, running: Running) -> None:
        self._metering.opened(opening, running)
        for recorder in self._others:
            recorder.opened(opening, running)

    def settled(self, record: RequestRecord) -> None:
        self._metering.settled(record)
        for recorder in self._others:
            recorder.settled(record)


def row_of(record: RequestRecord) -> LedgerRow:
    """The ledger's row of a settled request."""
    first_s = record.first_delta_s
    return _row(
        record.opening,
        record.usage,
        closed_at_ms=record.closed_at_ms,
        outcome=record.outcome,
        finish_reason=record.finish_reason,
        error_code=record.error_code,
        timings=record.timings or _NO_TIMINGS,
        ttft_us=None if first_s is None else round(first_s * 1e6),
        total_us=round(record.total_s * 1e6),
    )


class EngineFinal(Protocol):
    """What an engine says that a part of a request had used when its gateway was lost."""

    @property
    def request_id(self) -> str:
        """Of the part (`Opening.num_parts`)."""

    @property
    def cached_tokens(self) -> int: ...

    @property
    def completion_tokens(self) -> int: ...

    @property
    def finish_reason(self) -> str:
        """Empty if it did not come to its end."""

    @property
    def timings(self) -> EngineTimings: ...


def lost_row(
    opening: Opening, finals: Sequence[EngineFinal], *, completion_tokens: int, closed_at_ms: int
) -> LedgerRow:
    """The row of a request whose process died.

    Args:
        finals: of its parts, as far as they are known.
        completion_tokens: that it had been told for certain; the engine's counts stand if they are more.
    """
    usage = TokenUsage(
        prompt_tokens=opening.prompt_tokens,
        completion_tokens=max(sum(final.completion_tokens for final in finals), completion_tokens),
        cached_tokens=min(sum(final.cached_tokens for final in finals), opening.prompt_tokens),
    )
    return _row(
        opening,
        usage,
        closed_at_ms=closed_at_ms,
        outcome="lost",
        finish_reason=",".join(dict.fromkeys(final.finish_reason for final in finals if final.finish_reason)),
        error_code=None,
        timings=over_parts([final.timings for final in finals]),
        ttft_us=None,
        total_us=None,
    )


def _row(
    opening: Opening,
    usage: TokenUsage,
    *,
    closed_at_ms: int,
    outcome: Outcome,
    finish_reason: str,
    error_code: str | None,
    timings: EngineTimings,
    ttft_us: int | None,
    total_us: int | None,
) -> LedgerRow:
    return LedgerRow(
        request_id=opening.request_id,
        opened_at_ms=opening.opened_at_ms,
        closed_at_ms=closed_at_ms,
        organization_id=opening.organization_id,
        team_id=opening.team_id,
        key_id=opening.key_id,
        model=opening.model,
        requested_model=opening.requested_model,
        endpoint=opening.endpoint,
        stream=opening.stream,
        request_class=opening.request_class,
        outcome=outcome,
        finish_reason=finish_reason,
        error_code=error_code,
        prompt_tokens=usage.prompt_tokens,
        cached_tokens=usage.cached_tokens,
        completion_tokens=usage.completion_tokens,
        queue_us=timings.queue_us,
        prefill_us=timings.prefill_us,
        decode_us=timings.decode_us,
        preempted_us=timings.preempted_us,
        engine_us=timings.engine_us,
        parked_us=timings.parked_us,
        ttft_us=ttft_us,
        total_us=total_us,
        cost_microusd=opening.cost_microusd(usage),
        charges=opening.charges(usage),
    )
