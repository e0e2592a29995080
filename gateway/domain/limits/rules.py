"""The rules of one step, as functions of what is known of the meters. What they stand at is told by whoever keeps them.

Where a meter *stands*: a bucket at its level in parts, at the moment (`level_at`); a quota at its amount less what is
committed and reserved; a lease at its limit less the requests that run.

What is decided here and said nowhere else, for every store:

- A level is clipped to the capacity and debt of whoever asks, then refilled at its rate. Only a charge or a refund is
  written: who only looks leaves the level and its time as they were.
- A settlement goes by the meters as the request was admitted with them. A bucket that was charged what the request has
  cost is left as it is.
- What a bucket is charged beyond its debt is not kept, so it is not given back either: in whole units, since what is
  reserved is whole. So it is with shadow buckets, and with requests that are made known again: those are charged anew.
- A check answers what was answered before to its request, or that the organization is lost, or reaps and decides: all
  in this order, and as an admission does.
- Those whose leases have run out are looked at in the order in which they did, so many at a time; who is spared then
  is not looked at again until the lease that it was given has run out.
- A request that has ended is answered as before and not made known again for as long as it is known; one that was
  cancelled never was. One that was reaped can be cancelled, which gives back what its buckets lost and its quotas
  committed.
- What a corrected request has forgiven is what its reaping forgave and what its correction did.
- The first whole `begin_epoch` sets the amounts that it and the parts of its view tell, the last of each quota, or
  leaves what is committed if that is more. A later one sets those of quotas that nobody told of and that have nothing
  committed. Of a request that is made known again, the answer tells nothing but the output granted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import sub
from typing import NamedTuple

import msgspec

from gateway.domain.limits.admission import Ask, Verdict
from gateway.domain.limits.meters import DIVISOR, MOST_TOKENS, PARTS, Bucket, Lease, Meter, Quota, Use, Weights
from gateway.domain.usage import TokenUsage


class Level(msgspec.Struct, gc=False):
    """What is kept of a bucket.

    Attributes:
        parts: how full it was at `at_ms`; below 0 in debt.
    """

    parts: int
    at_ms: int


class Decision(NamedTuple):
    """An answer, and what each use reserves by it: all 0 if the request is refused."""

    verdict: Verdict
    reserved: tuple[int, ...]


class _Refusal(NamedTuple):
    wait_ms: int | None = None
    is_never: bool = False


def level_at(bucket: Bucket, level: Level | None, now_ms: int) -> int:
    """In parts. A bucket that was never seen is full; time does not go back."""
    if level is None:
        return bucket.capacity * PARTS
    parts, passed_ms = level.parts, now_ms - level.at_ms
    if parts < 0:
        parts = max(parts, -bucket.max_debt * PARTS)
    if passed_ms > 0:
        parts += passed_ms * bucket.parts_per_ms
    return min(parts, bucket.capacity * PARTS)


def given_back(bucket: Bucket, parts: int, units: int) -> tuple[int, int]:
    """A bucket at that level gets units, or loses them if they are negative: its level then, and the units forgiven."""
    parts += units * PARTS
    if parts >= 0:
        return min(parts, bucket.capacity * PARTS), 0
    lowest = -bucket.max_debt * PARTS
    return max(parts, lowest), max(lowest - parts, 0) // PARTS


def can_take(bucket: Bucket, parts: int, units: int) -> int:
    """Of the units those that a bucket at that level can be charged before it is in debt all the way."""
    return min(units, (parts + bucket.max_debt * PARTS) // PARTS)


def most_output(weights: Weights, prompt_tokens: int, units: int) -> int:
    """The largest output that costs so much at most, together with its prompt; negative if there is none."""
    millionths = (units - weights.per_request) * DIVISOR - prompt_tokens * weights.prompt
    if millionths < 0 or weights.output == 0:
        return -1 if millionths < 0 else MOST_TOKENS
    return millionths // weights.output


def holdings(ask: Ask, output: int) -> tuple[int, ...]:
    """Of each use, what a request holds that was granted so much output. A bucket's part does not depend on it."""
    granted = TokenUsage(ask.prompt_tokens, output)
    return tuple(_holding(ask, use, granted) for use in ask.uses)


def charges(uses: Sequence[Use], usage: TokenUsage) -> tuple[int, ...]:
    """Of each use, what a request costs in the end."""
    return tuple([0 if isinstance(use.meter, Lease) else use.weights.cost(usage) for use in uses])


def decide(ask: Ask, standings: Sequence[int]) -> Decision:
    """
    Args:
        standings: where each of the uses' meters stands.
    """
    most = TokenUsage(ask.prompt_tokens, ask.max_output)
    expected = TokenUsage(ask.prompt_tokens, ask.expected_output)
    left: list[int] = []
    held: list[int] = []
    refusals: dict[int, _Refusal | None] = {}
    """Of those that have less than is wanted; None if that is no reason to refuse."""
    for index, (use, standing) in enumerate(zip(ask.uses, standings, strict=True)):
        meter = use.meter
        if isinstance(meter, Bucket):
            units = use.weights.cost(expected)
            if units > meter.capacity:
                units = _bucket_charge(ask, meter, use.weights)
            if units * PARTS > standing:
                refusals[index] = _bucket_refusal(ask, use, meter, standing, units)
            standing //= PARTS
        elif isinstance(meter, Quota):
            units = use.weights.cost(most)
            if units > standing and meter.is_hard:
                refusals[index] = _quota_refusal(ask, use, standing)
        else:
            units = 1
            if standing < 1:
                refusals[index] = _Refusal()
        left.append(standing)
        held.append(units)
    if not refusals:
        verdict = Verdict(is_admitted=True, granted_output=ask.max_output, remaining=tuple(map(sub, left, held)))
        return Decision(verdict, tuple(held))
    return _decided(ask, standings, left, refusals)


