"""What is known of one organization's meters and requests, in memory."""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence

import msgspec

from gateway.domain.ids import RequestId
from gateway.domain.limits.admission import Ask, Reservation, Settlement, Verdict
from gateway.domain.limits.meters import PARTS, Bucket, Lease, Meter, Quota, Use
from gateway.domain.limits.rules import Level, can_take, charges, decide, given_back, is_exact, level_at, raised
from gateway.domain.usage import TokenUsage

REAPED_PER_ASK = 8
SETTLED_KEPT_MS = 600_000
REAPED_KEPT_MS = 3_600_000
MOST_KEPT = 50_000
"""Ended requests of an organization, settled and reaped ones each; then the oldest are forgotten before their time."""
STAGED_MS = 600_000
BUCKET_IDLE_MS = 7 * 86_400_000
"""A bucket that nobody touched for so long is forgotten if it is full."""
QUOTA_IDLE_MS = 40 * 86_400_000
"""A quota likewise, if nothing is reserved: longer than any period, so nobody asks for it again."""


class _KeptBucket(msgspec.Struct, gc=False):
    """`meter` is as it was last charged, to tell whether it is full."""

    level: Level
    meter: Bucket


class _KeptQuota(msgspec.Struct):
    at_ms: int
    committed: int = 0
    reserved: int = 0
    is_told: bool = False


class _View(msgspec.Struct):
    at_ms: int
    amounts: dict[str, int]
    num_parts: int = 0


class _Held(msgspec.Struct, gc=False):
    """A request that was admitted and has not ended.

    Attributes:
        reserved: of each use.
        reported: its output as last told.
        looked_at_ms: when its lease is looked at next, not after it runs out; the only entry in the heap that counts.
        heard_at_ms: when its owner was last heard of it; None if it has been spared since.
    """

    ask: Ask
    verdict: Verdict
    granted: int
    reserved: tuple[int, ...]
    reported: int
    lease_ms: int
    expires_at_ms: int
    looked_at_ms: int
    heard_at_ms: int | None


class _Ended(msgspec.Struct, gc=False):
    uses: tuple[Use, ...]
    verdict: Verdict
    settlement: Settlement
    kept_until_ms: int


