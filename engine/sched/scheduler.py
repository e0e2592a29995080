"""The mechanism of a step: budget, rows and blocks for what the policy offers, until a plan is full.

Knows nothing of order (`policy.py`), of tokens' meaning or of time. Its rules:

- A request gets tokens only with a row and with blocks that cover them. A newcomer is let in only when there are blocks
  for all its known tokens beside those promised to others (`kv_cache.py`), though it takes them chunk by chunk.
- When something is short, the policy's victims yield one by one. A victim loses its row and blocks and computes its
  tokens again later, less what the prefix cache still has.
- Where only a row is short, a resident that the policy names is parked: it keeps its blocks, and goes on later with any
  row. Nothing is computed again.
- Only a plan made with nothing in flight may preempt or park. A plan made ahead that would have to is dropped instead:
  what it granted is revoked, blocks and rows it gave out stay with their requests.
- A request that ends while a step in flight names its row keeps row and blocks until that step is applied.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import dataclass, field

from engine.errors import IntegrityError
from engine.kv.kv_cache import BlockTable, KVCache
from engine.request import Phase, Request, RequestState
from engine.sched.plan import Chunk, NewRow, StepPlan
from engine.sched.policy import Policy
from engine.stats import Counters


@dataclass(frozen=True, slots=True)
class Step:
    """A plan with the requests behind its chunks, in the same order."""

    plan: StepPlan
    requests: tuple[Request, ...]


@dataclass(slots=True)
class _Draft:
    """A plan in the making: what each request gets, in the order of first grants."""

    budget: int
    now_us: int
    is_ahead: bool
    grants: dict[Request, int] = field(default_factory=dict)


class _NeedsVictimError(Exception):
    """A plan made ahead cannot go on unless somebody gives something up."""


class Scheduler:
    """Turns a policy's offers into plans and keeps the books of who is resident.

    Args:
        max_sequences: rows of the runner.
        max_step_tokens: token budget of a step.
    """

    def __init__(
        self, policy: Policy, kv: KVCache, counters: Counters, *, max_sequences: int, max_step_tokens: int
    ) -> None:
        self._policy = policy
        self._kv = kv
        self._counters = counters
        self._max_step_tokens = max_step_tokens
        self._rows: list[Request | None] = [None] * max_sequences
        self._free_rows = list(reversed(range(max_sequences)))
        self._parked: dict[Request, None] = {}  # with a table and no row, whatever their state
        self._paused: dict[Request, None] = {}  # with a table and at their cap, the longest paused first
        self._num_runnable = 0
        self._next_step_id = 0

    @property
    def num_runnable(self) -> int:
        """Requests that wait or run; neither held nor paused."""
        return self._num_runnable

    def add(self, request: Request) -> None:
        """The request, new or no longer held, may run."""
        request.state = RequestState.WAITING
        self._num_runnable += 1
        self._policy.admit(request)

    def pause(self, request: Request) -> None:
        """The running request has reached its cap. It stays resident as long as nobody needs its place."""
        request.state = RequestState.AT_CAP
        self._num_runnable -= 1
        self._paused[request] = None

    def resume(self, request: Request, now_us: int) -> None:
        """The cap of the paused request was raised."""
        if request.table is None:
            request.enter(Phase.PREEMPTED, now_us)
            self.add(request)
            return
        del self._paused[request]
        if request.row is None:
            request.state = RequestState.PARKED
            request.enter(Phase.PARKED, now_us)
        else:
            request.state = RequestState.RUNNING
        self._num_runnable += 1

    def end(self, request: Request) -> None:
        """The request is over, whatever its state."""
        if request.state in (RequestState.WAITING, RequestState.RUNNING, RequestState.PARKED):
            self._num_runnable -= 1
            self._policy.forget(request)
        elif request in self._paused:
            del self._paused[request]
            self._policy.forget(request)
        request.state = RequestState.FINISHED
        request.prefix.clear()
        if request.table is not None and not request.num_in_flight:
            self._vacate(request)

    def schedule(self, now_us: int, *, is_ahead: bool = False) -> Step | None:
        """Plan the next step; None if nobody gets a token.

        Args:
            is_ahead: the step before is in flight. It is taken to sample one token for every chunk that samples, and
                none that ends a request before its cap.
        """
        while True:
            draft = _Draft(self._max_step_tokens, now_us, is_ahead)
            try:
                self._hand_out(draft)
            except _NeedsVictimError:
                for request, num_tokens in draft.grants.items():
                    self._policy.revoke(request, num_tokens)
                return None
            if draft.grants:
                return self._seal(draft)
            if is_ahead or not self._num_runnable or not self._paused:
                return None
            # Whoever pauses at a cap holds blocks for a message that may never come: not while everybody else stands.
            self._preempt(draft, next(iter(self._paused)))

    def settle(self, request: Request, chunk: Chunk) -> bool:
        """A step that holds this chunk is applied. False if the request had ended before: nothing of it counts."""
        request.num_in_flight -= 1
        if request.state is RequestState.FINISHED:
            if not request.num_in_flight:
                self._vacate(request)
            return False
        assert request.table is not None, "a request in flight keeps its table"
        end = chunk.start + chunk.num_tokens
        self._counters.count_computed(
            chunk.start, end, num_prompt_tokens=request.num_prompt_tokens, high_water=request.high_water
        )
        request.num_computed = end
        request.high_water = max(request.high_water, end)
        self._kv.commit(request.table, request.token_ids, end)
        request.num_pending -= chunk.samples
        return True

    def check(self) -> None:
        """Raise `IntegrityError` if rows, tables or counters contradict each other."""
        resident = [request for request in self._rows if request is not None]
        if len(resident) + len(self._free_rows) != len(self._rows):
            raise IntegrityError(f"{len(resident)} rows in use and {len(self._free_rows)} free of {len(self._rows)}")
        tables = []
        for row, request in enumerate(self._rows):
            if request is None:
                continue
            if request.row != row or request.table is None:
                raise IntegrityError(f"row {row} is held by {request.request_id}, which says {request.row}")
            if not request.num_computed <= request.num_scheduled <= request.num_known:
                raise IntegrityError(
                    f"{request.request_id}: computed {request.num_computed}, scheduled {request.num_scheduled}, "
                    f"known {request.num_known}"
                )
            if request.state is RequestState.FINISHED and not request.num_in_flight:
                raise IntegrityError(f"{request.request_id} is over and still holds row {row}")
            tables.append((request.table, request.num_computed))
        for request in self._parked:
            if request.row is not None or request.table is None:
                raise IntegrityError(f"{request.request_id} is parked with row {request.row}, table {request.table}")
            if request.num_in_flight or request.num_pending or request.num_scheduled != request.num_computed:
                raise IntegrityError(f"{request.request_id} is parked while a step in flight names it")
            if request.state not in (RequestState.PARKED, RequestState.AT_CAP):
                raise IntegrityError(f"{request.request_id} is parked and {request.state.name}")
            tables.append((request.table, request.num_computed))
        self._kv.check(tables)

    def _hand_out(self, draft: _Draft) -> None:
        with closing(self._policy.offers(draft.budget, draft.now_us)) as offers, suppress(StopIteration):
            request, most = next(offers)
            while draft.budget:
                request, most = offers.send(self._grant(draft, request, most))

    def _grant(self, draft: _Draft, request: Request, most: int) -> int:
        if request.row is None and not self._seat(draft, request):
            return 0
        granted = draft.grants.get(request, 0)
        start = request.num_scheduled + granted
        num_tokens = min(most, request.num_wanted - granted, draft.budget)
        if num_tokens > 0:
            num_tokens = self._cover(draft, request, start + num_tokens) - start
        if num_tokens <= 0:
            return 0
        draft.grants[request] = granted + num_tokens
        draft.budget -= num_tokens
        return num_tokens

    def _seat(self, draft: _Draft, request: Request) -> bool:
        """A row for a request that has none."""
        if request.table is None:
            return self._let_in(draft, request)
        if request.num_wanted <= 0 or not (self._free_rows or self._park_for(draft, request)):
            return False
        self._take_row(draft, request)
        return True

    def _let_in(self, draft: _Draft, request: Request) -> bool:
        preemptions = self._preemptions(draft, request)
        while (table := self._allocate(draft, request)) is None:
            if next(preemptions, None) is None:
                return False
        num_found = len(request.prefix) * self._kv.block_tokens
        request.table, request.prefix = table, []
        request.num_computed = request.num_scheduled = num_found
        if request.phase is Phase.QUEUE:
            request.high_water = request.num_cached_tokens = num_found
            self._counters.num_cached_tokens += num_found
        self._take_row(draft, request)
        return True

    def _take_row(self, draft: _Draft, request: Request) -> None:
        self._parked.pop(request, None)
        request.row = self._free_rows.pop()
        self._rows[request.row] = request
        request.state = RequestState.RUNNING
        request.enter(Phase.DECODE if request.num_output_tokens else Phase.PREFILL, draft.now_us)

    def _allocate(self, draft: _Draft, request: Request) -> BlockTable | None:
        """A table, and a free row to go with it. Nobody is parked for a request whose blocks are not to be had."""
        if not self._free_rows:
            if next(self._policy.yields_row(request), None) is None:
                return None
            if draft.is_ahead:
                raise _NeedsVictimError
        self._kv.lookup(request.token_ids, request.cache_salt, request.prefix)
        table = self._kv.allocate(request.token_ids, request.cache_salt, request.prefix)
        if table is None or self._free_rows or self._park_for(draft, request):
            return table
        self._kv.free(table)
        return None

    def _park_for(self, draft: _Draft, claimant: Request) -> bool:
        """Free a row for the claimant if the policy names anybody who is to yield it."""
        for holder in self._policy.yields_row(claimant):
            if draft.is_ahead:
                raise _NeedsVictimError
            self._park(draft, holder)
            return True
        return False

    def _park(self, draft: _Draft, holder: Request) -> None:
        assert holder.row is not None, "parked without a row"
        assert not holder.num_in_flight, "parked while a step in flight names it"
        self._take_back(draft, holder)
        self._counters.num_parkings += 1
        self._give_up_row(holder)
        self._parked[holder] = None
        if holder.state is RequestState.RUNNING:
            holder.state = RequestState.PARKED
            holder.enter(Phase.PARKED, draft.now_us)
        self._policy.parked(holder)

    def _cover(self, draft: _Draft, request: Request, num_tokens: int) -> int:
        """Extend the request's table to so many tokens, or to as many as blocks can be had for; returns how many."""
        assert request.table is not None, "only residents are covered"
        num_missing = self._kv.num_missing(request.table, num_tokens)
        if num_missing:
            preemptions = self._preemptions(draft, request)
            while num_missing > self._kv.num_available and next(preemptions, None) is not None:
                pass
            num_tokens = min(num_tokens, self._kv.num_coverable_tokens(request.table))
            self._kv.extend(request.table, num_tokens)
        return num_tokens

    def _preemptions(self, draft: _Draft, claimant: Request) -> Iterator[Request]:
        """Preempts one victim each time it is advanced."""
        for victim in self._policy.victims(claimant):
            if draft.is_ahead:
                raise _NeedsVictimError
            self._preempt(draft, victim)
            yield victim

    def _preempt(self, draft: _Draft, victim: Request) -> None:
        assert not victim.num_in_flight, "preempted while a step in flight names it"
        self._take_back(draft, victim)
        self._counters.num_preemptions += 1
        self._vacate(victim)
        if victim in self._paused:
            del self._paused[victim]
            self._policy.forget(victim)
            return
        victim.state = RequestState.WAITING
        victim.enter(Phase.PREEMPTED, draft.now_us)
        self._policy.preempted(victim)

    def _take_back(self, draft: _Draft, request: Request) -> None:
        """What the draft grants to the request."""
        granted = draft.grants.pop(request, 0)
        if granted:
            draft.budget += granted
            self._policy.revoke(request, granted)

    def _vacate(self, request: Request) -> None:
        assert request.table is not None, "only who holds blocks has something to give back"
        self._kv.free(request.table)
        request.table = None
        request.num_computed = request.num_scheduled = 0
        if request.row is None:
            del self._parked[request]
        else:
            self._give_up_row(request)

    def _give_up_row(self, request: Request) -> None:
        """The runner is to be told everything anew when the request gets another one."""
        assert request.row is not None, "nothing to give up"
        self._rows[request.row] = None
        self._free_rows.append(request.row)
        request.row = None
        request.num_blocks_sent = 0
        request.is_announced = False

    def _seal(self, draft: _Draft) -> Step:
        assert draft.budget + sum(draft.grants.values()) == self._max_step_tokens, "budget lost or made up"
        new_rows: list[NewRow] = []
        chunks: list[Chunk] = []
        for request, num_tokens in draft.grants.items():
            assert request.row is not None, "granted without a row"
            assert request.table is not None, "granted without a table"
            if not request.is_announced:
                request.is_announced = True
                new_rows.append(
                    NewRow(
                        row=request.row,
                        token_ids=tuple(request.token_ids),
                        num_prompt_tokens=request.num_prompt_tokens,
                        sampling=request.sampling,
                        choice=request.choice,
                    )
                )
            block_ids = request.table.block_ids
            start = request.num_scheduled
            samples = start + num_tokens == request.num_known
            chunks.append(
                Chunk(
                    row=request.row,
                    start=start,
                    num_tokens=num_tokens,
                    new_block_ids=tuple(block_ids[request.num_blocks_sent :]),
                    samples=samples,
                )
            )
            request.num_blocks_sent = len(block_ids)
            request.num_scheduled = start + num_tokens
            request.num_pending += samples
            request.num_in_flight += 1
        self._policy.sealed()
        self._counters.num_steps += 1
        self._next_step_id += 1
        plan = StepPlan(step_id=self._next_step_id, new_rows=tuple(new_rows), chunks=tuple(chunks))
        return Step(plan, tuple(draft.grants))
