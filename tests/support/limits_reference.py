"""Limits once more, slow and obvious: all that ever happened is kept, and every question goes through all of it.

Levels are fractions of units, not parts; what is reserved and what runs is counted from the requests themselves. The
rules in `gateway` are not used. Nobody is forgotten: ask for no request later than stores must know of it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from math import ceil, floor
from typing import Literal, NamedTuple

import msgspec

from gateway.domain.ids import RequestId
from gateway.domain.limits.admission import Ask, Reservation, Settlement, Verdict
from gateway.domain.limits.meters import Bucket, Lease, Meter, Quota, Use, Weights
from gateway.domain.usage import TokenUsage

REAPED_PER_ASK = 8


def cost(weights: Weights, usage: TokenUsage) -> int:
    fresh = usage.prompt_tokens - usage.cached_tokens
    exact = [fresh * weights.prompt, usage.cached_tokens * weights.cached, usage.completion_tokens * weights.output]
    return ceil(sum(Fraction(each, 1_000_000) for each in exact)) + weights.per_request


class Touch(NamedTuple):
    """A bucket got units, or lost them; `bucket` is as it was known to whoever did it."""

    at_ms: int
    bucket: Bucket
    units: int


@dataclass
class Story:
    """A request from its admission on."""

    ask: Ask
    verdict: Verdict
    granted: int
    expires_at_ms: int
    taken: dict[str, int]
    """Of each bucket."""
    heard_at_ms: int = 0
    lease_ms: int = 0
    is_spared: bool = False
    reported: int = 0
    status: Literal["runs", "settled", "reaped"] = "runs"
    settlement: Settlement | None = None
    ended_at_ms: int = 0

    def reserved(self, use: Use) -> int:
        if isinstance(use.meter, Bucket):
            return self.taken[use.meter.key]
        return 1 if isinstance(use.meter, Lease) else self.cost(use, self.granted)

    def cost(self, use: Use, output: int) -> int:
        return cost(use.weights, TokenUsage(self.ask.prompt_tokens, output))


@dataclass
class SlowLimits:
    """One organization's. Methods are those of `LimitStore`, told what time it is; `now_ms` never goes back by much."""

    stories: dict[RequestId, Story] = field(default_factory=dict)
    touches: list[Touch] = field(default_factory=list)
    committed: list[tuple[str, int]] = field(default_factory=list)
    is_begun: bool = False
    told: set[str] = field(default_factory=set)
    asked: list[int] = field(default_factory=list)
    staged: dict[str, dict[str, int]] = field(default_factory=dict)
    num_staged: Counter[str] = field(default_factory=Counter)
    """Parts of a view."""
    lease_ms: int = 0
    back_at_ms: int = 0

    # What stands where

    def level(self, bucket: Bucket, now_ms: int) -> Fraction:
        level, at_ms = Fraction(bucket.capacity), now_ms
        past = [touch for touch in self.touches if touch.bucket.key == bucket.key]
        for number, touch in enumerate(past):
            if number == 0:
                level, at_ms = Fraction(touch.bucket.capacity), touch.at_ms
            level = _refilled(touch.bucket, level, touch.at_ms - at_ms)
            level = _clipped(touch.bucket, level + touch.units)
            at_ms = max(at_ms, touch.at_ms)
        return _refilled(bucket, level, now_ms - at_ms) if past else level

    def left(self, quota: Quota) -> int:
        return quota.amount - self.total(quota.key) - sum(story.reserved(use) for story, use in self._uses(quota))

    def total(self, key: str) -> int:
        """Committed to a quota."""
        return sum(units for quota, units in self.committed if quota == key)

    def is_new(self, key: str) -> bool:
        return key not in self.told and self.total(key) == 0

    def remaining(self, meter: Meter, now_ms: int) -> int:
        match meter:
            case Bucket():
                return floor(self.level(meter, now_ms))
            case Quota():
                return self.left(meter)
            case Lease():
                return meter.limit - len(self._uses(meter))

    def running(self) -> list[Story]:
        return [story for story in self.stories.values() if story.status == "runs"]

    def expired(self, now_ms: int) -> list[Story]:
        """Whose leases have run out, the longest ago first."""
        expired = [story for story in self.running() if story.expires_at_ms <= now_ms]
        return sorted(expired, key=lambda story: (story.expires_at_ms, story.ask.request_id))

    def _uses(self, meter: Meter) -> list[tuple[Story, Use]]:
        """Of this meter by requests that run."""
        return [(story, use) for story in self.running() for use in story.ask.uses if use.meter.key == meter.key]

    # The store's methods

    def note_asked(self, now_ms: int) -> None:
        if self.asked and now_ms - self.asked[-1] > self.lease_ms / 2:
            self.back_at_ms = now_ms
        self.asked.append(now_ms)

    def check(self, ask: Ask, now_ms: int) -> Verdict:
        self.note_asked(now_ms)
        story = self.stories.get(ask.request_id)
        if story is not None:
            return story.verdict
        if not self.is_begun and any(_is_exact(use.meter) for use in ask.uses):
            return Verdict(is_admitted=False, is_lost=True)
        self.reap(REAPED_PER_ASK, now_ms)
        fits = [self._fits(ask, use, now_ms) for use in ask.uses]
        shadow_refused = tuple(i for i, use in enumerate(ask.uses) if use.meter.is_shadow and not fits[i])
        refusing = [i for i, use in enumerate(ask.uses) if not use.meter.is_shadow and not fits[i]]
        if refusing:
            waits = [self._wait_ms(ask, ask.uses[i], now_ms) for i in refusing]
            known = [wait for wait in waits if wait is not None]
            return Verdict(
                is_admitted=False,
                binding=refusing[0],
                remaining=tuple(self.remaining(use.meter, now_ms) for use in ask.uses),
                wait_ms=max(known) if known == waits else None,
                is_never=any(_never(ask, ask.uses[i]) for i in refusing),
                shadow_refused=shadow_refused,
            )
        outputs = {
            i: _most_output(ask, use, self.left(use.meter), ask.min_output, ask.max_output)
            for i, use in enumerate(ask.uses)
            if isinstance(use.meter, Quota) and _is_exact(use.meter)
        }
        granted = min(outputs.values(), default=ask.max_output)
        story = Story(ask, Verdict(is_admitted=True), granted, 0, self._take(ask, now_ms))
        return Verdict(
            is_admitted=True,
            granted_output=granted,
            binding=min(i for i in outputs if outputs[i] == granted) if granted < ask.max_output else None,
            remaining=tuple(self.remaining(use.meter, now_ms) - story.reserved(use) for use in ask.uses),
            shadow_refused=shadow_refused,
        )

    def admit(self, ask: Ask, now_ms: int) -> Verdict:
        verdict = self.check(ask, now_ms)
        if verdict.is_admitted and ask.request_id not in self.stories:
            self._begin(ask, verdict, now_ms)
        return verdict

    def raise_output(self, request_id: RequestId, wanted: int, quotas: Sequence[Quota] = ()) -> int | None:
        story = self._runs(request_id)
        if story is None:
            return None
        uses = [(use, next((q for q in quotas if q.key == use.meter.key), use.meter)) for use in story.ask.uses]
        if not self.is_begun and any(_is_exact(meter) for _, meter in uses):
            return story.granted
        if wanted > story.granted:
            story.granted = min(
                (
                    _most_output(story.ask, use, self.left(meter) + story.reserved(use), story.granted, wanted)
                    for use, meter in uses
                    if isinstance(meter, Quota) and _is_exact(meter)
                ),
                default=wanted,
            )
        return story.granted

    def report(self, outputs: Mapping[RequestId, int], lease_ms: int, now_ms: int) -> list[RequestId]:
        self.note_asked(now_ms)
        for request_id, output in outputs.items():
            story = self._runs(request_id)
            if story is not None:
                story.reported = output
                self._hear(story, lease_ms, now_ms)
        return [request_id for request_id in outputs if self._runs(request_id) is None]

    def settle(self, request_id: RequestId, usage: TokenUsage, now_ms: int) -> Settlement | None:
        self.note_asked(now_ms)
        story = self.stories.get(request_id)
        if story is None:
            return None
        if story.status == "settled":
            assert story.settlement is not None
            return msgspec.structs.replace(story.settlement, was_settled=True)
        self._charge(story, usage, now_ms)
        story.status = "settled"
        return story.settlement

    def cancel(self, request_id: RequestId, now_ms: int) -> bool:
        self.note_asked(now_ms)
        story = self.stories.get(request_id)
        if story is None or story.status == "settled":
            return False
        for index, use in enumerate(story.ask.uses):
            if isinstance(use.meter, Bucket):
                units = story.taken[use.meter.key]
                if story.settlement is not None:
                    units = story.settlement.charged[index] - story.settlement.forgiven[index]
                if units:
                    self.touches.append(Touch(now_ms, use.meter, units))
            elif story.settlement is not None:
                self.committed.append((use.meter.key, -story.settlement.charged[index]))
        del self.stories[request_id]
        return True

    def reap(self, most: int, now_ms: int) -> list[RequestId]:
        self.note_asked(now_ms)
        reaped = []
        for story in self.expired(now_ms)[:most]:
            spared_until_ms = self.back_at_ms + story.lease_ms
            if story.heard_at_ms < self.back_at_ms and not story.is_spared and now_ms < spared_until_ms:
                story.is_spared, story.expires_at_ms = True, spared_until_ms
                continue
            self._charge(story, TokenUsage(story.ask.prompt_tokens, story.reported), now_ms)
            story.status = "reaped"
            reaped.append(story.ask.request_id)
        return reaped

    def look(self, uses: Sequence[Use], now_ms: int) -> list[int]:
        self.note_asked(now_ms)
        return [self.remaining(use.meter, now_ms) for use in uses]

    def begin_epoch(
        self,
        committed: Mapping[str, int],
        reservations: Sequence[Reservation],
        now_ms: int,
        *,
        view: str = "",
        settled: Collection[RequestId] = (),
        is_whole: bool = True,
        num_parts: int = 0,
    ) -> bool:
        self.note_asked(now_ms)
        staged = self.staged.setdefault(view, {})
        staged.update(committed)
        self.num_staged[view] += not is_whole
        if is_whole and num_parts not in (0, self.num_staged.pop(view)):
            is_whole = False
            del self.staged[view]
        counted: set[str] = set()
        for key, amount in self.staged.pop(view).items() if is_whole else ():
            if not self.is_begun and self.total(key) > amount:
                counted.add(key)
            elif not self.is_begun or self.is_new(key):
                self.committed = [(known, units) for known, units in self.committed if known != key]
                self.committed.append((key, amount))
            self.told.add(key)
        if is_whole and not self.is_begun:
            self.is_begun = True
            for story in self.running():
                keys = {use.meter.key for use in story.ask.uses}
                if story.ask.request_id in settled and not keys & counted:
                    uses = story.ask.uses
                    charged = tuple(0 if isinstance(use.meter, Lease) else story.reserved(use) for use in uses)
                    story.settlement = Settlement(charged=charged, forgiven=(0,) * len(uses))
                    story.status, story.ended_at_ms = "settled", now_ms
        for each in reservations:
            if each.ask.request_id not in self.stories:
                self._begin(each.ask, Verdict(is_admitted=True, granted_output=each.granted_output), now_ms)
                self.stories[each.ask.request_id].reported = each.reported_output
        return self.is_begun

    def held(self) -> list[RequestId]:
        return [story.ask.request_id for story in self.running()]

    # Parts of them

    def _runs(self, request_id: RequestId) -> Story | None:
        story = self.stories.get(request_id)
        return story if story is not None and story.status == "runs" else None

    def _fits(self, ask: Ask, use: Use, now_ms: int) -> bool:
        match use.meter:
            case Bucket():
                return self.level(use.meter, now_ms) >= _bucket_charge(ask, use.meter, use.weights)
            case Quota():
                least = cost(use.weights, TokenUsage(ask.prompt_tokens, ask.min_output))
                return not use.meter.is_hard or least <= self.left(use.meter)
            case Lease():
                return len(self._uses(use.meter)) < use.meter.limit

    def _wait_ms(self, ask: Ask, use: Use, now_ms: int) -> int | None:
        if not isinstance(use.meter, Bucket) or _never(ask, use) or use.meter.refill == 0:
            return None
        missing = _bucket_charge(ask, use.meter, use.weights) - self.level(use.meter, now_ms)
        return ceil(missing / Fraction(use.meter.refill, use.meter.period_ms))

    def _take(self, ask: Ask, now_ms: int) -> dict[str, int]:
        """Of each bucket: what it is charged, in whole units that its debt takes."""
        return {
            use.meter.key: min(
                _bucket_charge(ask, use.meter, use.weights),
                floor(self.level(use.meter, now_ms) + use.meter.max_debt),
            )
            for use in ask.uses
            if isinstance(use.meter, Bucket)
        }

    def _begin(self, ask: Ask, verdict: Verdict, now_ms: int) -> None:
        story = Story(ask, verdict, verdict.granted_output, 0, self._take(ask, now_ms))
        self._hear(story, ask.lease_ms, now_ms)
        self.stories[ask.request_id] = story
        for use in ask.uses:
            if isinstance(use.meter, Bucket):
                self.touches.append(Touch(now_ms, use.meter, -story.taken[use.meter.key]))

    def _hear(self, story: Story, lease_ms: int, now_ms: int) -> None:
        """Its lease begins anew."""
        self.lease_ms = story.lease_ms = lease_ms
        story.heard_at_ms, story.expires_at_ms, story.is_spared = now_ms, now_ms + lease_ms, False

    def _charge(self, story: Story, usage: TokenUsage, now_ms: int) -> None:
        before, charged, forgiven = story.settlement, [], []
        for index, use in enumerate(story.ask.uses):
            charged.append(0 if isinstance(use.meter, Lease) else cost(use.weights, usage))
            forgiven.append(0 if before is None else before.forgiven[index])
            had = 0 if before is None else before.charged[index]
            if isinstance(use.meter, Bucket):
                units = (story.taken[use.meter.key] if before is None else had) - charged[index]
                below = -use.meter.max_debt - (self.level(use.meter, now_ms) + units)
                forgiven[index] += max(floor(below), 0)
                if units:
                    self.touches.append(Touch(now_ms, use.meter, units))
            elif isinstance(use.meter, Quota):
                self.committed.append((use.meter.key, charged[index] - had))
        story.settlement = Settlement(
            charged=tuple(charged), forgiven=tuple(forgiven), was_reaped=story.status == "reaped"
        )
        story.ended_at_ms = now_ms


