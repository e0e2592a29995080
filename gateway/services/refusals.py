"""What a caller is told whom a limit refuses, and refusals that need not be asked for again."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

from gateway.domain.ids import KeyId
from gateway.domain.limits.admission import Ask, Verdict
from gateway.domain.limits.meters import Bucket, Lease, Quota, Use
from gateway.domain.limits.plan import Metered, MeterPlan
from gateway.domain.limits.policy import Limit, RequestRate
from gateway.domain.limits.rules import holdings, never_takes
from gateway.domain.usage import TokenUsage
from gateway.errors import ConcurrencyExceeded, LimitExceeded, QuotaExceeded, ReachedLimit

REMEMBERED_S = 0.25
QUOTA_REMEMBERED_S = 0.05
"""Other processes may give something back at any time, while rates come back in their own."""
MOST_REMEMBERED = 10_000
CONCURRENCY_RETRY_MS = 1_000
"""Nobody can tell when a request ends; clients ask again after about so long."""

Place = tuple[KeyId, str]
"""A key and a model."""


class _Remembered(NamedTuple):
    until_s: float
    plan: MeterPlan
    at: int
    wait_until_s: float | None
    remaining: int
    is_by_share: bool


class RefusalMemory:
    """Repeats a refusal for a moment without asking, so that a storm of retries does not reach the store.

    Only such refusals as hold for a request of any size, and until a request of this process gives something back. A
    permission is never remembered.
    """

    def __init__(self) -> None:
        self._kept: OrderedDict[Place, _Remembered] = OrderedDict()
        self._places: dict[str, set[Place]] = {}  # by the key of the meter that refused

    def __len__(self) -> int:
        return len(self._kept)

    def find(self, place: Place, plan: MeterPlan, now_s: float) -> tuple[int, int, int | None, bool] | None:
        """Index of the limit that still refuses, what it has left, the wait in ms, and whether a share refused; None if
        it may not any more."""
        kept = self._kept.get(place)
        if kept is None:
            return None
        if now_s >= kept.until_s or kept.plan is not plan:
            self._drop(place)
            return None
        wait_ms = None if kept.wait_until_s is None else max(1, round((kept.wait_until_s - now_s) * 1000))
        return kept.at, kept.remaining, wait_ms, kept.is_by_share

    def keep(
        self,
        place: Place,
        plan: MeterPlan,
        index: int,
        remaining: int,
        wait_ms: int | None,
        now_s: float,
        *,
        is_by_share: bool = False,
    ) -> None:
        meter = plan.uses[index].meter
        if remaining > 0 or isinstance(meter, Lease):
            return
        until_s = now_s + (QUOTA_REMEMBERED_S if isinstance(meter, Quota) else REMEMBERED_S)
        if isinstance(meter, Bucket) and meter.refill:
            # Not until the smallest request might be taken.
            until_s = min(until_s, now_s + (1 - remaining) * meter.period_ms / meter.refill / 2000)
        wait_until_s = None if wait_ms is None else now_s + wait_ms / 1000
        if place in self._kept:
            self._drop(place)
        self._kept[place] = _Remembered(until_s, plan, index, wait_until_s, remaining, is_by_share)
        self._places.setdefault(meter.key, set()).add(place)
        if len(self._kept) > MOST_REMEMBERED:
            self._drop(next(iter(self._kept)))

    def forget(self, uses: Sequence[Use]) -> None:
        """A request that held something of these has ended: there may be room again."""
        if self._kept:
            for use in uses:
                for place in tuple(self._places.get(use.meter.key, ())):
                    self._drop(place)

    def _drop(self, place: Place) -> None:
        kept = self._kept.pop(place)
        key = kept.plan.uses[kept.at].meter.key
        places = self._places[key]
        places.discard(place)
        if not places:
            del self._places[key]


def gravest(ask: Ask, verdict: Verdict) -> tuple[int, int | None]:
    """Of all that refuse a request the use that its caller is told of, as an index: what waiting never helps against
    comes first, then a hard quota, a number of requests, and the bucket with the longest wait.

    Returns also the least units that the request needs of a use that can never take it; None of any other.
    """
    never = never_takes(ask)
    if never is not None:
        return never, _least(ask, ask.uses[never])
    first = verdict.binding
    assert first is not None, "a refusal names what refuses"
    if verdict.is_by_share:
        return first, None  # what is left is told of shares, whose amounts are not known here
    held = holdings(ask, ask.max_output)
    gravities = [
        (_gravity(ask, use, units, left), -index)
        for index, (use, units, left) in enumerate(zip(ask.uses, held, verdict.remaining, strict=True))
    ]
    gravity, index = max(gravities)
    return (first if gravity == _NONE else -index), None


_NONE = (0, 0.0)


def _gravity(ask: Ask, use: Use, units: int, left: int) -> tuple[int, float]:
    """Higher of what refuses more gravely; `_NONE` if it does not refuse."""
    if use.meter.is_shadow:
        return _NONE
    match use.meter:
        case Quota(is_hard=is_hard):
            return (3, 0.0) if is_hard and _least(ask, use) > left else _NONE
        case Lease():
            return (2, 0.0) if left < 1 else _NONE
        case Bucket(parts_per_ms=parts_per_ms):
            if units <= left:
                return _NONE
            return 1, (units - left) / parts_per_ms if parts_per_ms else math.inf


def _least(ask: Ask, use: Use) -> int:
    """Units without which the use does not take the request."""
    output = ask.min_output if isinstance(use.meter, Quota) else 0
    return use.weights.cost(TokenUsage(ask.prompt_tokens, output))


def refusal(
    metered: Metered, remaining: int, wait_ms: int | None, *, needed: int | None = None, is_by_share: bool = False
) -> LimitExceeded:
    """What a caller is told whom this limit refuses.

    Args:
        needed: more than it ever allows, which the request needs at least.
        is_by_share: `remaining` is of this process's share of it.
    """
    limit, meter = metered.limit, metered.use.meter
    whose = f"{limit.scope}'s" + ("" if limit.model is None else f" ({limit.model})")
    match meter:
        case Bucket(capacity=amount):
            full_ms = -(-(amount - remaining) * meter.period_ms // meter.refill) if meter.refill else None
            reached = _reached(limit, amount, remaining, wait_ms, full_ms)
            if needed is not None and isinstance(limit.rule, RequestRate):
                sentence = f"The {whose} limit '{limit.name}' allows no requests."
            elif needed is not None:
                sentence = (
                    f"The request is larger than the {whose} limit '{limit.name}' ever allows at once ({amount}): it "
                    f"needs at least {needed}. Please send a shorter prompt."
                )
            else:
                left = f"left of this server's share of {amount}" if is_by_share else f"of {amount} left"
                sentence = f"The {whose} limit '{limit.name}' is reached ({max(remaining, 0)} {left})."
                sentence += "" if wait_ms is None else f" Please try again in {wait_ms / 1000:.3f} s."
            # A rate that is not refilled has no more by itself, however often it is asked for.
            error = LimitExceeded(sentence, reached, is_never=needed is not None or not meter.refill)
        case Lease(limit=0):
            sentence = f"The {whose} limit '{limit.name}' allows no requests."
            error = ConcurrencyExceeded(sentence, _reached(limit, 0, remaining, None), is_never=True)
        case Lease(limit=amount):
            subject = f"This server's share of the {whose}" if is_by_share else f"The {whose}"
            error = ConcurrencyExceeded(
                f"{subject} limit of {amount} requests at a time is reached. Please try again when one has ended.",
                _reached(limit, amount, remaining, CONCURRENCY_RETRY_MS),
            )
        case Quota(amount=amount):
            period = "" if metered.period is None else f" of {metered.period.id}"
            quota = f"the {whose} quota '{limit.name}'{period}"
            if needed is None:
                sentence = f"T{quota[1:]} has {max(remaining, 0)} of {amount} left, less than the request needs."
            elif amount == 0:
                sentence = f"T{quota[1:]} allows nothing."
            else:
                sentence = (
                    f"The request is larger than {quota} ever allows ({amount}): it needs at least {needed}. Please "
                    "send a shorter prompt."
                )
            error = QuotaExceeded(sentence, _reached(limit, amount, remaining, wait_ms))
    error.is_by_share = is_by_share
    return error


def _reached(
    limit: Limit, amount: int, remaining: int, wait_ms: int | None, full_ms: int | None = None
) -> ReachedLimit:
    return ReachedLimit(
        name=limit.name,
        scope=limit.scope,
        model=limit.model,
        amount=amount,
        remaining=remaining,
        wait_ms=wait_ms,
        full_ms=full_ms,
    )
