"""Meters in Redis, for any number of gateway processes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import msgspec

from gateway.domain.ids import OrganizationId, RequestId
from gateway.domain.limits.admission import Ask, Reservation, Settlement, Verdict
from gateway.domain.limits.meters import Quota, Use
from gateway.domain.limits.validation import Validator, validate
from gateway.domain.usage import TokenUsage
from gateway.errors import LimitsUnavailable
from gateway.limits.breaker import Breaker
from gateway.limits.redis_line import ErrorReply, Line
from gateway.limits.redis_scripts import TOO_LATE, Script, load, packed, prefix, quota_name, settlement_of, verdict_of

CONNECT_S = 0.15
ANSWER_S = 0.15
"""Within which every method answers or raises."""
FAILURES = 5
PAUSE_S = 0.5
MOST_DOUBTFUL = 10_000
STATES = ("BUSY", "CLUSTERDOWN", "LOADING", "MASTERDOWN", "MISCONF", "NOREPLICAS", "OOM", "READONLY", "TRYAGAIN")
"""Of a Redis that says no to every script; in an error reply."""

_encode = msgspec.msgpack.Encoder().encode
_log = logging.getLogger(__name__)


class RedisLimits:
    """Implements `gateway.services.limit_store.LimitStore`: a method is a script, and Redis runs one at a time.

    Redis 6.2 or later, with `maxmemory-policy noeviction`. A script is called by its digest, and sent where Redis does
    not know it, or does not let us call one so. Of an organization that nobody asks for, everything but its epoch is
    gone after 40 days. A thousand reservations in one `begin_epoch` or `report` keep Redis busy for 0.05 to 0.2 s; if
    that is too long for an answer, it is done all the same, and may be asked for again.

    What is committed is known for one life of one Redis (`run_id` of INFO, which has to be allowed): one that was
    started anew, or has taken the place of another, may have an older state, so it is told again, whatever it has.

    An answer to `admit` may be lost: Redis pauses, a connection breaks, the caller is cancelled. Nobody then knows
    whether there is a reservation, and the request is refused. Redis' clock being known from earlier answers, a script
    is told when its caller will have given up, and does nothing if it runs later; so what a paused Redis finds waiting
    when it goes on has no effect. What had been carried out in time is cancelled by this process as soon as Redis
    answers again. If the process is gone by then it is up to others (`services.orphans`); if the lease runs out before,
    the prompt alone stays charged.

    Args:
        url: as redis-py reads them; may hold a password.
        now_ms: for tests; else it is Redis' clock that counts.
    """

    never_waits = False

    def __init__(
        self,
        url: str,
        *,
        connect_s: float = CONNECT_S,
        answer_s: float = ANSWER_S,
        breaker: Breaker | None = None,
        now_ms: Callable[[], int] | None = None,
    ) -> None:
        self._line = Line(url, connect_s=connect_s, answer_s=answer_s)
        self._answer_s = answer_s
        self._breaker = breaker or Breaker(FAILURES, PAUSE_S)
        self._now_ms = now_ms
        self._validator = Validator()
        self._calls_by_digest = True
        self._told: set[tuple[str, str]] = set()
        self._doubtful: dict[RequestId, OrganizationId] = {}
        self._clearing: asyncio.Task[None] | None = None
        self._admit = load("admit")
        self._raise = load("raise")
        self._report = load("report")
        self._settle = load("settle")
        self._cancel = load("cancel")
        self._reap = load("reap")
        self._look = load("look")
        self._begin = load("begin")
        self._held = load("held")
        self._age = load("age")

    @property
    def is_down(self) -> bool:
        """Redis did not answer lately, or said no, and has not run a script since."""
        return self._breaker.is_open

    async def check(self, ask: Ask) -> Verdict:
        return await self._asked(ask, is_trial=1)

    async def admit(self, ask: Ask) -> Verdict:
        self._doubtful.pop(ask.request_id, None)
        try:
            return await self._asked(ask, is_trial=0)
        except LimitsUnavailable as e:
            if e.__cause__ is not None:  # else Redis was not even asked
                self._doubt(ask)
            raise
        except asyncio.CancelledError:
            self._doubt(ask)
            raise

    async def raise_output(
        self, organization_id: OrganizationId, request_id: RequestId, wanted: int, quotas: Sequence[Quota] = ()
    ) -> int | None:
        of = prefix(organization_id)
        changed = {
            of + quota_name(quota.key): (int(quota.is_shadow), quota.amount, int(quota.is_hard)) for quota in quotas
        }
        granted: int = await self._run(self._raise, of, ("epoch",), request_id, wanted, changed)
        return None if granted < 0 else granted

    async def report(
        self, organization_id: OrganizationId, outputs: Mapping[RequestId, int], lease_ms: int
    ) -> Sequence[RequestId]:
        flat = [word for item in outputs.items() for word in item]
        missing = await self._run(self._report, prefix(organization_id), (), lease_ms, flat)
        requests = list(outputs)
        return [requests[index] for index in missing]

    async def settle(
        self, organization_id: OrganizationId, request_id: RequestId, usage: TokenUsage
    ) -> Settlement | None:
        tokens = (usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens)
        keys = (f"done:{request_id}",)
        return settlement_of(await self._run(self._settle, prefix(organization_id), keys, request_id, *tokens))

    async def cancel(self, organization_id: OrganizationId, request_id: RequestId) -> bool:
        keys = (f"done:{request_id}",)
        return bool(await self._run(self._cancel, prefix(organization_id), keys, request_id))

    async def reap(self, organization_id: OrganizationId, most: int) -> Sequence[RequestId]:
        requests = await self._run(self._reap, prefix(organization_id), (), most)
        return [RequestId(request.decode()) for request in requests]

    async def look(self, organization_id: OrganizationId, uses: Sequence[Use]) -> Sequence[int]:
        names, figures = zip(*map(packed, uses), strict=True) if uses else ((), ())
        left: list[int] = await self._run(self._look, prefix(organization_id), names, figures)
        return left

    async def begin_epoch(
        self,
        organization_id: OrganizationId,
        committed: Mapping[str, int],
        reservations: Sequence[Reservation],
        *,
        view: str = "",
        settled: Collection[RequestId] = (),
        is_whole: bool = True,
        num_parts: int = 0,
    ) -> bool:
        names = {"epoch": 3, "told": 4, f"staged:{view}": 5}
        """With their index among the keys."""

        def index(name: str) -> int:
            return names.setdefault(name, len(names) + 3)

        amounts = [(index(quota_name(key)), amount) for key, amount in committed.items()]
        running = []
        for each in reservations:
            ask = each.ask
            validate(ask)
            if ask.organization_id != organization_id or len(each.reserved) != len(ask.uses):
                raise ValueError(f"{ask.request_id} is no reservation of {organization_id}")
            uses = [packed(use) for use in ask.uses]
            held = {
                "owner": ask.owner,
                "prompt": ask.prompt_tokens,
                "granted": each.granted_output,
                "reported": each.reported_output,
                "uses": [figures for _, figures in uses],
                "reserved": each.reserved,
            }
            running.append((ask.request_id, ask.lease_ms, held, [index(name) for name, _ in uses]))
        of, ended = prefix(organization_id), list(settled)
        told = (amounts, running, ended, int(is_whole), num_parts)
        return bool(await self._run(self._begin, of, tuple(names), *told))

    async def held(self, organization_id: OrganizationId, owner: str = "") -> Sequence[RequestId]:
        held = await self._run(self._held, prefix(organization_id), (), owner)
        return [RequestId(request_id.decode()) for request_id in held]

    async def born_ms(self) -> int | None:
        return (await self._life())[0]

    async def age_ms(self) -> int | None:
        return (await self._life())[1]

    async def close(self) -> None:
        if self._clearing is not None:
            self._clearing.cancel()
            await asyncio.gather(self._clearing, return_exceptions=True)
        await self._line.close()

    async def _life(self) -> tuple[int, int]:
        """When it began, and how long ago that is."""
        born_ms, age_ms = await self._run(self._age, prefix(OrganizationId("")), ("begun",))
        return born_ms, age_ms

    async def _asked(self, ask: Ask, *, is_trial: int) -> Verdict:
        self._validator.validate(ask)
        uses = [packed(use) for use in ask.uses]
        answer = await self._run(
            self._admit,
            prefix(ask.organization_id),
            ["epoch", f"done:{ask.request_id}", *(name for name, _ in uses)],
            ask.request_id,
            ask.owner,
            ask.lease_ms,
            ask.prompt_tokens,
            ask.min_output,
            ask.expected_output,
            ask.max_output,
            [figures for _, figures in uses],
            is_trial,
        )
        self._line.heard_ms(answer[5])
        if answer[0] == TOO_LATE:
            raise LimitsUnavailable from TimeoutError("Redis was asked too long ago")
        return verdict_of(answer)

    async def _run(self, script: Script, of: str, names: Sequence[str], *arguments: Any) -> Any:
        """What the script answers. Keys: the two that each has, and those that are named."""
        ticket = self._breaker.enter()
        if ticket is None:
            raise LimitsUnavailable
        keys = [f"{of}held", f"{of}due", *(of + name for name in names)]
        try:
            if self._line.is_up:
                answer = await self._evaluate(script, keys, arguments)
            else:
                async with asyncio.timeout(self._answer_s):
                    await self._line.connect()
                    answer = await self._evaluate(script, keys, arguments)
        except ErrorReply as e:
            if "READONLY" in str(e):  # it is a replica by now; the address may lead to another one
                self._line.drop()
            kind = script.name, str(e).partition(" ")[0]
            if not any(state in str(e) for state in STATES) and kind not in self._told:
                self._told.add(kind)
                _log.error("Redis does not run %s.lua: %s", script.name, e)
            self._failed(ticket, e)
            raise LimitsUnavailable from e
        except OSError as e:
            self._failed(ticket, e)
            raise LimitsUnavailable from e
        except BaseException:
            self._breaker.left(ticket)
            raise
        if self._breaker.is_open:
            _log.warning("Redis answers again, so limits are checked")
        self._breaker.succeeded()
        if self._doubtful and self._clearing is None:
            self._clearing = asyncio.create_task(self._clear())
        return answer

    def _failed(self, ticket: int, e: Exception) -> None:
        was_down = self._breaker.is_open
        self._breaker.failed(ticket)
        if self._breaker.is_open and not was_down:
            says = "says no" if isinstance(e, ErrorReply) else "does not answer"
            _log.warning("Redis %s, so limits cannot be checked: %s", says, e)

    async def _evaluate(self, script: Script, keys: Sequence[str], arguments: Sequence[Any]) -> Any:
        now_ms = 0 if self._now_ms is None else self._now_ms()
        packed_arguments = _encode((now_ms, self._line.latest_ms(), self._line.run_id, *arguments))
        words: tuple[int | str | bytes, ...] = (len(keys), *keys, packed_arguments)
        if self._calls_by_digest:
            try:
                return await self._line.call("EVALSHA", script.sha, *words)
            except ErrorReply as e:
                reason = str(e)
                if "evalsha" in reason.lower():  # not allowed, or not known to what stands between us and Redis
                    self._calls_by_digest = False
                elif not reason.startswith("NOSCRIPT"):
                    raise
        return await self._line.call("EVAL", script.text, *words)

    def _doubt(self, ask: Ask) -> None:
        if len(self._doubtful) < MOST_DOUBTFUL:
            self._doubtful[ask.request_id] = ask.organization_id

    async def _clear(self) -> None:
        """Cancel what may have been admitted without anybody knowing, when Redis does not carry it out any more."""
        try:
            while self._doubtful:
                doubtful = list(self._doubtful.items())
                await asyncio.sleep(self._answer_s)
                for request_id, organization_id in doubtful:
                    if self._doubtful.pop(request_id, None) is not None:
                        await self._clear_one(organization_id, request_id)
        except LimitsUnavailable:
            pass  # begun anew when Redis answers again
        finally:
            self._clearing = None

    async def _clear_one(self, organization_id: OrganizationId, request_id: RequestId) -> None:
        try:
            await self.cancel(organization_id, request_id)
        except LimitsUnavailable:
            self._doubtful[request_id] = organization_id
            raise