def _refilled(bucket: Bucket, level: Fraction, passed_ms: int) -> Fraction:
    rate = Fraction(bucket.refill, bucket.period_ms)
    return _clipped(bucket, _clipped(bucket, level) + rate * max(passed_ms, 0))


def _clipped(bucket: Bucket, level: Fraction) -> Fraction:
    return max(min(level, Fraction(bucket.capacity)), Fraction(-bucket.max_debt))


def _bucket_charge(ask: Ask, bucket: Bucket, weights: Weights) -> int:
    prompt = cost(weights, TokenUsage(ask.prompt_tokens))
    expected = cost(weights, TokenUsage(ask.prompt_tokens, ask.expected_output))
    return expected if expected <= bucket.capacity else max(bucket.capacity, prompt)


def _is_exact(meter: Meter) -> bool:
    return isinstance(meter, Quota) and meter.is_hard and not meter.is_shadow


def _never(ask: Ask, use: Use) -> bool:
    if isinstance(use.meter, Bucket):
        return cost(use.weights, TokenUsage(ask.prompt_tokens)) > use.meter.capacity
    least = cost(use.weights, TokenUsage(ask.prompt_tokens, ask.min_output))
    return isinstance(use.meter, Quota) and least > use.meter.amount


def _most_output(ask: Ask, use: Use, left: int, least: int, most: int) -> int:
    """The largest from `least` to `most` that fits; `least` is known to."""
    outputs = range(least, most + 1)
    num = bisect_right(outputs, left, key=lambda output: cost(use.weights, TokenUsage(ask.prompt_tokens, output)))
    return outputs[max(num, 1) - 1]
