"""What is known of one organization's meters and requests, in memory."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import msgspec

from gateway.domain.ids import RequestId
from gateway.domain.limits.admission import Ask, Reservation, Settlement, Verdict
from gateway.domain.limits.meters import Bucket, Lease, Quota, Use
from gateway.domain.limits.rules import can_take, charges, decide, is_exact, raised
from gateway.domain.usage import TokenUsage
from gateway.limits.kept_meters import KeptMeters
from gateway.limits.kept_requests import Ended, Held, KeptRequests

REAPED_PER_ASK = 8
STAGED_MS = 600_000


class _View(msgspec.Struct):
    at_ms: int
    amounts: dict[str, int]
    num_parts: int = 0


class Books:
    """What is known of one organization. A quota's `reserved` and a lease's count are the sums over what is held."""

    def __init__(self) -> None:
        self.is_begun = False
        self.meters = KeptMeters()
        self.requests = KeptRequests()
        self._staged: dict[str, _View] = {}

    def answer(self, ask: Ask, now_ms: int, *, is_binding: bool) -> Verdict:
        known = self.requests.known(ask.request_id)
        if known is not None:
            return known.verdict
        if not self.is_begun and any(is_exact(use.meter) for use in ask.uses):
            return Verdict(is_admitted=False, is_lost=True)
        if self.requests.has_due(now_ms):
            self.reap(REAPED_PER_ASK, now_ms)
        standings = self.meters.standings(ask.uses, now_ms)
        verdict, reserved = decide(ask, standings)
        if verdict.is_admitted and is_binding:
            self.meters.take(ask.uses, reserved, standings, now_ms)
            self.requests.hold(ask, verdict, reserved, now_ms)
            self.meters.forget(len(ask.uses) + 1, now_ms)
        return verdict

    def raise_output(self, request_id: RequestId, wanted: int, quotas: Sequence[Quota], now_ms: int) -> int | None:
        held = self.requests.held.get(request_id)
        if held is None:
            return None
        changed = {quota.key: quota for quota in quotas}
        uses = tuple(Use(changed.get(use.meter.key, use.meter), use.weights) for use in held.ask.uses)
        if not self.is_begun and any(is_exact(use.meter) for use in uses):
            return held.granted  # what is committed is not known
        ask = msgspec.structs.replace(held.ask, uses=uses)
        granted = raised(ask, held.granted, held.reserved, self.meters.standings(uses, now_ms), wanted)
        if granted > held.granted:
            costs = charges(uses, TokenUsage(held.ask.prompt_tokens, granted))
            reserved = list(held.reserved)
            for index, (use, cost) in enumerate(zip(uses, costs, strict=True)):
                if isinstance(use.meter, Quota):
                    self.meters.quota(use.meter.key, now_ms).reserved += cost - reserved[index]
                    reserved[index] = cost
            held.reserved = tuple(reserved)
            held.granted = granted
        return held.granted

    def report(self, outputs: Mapping[RequestId, int], lease_ms: int, now_ms: int) -> list[RequestId]:
        missing: list[RequestId] = []
        for request_id, output in outputs.items():
            held = self.requests.held.get(request_id)
            if held is None:
                missing.append(request_id)
                continue
            self.requests.heard(held, output, lease_ms, now_ms)
        return missing

    def settle(self, request_id: RequestId, usage: TokenUsage, now_ms: int) -> Settlement | None:
        held = self.requests.held.pop(request_id, None)
        if held is not None:
            return self._settle(held, usage, now_ms, was_reaped=False)
        reaped = self.requests.reaped.pop(request_id, None)
        if reaped is not None:
            was = reaped.settlement
            charged = charges(reaped.uses, usage)
            forgiven = self.meters.change(reaped.uses, (0,) * len(charged), was.charged, charged, now_ms)
            total = tuple(map(sum, zip(was.forgiven, forgiven, strict=True)))
            reaped.settlement = Settlement(charged=charged, forgiven=total, was_reaped=True)
            self.requests.bury_settled(request_id, reaped, now_ms)
            return reaped.settlement
        settled = self.requests.settled.get(request_id)
        return None if settled is None else msgspec.structs.replace(settled.settlement, was_settled=True)

    def cancel(self, request_id: RequestId, now_ms: int) -> bool:
        """One that was reaped has done nothing either, if its owner says so."""
        held = self.requests.held.pop(request_id, None)
        if held is not None:
            nothing = (0,) * len(held.reserved)
            self.meters.change(held.ask.uses, held.reserved, nothing, nothing, now_ms)
            return True
        reaped = self.requests.reaped.pop(request_id, None)
        if reaped is None:
            return False
        lost = tuple(map(int.__sub__, reaped.settlement.charged, reaped.settlement.forgiven))
        nothing = (0,) * len(lost)
        self.meters.change(reaped.uses, nothing, lost, nothing, now_ms)
        return True

    def reap(self, most: int, now_ms: int) -> list[RequestId]:
        reaped: list[RequestId] = []
        for held in self.requests.expired(most, now_ms):
            self._settle(held, TokenUsage(held.ask.prompt_tokens, held.reported), now_ms, was_reaped=True)
            reaped.append(held.ask.request_id)
        return reaped

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
            del self._staged[view]
            if num_parts in (0, kept.num_parts):
                self._tell(kept.amounts, settled, now_ms)
        else:
            kept.num_parts += 1
        for each in reservations:
            ask = each.ask
            if self.requests.known(ask.request_id) is None:
                verdict = Verdict(is_admitted=True, granted_output=each.granted_output)
                standings = self.meters.standings(ask.uses, now_ms)
                pairs = zip(ask.uses, standings, each.reserved, strict=True)
                taken = [
                    can_take(use.meter, standing, units) if isinstance(use.meter, Bucket) else units
                    for use, standing, units in pairs
                ]
                self.meters.take(ask.uses, taken, standings, now_ms)
                self.requests.hold(ask, verdict, tuple(taken), now_ms).reported = each.reported_output

    def _stage(self, view: str, committed: Mapping[str, int], now_ms: int) -> _View:
        self._staged = {name: kept for name, kept in self._staged.items() if now_ms - kept.at_ms < STAGED_MS}
        kept = self._staged.setdefault(view, _View(now_ms, {}))
        kept.at_ms = now_ms
        kept.amounts.update(committed)
        return kept

    def _tell(self, committed: Mapping[str, int], settled: Collection[RequestId], now_ms: int) -> None:
        counted: set[str] = set()
        for key, amount in committed.items():
            quota = self.meters.quota(key, now_ms)
            if not self.is_begun and quota.committed > amount:
                counted.add(key)
            elif not self.is_begun or not (quota.is_told or quota.committed):
                quota.committed = amount
            quota.is_told = True
        if not self.is_begun:
            for request_id in settled:
                held = self.requests.held.get(request_id)
                if held is not None and not any(use.meter.key in counted for use in held.ask.uses):
                    self._drop(held, now_ms)
            self.is_begun = True

    def _drop(self, held: Held, now_ms: int) -> None:
        """It is part of what is committed; what its buckets were charged has to do for them."""
        del self.requests.held[held.ask.request_id]
        uses, reserved = held.ask.uses, held.reserved
        nothing = (0,) * len(uses)
        for use, units in zip(uses, reserved, strict=True):
            if not isinstance(use.meter, Bucket):  # which a charge of nothing would clip to what it was at admission
                self.meters.change([use], [units], [0], [0], now_ms)
        charged = tuple(0 if isinstance(use.meter, Lease) else units for use, units in zip(uses, reserved, strict=True))
        settlement = Settlement(charged=charged, forgiven=nothing)
        self.requests.bury_settled(held.ask.request_id, Ended(uses, held.verdict, settlement), now_ms)

    def _settle(self, held: Held, usage: TokenUsage, now_ms: int, *, was_reaped: bool) -> Settlement:
        uses = held.ask.uses
        charged = charges(uses, usage)
        forgiven = self.meters.change(uses, held.reserved, (0,) * len(charged), charged, now_ms)
        settlement = Settlement(charged=charged, forgiven=forgiven)
        bury = self.requests.bury_reaped if was_reaped else self.requests.bury_settled
        bury(held.ask.request_id, Ended(uses, held.verdict, settlement), now_ms)
        return settlement