class Books:
    """What is known of one organization.

    Invariants: a quota's `reserved` and a lease's count are the sums over `held`. In `settled` and `reaped` those that
    are forgotten first come first.

    Attributes:
        back_at_ms: when it was last asked again after a silence of more than half a lease.
    """

    def __init__(self) -> None:
        self.is_begun = False
        self.asked_at_ms: int | None = None
        self.lease_ms = 0
        self.back_at_ms: int | None = None
        self.buckets: OrderedDict[str, _KeptBucket] = OrderedDict()
        self.quotas: OrderedDict[str, _KeptQuota] = OrderedDict()
        self.leases: dict[str, int] = {}
        self.held: dict[RequestId, _Held] = {}
        self.staged: dict[str, _View] = {}
        self.looks: list[tuple[int, RequestId]] = []
        self.settled: OrderedDict[RequestId, _Ended] = OrderedDict()
        self.reaped: OrderedDict[RequestId, _Ended] = OrderedDict()

    def note_asked(self, now_ms: int) -> None:
        """To be called with every question: nobody may have been able to report while there was none."""
        if self.asked_at_ms is not None and 2 * (now_ms - self.asked_at_ms) > self.lease_ms:
            self.back_at_ms = now_ms
        self.asked_at_ms = now_ms

    def answer(self, ask: Ask, now_ms: int, *, is_binding: bool) -> Verdict:
        known = self.held.get(ask.request_id) or self._ended(ask.request_id)
        if known is not None:
            return known.verdict
        if not self.is_begun and any(is_exact(use.meter) for use in ask.uses):
            return Verdict(is_admitted=False, is_lost=True)
        self.reap(REAPED_PER_ASK, now_ms)
        standings = self._standings(ask.uses, now_ms)
        verdict, reserved = decide(ask, standings)
        if verdict.is_admitted and is_binding:
            self._hold(ask, verdict, reserved, standings, now_ms)
            self._forget(len(ask.uses) + 1, now_ms)
        return verdict

    def raise_output(self, request_id: RequestId, wanted: int, quotas: Sequence[Quota], now_ms: int) -> int | None:
        held = self.held.get(request_id)
        if held is None:
            return None
        changed = {quota.key: quota for quota in quotas}
        uses = tuple(Use(changed.get(use.meter.key, use.meter), use.weights) for use in held.ask.uses)
        if not self.is_begun and any(is_exact(use.meter) for use in uses):
            return held.granted  # what is committed is not known
        ask = msgspec.structs.replace(held.ask, uses=uses)
        granted = raised(ask, held.granted, held.reserved, self._standings(uses, now_ms), wanted)
        if granted > held.granted:
            costs = charges(uses, TokenUsage(held.ask.prompt_tokens, granted))
            reserved = list(held.reserved)
            for index, (use, cost) in enumerate(zip(uses, costs, strict=True)):
                if isinstance(use.meter, Quota):
                    self._quota(use.meter.key, now_ms).reserved += cost - reserved[index]
                    reserved[index] = cost
            held.reserved = tuple(reserved)
            held.granted = granted
        return held.granted

    def report(self, outputs: Mapping[RequestId, int], lease_ms: int, now_ms: int) -> list[RequestId]:
        missing: list[RequestId] = []
        for request_id, output in outputs.items():
            held = self.held.get(request_id)
            if held is None:
                missing.append(request_id)
                continue
            self.lease_ms = held.lease_ms = lease_ms
            held.reported = max(held.reported, output)
            held.heard_at_ms, held.expires_at_ms = now_ms, now_ms + lease_ms
            if held.expires_at_ms < held.looked_at_ms:
                self._look_at(held)
        return missing

    def settle(self, request_id: RequestId, usage: TokenUsage, now_ms: int) -> Settlement | None:
        held = self.held.pop(request_id, None)
        if held is not None:
            return self._settle(held, usage, now_ms, was_reaped=False)
        reaped = self.reaped.pop(request_id, None)
        if reaped is not None:
            was = reaped.settlement
            charged = charges(reaped.uses, usage)
            forgiven = self._change(reaped.uses, (0,) * len(charged), was.charged, charged, now_ms)
            total = tuple(map(sum, zip(was.forgiven, forgiven, strict=True)))
            reaped.settlement = Settlement(charged=charged, forgiven=total, was_reaped=True)
            reaped.kept_until_ms = now_ms + SETTLED_KEPT_MS
            self._bury(self.settled, request_id, reaped, now_ms)
            return reaped.settlement
        settled = self.settled.get(request_id)
        return None if settled is None else msgspec.structs.replace(settled.settlement, was_settled=True)

    def cancel(self, request_id: RequestId, now_ms: int) -> bool:
        """One that was reaped has done nothing either, if its owner says so."""
        held = self.held.pop(request_id, None)
        if held is not None:
            nothing = (0,) * len(held.reserved)
            self._change(held.ask.uses, held.reserved, nothing, nothing, now_ms)
            return True
        reaped = self.reaped.pop(request_id, None)
        if reaped is None:
            return False
        lost = tuple(map(int.__sub__, reaped.settlement.charged, reaped.settlement.forgiven))
        nothing = (0,) * len(lost)
        self._change(reaped.uses, nothing, lost, nothing, now_ms)
        return True

    def reap(self, most: int, now_ms: int) -> list[RequestId]:
        reaped: list[RequestId] = []
        for _ in range(most):
            held = self._expired(now_ms)
            if held is None:
                break
            if self._is_spared(held, now_ms):
                self._look_at(held)
                continue
            del self.held[held.ask.request_id]
            self._settle(held, TokenUsage(held.ask.prompt_tokens, held.reported), now_ms, was_reaped=True)
            reaped.append(held.ask.request_id)
        return reaped

    def standing(self, meter: Meter, now_ms: int) -> int:
        if isinstance(meter, Bucket):
            bucket = self.buckets.get(meter.key)
            return level_at(meter, None if bucket is None else bucket.level, now_ms)
        if isinstance(meter, Quota):
            quota = self.quotas.get(meter.key)
            return meter.amount if quota is None else meter.amount - quota.committed - quota.reserved
        return meter.limit - self.leases.get(meter.key, 0)

    def begin_epoch(
        self,
        committed: Mapping[str, int],
        reservations: Sequence[Reservation],
        settled: Collection[RequestId],
        now_ms: int,
        *,
        view: str,
        is_whole: bool,
        num_parts: int,
    ) -> None:
        """The first who comes tells all that is committed, what was settled before it included. Later ones are heard of
        quotas that nobody told of and nothing is committed to: new ones."""
        kept = self._stage(view, committed, now_ms)
        if is_whole:
            del self.staged[view]
            if num_parts in (0, kept.num_parts):
                self._tell(kept.amounts, settled, now_ms)
        else:
            kept.num_parts += 1
        for each in reservations:
            ask = each.ask
            if ask.request_id not in self.held and self._ended(ask.request_id) is None:
                verdict = Verdict(is_admitted=True, granted_output=each.granted_output)
                standings = self._standings(ask.uses, now_ms)
                pairs = zip(ask.uses, standings, each.reserved, strict=True)
                taken = [
                    can_take(use.meter, standing, units) if isinstance(use.meter, Bucket) else units
                    for use, standing, units in pairs
                ]
                self._hold(ask, verdict, taken, standings, now_ms)
                self.held[ask.request_id].reported = each.reported_output

    def _stage(self, view: str, committed: Mapping[str, int], now_ms: int) -> _View:
        self.staged = {name: kept for name, kept in self.staged.items() if now_ms - kept.at_ms < STAGED_MS}
        kept = self.staged.setdefault(view, _View(now_ms, {}))
        kept.at_ms = now_ms
        kept.amounts.update(committed)
        return kept

    def _tell(self, committed: Mapping[str, int], settled: Collection[RequestId], now_ms: int) -> None:
        counted: set[str] = set()
        for key, amount in committed.items():
            quota = self._quota(key, now_ms)
            if not self.is_begun and quota.committed > amount:
                counted.add(key)
            elif not self.is_begun or not (quota.is_told or quota.committed):
                quota.committed = amount
            quota.is_told = True
        if not self.is_begun:
            for request_id in settled:
                held = self.held.get(request_id)
                if held is not None and not any(use.meter.key in counted for use in held.ask.uses):
                    self._drop(held, now_ms)
            self.is_begun = True

    def _drop(self, held: _Held, now_ms: int) -> None:
        """It is part of what is committed; what its buckets were charged has to do for them."""
        del self.held[held.ask.request_id]
        uses, reserved = held.ask.uses, held.reserved
        nothing = (0,) * len(uses)
        for use, units in zip(uses, reserved, strict=True):
            if not isinstance(use.meter, Bucket):  # which a charge of nothing would clip to what it was at admission
                self._change([use], [units], [0], [0], now_ms)
        charged = tuple(0 if isinstance(use.meter, Lease) else units for use, units in zip(uses, reserved, strict=True))
        settlement = Settlement(charged=charged, forgiven=nothing)
        ended = _Ended(uses, held.verdict, settlement, now_ms + SETTLED_KEPT_MS)
        self._bury(self.settled, held.ask.request_id, ended, now_ms)

    def _standings(self, uses: Sequence[Use], now_ms: int) -> list[int]:
        return [self.standing(use.meter, now_ms) for use in uses]

    def _hold(self, ask: Ask, verdict: Verdict, reserved: Sequence[int], standings: Sequence[int], now_ms: int) -> None:
        """
        Args:
            reserved: of each use, and of a bucket no more than it can take.
        """
        for use, units, standing in zip(ask.uses, reserved, standings, strict=True):
            meter = use.meter
            if isinstance(meter, Bucket):
                self._fill(meter, standing - units * PARTS, now_ms)
            elif isinstance(meter, Quota):
                self._quota(meter.key, now_ms).reserved += units
            else:
                self.leases[meter.key] = self.leases.get(meter.key, 0) + units
        self.lease_ms, due_ms = ask.lease_ms, now_ms + ask.lease_ms
        granted = verdict.granted_output
        held = _Held(ask, verdict, granted, tuple(reserved), 0, ask.lease_ms, due_ms, due_ms, now_ms)
        self.held[ask.request_id] = held
        self._look_at(held)

    def _settle(self, held: _Held, usage: TokenUsage, now_ms: int, *, was_reaped: bool) -> Settlement:
        uses = held.ask.uses
        charged = charges(uses, usage)
        forgiven = self._change(uses, held.reserved, (0,) * len(charged), charged, now_ms)
        settlement = Settlement(charged=charged, forgiven=forgiven)
        kept_ms, graves = (REAPED_KEPT_MS, self.reaped) if was_reaped else (SETTLED_KEPT_MS, self.settled)
        self._bury(graves, held.ask.request_id, _Ended(uses, held.verdict, settlement, now_ms + kept_ms), now_ms)
        return settlement

    def _change(
        self, uses: Sequence[Use], freed: Sequence[int], charged: Sequence[int], charge: Sequence[int], now_ms: int
    ) -> tuple[int, ...]:
        """Of each use: what is no longer reserved, what had been charged, and what is charged instead of both.

        Returns what is forgiven.
        """
        forgiven = [0] * len(uses)
        for index, use in enumerate(uses):
            meter, free = use.meter, freed[index]
            if isinstance(meter, Bucket):
                parts, units = self.standing(meter, now_ms), free + charged[index] - charge[index]
                parts, forgiven[index] = given_back(meter, parts, units)
                self._fill(meter, parts, now_ms)
            elif isinstance(meter, Quota):
                quota = self._quota(meter.key, now_ms)
                quota.reserved -= free
                quota.committed += charge[index] - charged[index]
            elif free:
                left = self.leases[meter.key] = self.leases[meter.key] - free
                if not left:
                    del self.leases[meter.key]
        return tuple(forgiven)

    def _fill(self, bucket: Bucket, parts: int, now_ms: int) -> None:
        """Set its level, which was that of the moment."""
        key = bucket.key
        kept = self.buckets.get(key)
        at_ms = now_ms if kept is None else max(now_ms, kept.level.at_ms)
        self.buckets[key] = _KeptBucket(Level(parts, at_ms), bucket)
        self.buckets.move_to_end(key)

    def _quota(self, key: str, now_ms: int) -> _KeptQuota:
        """To be changed."""
        quota = self.quotas.get(key)
        if quota is None:
            quota = self.quotas[key] = _KeptQuota(now_ms)
        quota.at_ms = now_ms
        self.quotas.move_to_end(key)
        return quota

    def _look_at(self, held: _Held) -> None:
        """When its lease runs out, as it is now."""
        held.looked_at_ms = held.expires_at_ms
        heapq.heappush(self.looks, (held.expires_at_ms, held.ask.request_id))

    def _expired(self, now_ms: int) -> _Held | None:
        """Of those whose lease has run out the one that did first; it is not looked at again."""
        while self.looks and self.looks[0][0] <= now_ms:
            at_ms, request_id = heapq.heappop(self.looks)
            held = self.held.get(request_id)
            if held is None or held.looked_at_ms != at_ms:
                continue
            if held.expires_at_ms == at_ms:
                return held
            self._look_at(held)
        return None

    def _is_spared(self, held: _Held, now_ms: int) -> bool:
        """Whether the lease has another whole time to run since the silence after which nothing was heard yet; once."""
        back, heard = self.back_at_ms, held.heard_at_ms
        if back is None or heard is None or heard >= back or back + held.lease_ms <= now_ms:
            return False
        held.heard_at_ms, held.expires_at_ms = None, back + held.lease_ms
        return True

    def _ended(self, request_id: RequestId) -> _Ended | None:
        return self.settled.get(request_id) or self.reaped.get(request_id)

    @staticmethod
    def _bury(graves: OrderedDict[RequestId, _Ended], request_id: RequestId, ended: _Ended, now_ms: int) -> None:
        graves[request_id] = ended
        while len(graves) > MOST_KEPT or next(iter(graves.values())).kept_until_ms <= now_ms:
            graves.popitem(last=False)

    def _forget(self, num: int, now_ms: int) -> None:
        """Look at some of the meters that nobody touched for longest: at more than one request can add."""
        for _ in range(num):
            if not self.buckets or now_ms - next(iter(self.buckets.values())).level.at_ms < BUCKET_IDLE_MS:
                break
            key, bucket = self.buckets.popitem(last=False)
            if level_at(bucket.meter, bucket.level, now_ms) < bucket.meter.capacity * PARTS:
                self.buckets[key] = bucket
        for _ in range(num):
            if not self.quotas or now_ms - next(iter(self.quotas.values())).at_ms < QUOTA_IDLE_MS:
                break
            key, quota = self.quotas.popitem(last=False)
            if quota.reserved:
                self.quotas[key] = quota