def _decided(
    ask: Ask, standings: Sequence[int], left: Sequence[int], refusals: Mapping[int, _Refusal | None]
) -> Decision:
    """Where something has less than is wanted."""
    is_shadow = {index: ask.uses[index].meter.is_shadow for index in refusals}
    shadow_refused = tuple(index for index, refusal in refusals.items() if refusal is not None and is_shadow[index])
    enforced = {index: each for index, each in refusals.items() if each is not None and not is_shadow[index]}
    if enforced:
        verdict = Verdict(
            is_admitted=False,
            binding=min(enforced),
            remaining=tuple(left),
            wait_ms=_wait_ms(list(enforced.values())),
            is_never=any(refusal.is_never for refusal in enforced.values()),
            shadow_refused=shadow_refused,
        )
        return Decision(verdict, (0,) * len(left))
    granted, binding = _granted(ask, standings)
    held = tuple(
        can_take(use.meter, standing, units) if isinstance(use.meter, Bucket) else units
        for use, standing, units in zip(ask.uses, standings, holdings(ask, granted), strict=True)
    )
    verdict = Verdict(
        is_admitted=True,
        granted_output=granted,
        binding=binding,
        remaining=tuple(map(sub, left, held)),
        shadow_refused=shadow_refused,
    )
    return Decision(verdict, held)


def raised(ask: Ask, granted: int, reserved: Sequence[int], standings: Sequence[int], wanted: int) -> int:
    """The output that a request may have which was granted so much and wants more, as far as its hard quotas allow."""
    reach = min(wanted, MOST_TOKENS - ask.prompt_tokens)
    for use, units, standing in zip(ask.uses, reserved, standings, strict=True):
        if is_exact(use.meter):
            reach = min(reach, most_output(use.weights, ask.prompt_tokens, standing + units))
    return max(reach, granted)


def never_takes(ask: Ask) -> int | None:
    """Index of the first enforced use that can never take the request, whatever is left; None if there is none."""
    return next((i for i, use in enumerate(ask.uses) if not use.meter.is_shadow and _is_never(ask, use)), None)


def is_exact(meter: Meter) -> bool:
    """Whether it is a hard quota, and enforced."""
    return isinstance(meter, Quota) and meter.is_hard and not meter.is_shadow


def whole(meter: Meter, standing: int) -> int:
    """Where it stands in its units, rounded down."""
    return standing // PARTS if isinstance(meter, Bucket) else standing


def _holding(ask: Ask, use: Use, granted: TokenUsage) -> int:
    match use.meter:
        case Bucket() as bucket:
            return _bucket_charge(ask, bucket, use.weights)
        case Quota():
            return use.weights.cost(granted)
        case Lease():
            return 1


def _bucket_charge(ask: Ask, bucket: Bucket, weights: Weights) -> int:
    prompt = weights.cost(TokenUsage(ask.prompt_tokens))
    return min(weights.cost(TokenUsage(ask.prompt_tokens, ask.expected_output)), max(bucket.capacity, prompt))


def _bucket_refusal(ask: Ask, use: Use, bucket: Bucket, standing: int, charge: int) -> _Refusal:
    """It has less than the charge, be it enforced or not."""
    if charge > bucket.capacity or bucket.refill == 0:
        return _Refusal(is_never=_is_never(ask, use))
    return _Refusal(wait_ms=-(-(charge * PARTS - standing) // bucket.parts_per_ms))


def _quota_refusal(ask: Ask, use: Use, standing: int) -> _Refusal | None:
    least = use.weights.cost(TokenUsage(ask.prompt_tokens, ask.min_output))
    return _Refusal(is_never=_is_never(ask, use)) if least > standing else None


def _is_never(ask: Ask, use: Use) -> bool:
    match use.meter:
        case Bucket() as bucket:
            return _bucket_charge(ask, bucket, use.weights) > bucket.capacity
        case Quota() as quota:
            return quota.is_hard and use.weights.cost(TokenUsage(ask.prompt_tokens, ask.min_output)) > quota.amount
        case Lease():
            return False


def _wait_ms(refusals: Sequence[_Refusal]) -> int | None:
    waits = [refusal.wait_ms for refusal in refusals if refusal.wait_ms is not None]
    return max(waits) if len(waits) == len(refusals) else None


def _granted(ask: Ask, standings: Sequence[int]) -> tuple[int, int | None]:
    """The output that all hard quotas have left, and which of them has less than was asked for, if one has."""
    granted, binding = ask.max_output, None
    for index, (use, standing) in enumerate(zip(ask.uses, standings, strict=True)):
        if is_exact(use.meter):
            output = most_output(use.weights, ask.prompt_tokens, standing)
            if output < granted:
                granted, binding = output, index
    return granted, binding
