"""Gateways that use limits, for a state machine: what they ask of every store at once, and a ledger of their own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine
from limits_reference import SlowLimits, Story, cost

from gateway.domain.ids import OrganizationId, RequestId
from gateway.domain.limits.admission import Ask, Reservation, Verdict
from gateway.domain.limits.meters import (
    MOST_QUOTA,
    MOST_TOKENS,
    MOST_UNITS,
    MOST_WEIGHT,
    PERIODS_MS,
    REQUESTS,
    TOKENS,
    Bucket,
    Lease,
    Meter,
    Quota,
    Use,
    Weights,
)
from gateway.domain.limits.rules import holdings
from gateway.domain.usage import TokenUsage
from gateway.limits.memory import MemoryLimits
from gateway.services.limit_store import LimitStore

ORGANIZATION = OrganizationId("org_a")
NEIGHBOUR = OrganizationId("org_b")
START_MS = 1_800_000_000_000
LEASE_MS = 15_000
SETTLED_KNOWN_MS = 600_000
REAPED_KNOWN_MS = 3_600_000


class Subject(Protocol):
    """A store that is tried."""

    store: LimitStore

    async def lose(self) -> None:
        """All that it knows."""


class InMemory:
    def __init__(self, now_ms: Callable[[], int]) -> None:
        self._now_ms = now_ms
        self.store: LimitStore = MemoryLimits(now_ms)

    async def lose(self) -> None:
        self.store = MemoryLimits(self._now_ms)


@dataclass
class Request:
    """As its gateway knows it.

    Attributes:
        output: tokens so far, told or not.
        has_crashed: its gateway did; somebody settles it in the end.
    """

    ask: Ask
    granted: int
    output: int = 0
    reported: int = 0
    has_crashed: bool = False

    @property
    def exact_quotas(self) -> list[Quota]:
        meters = [use.meter for use in self.ask.uses]
        return [each for each in meters if isinstance(each, Quota) and each.is_hard and not each.is_shadow]


@dataclass(frozen=True)
class Sizes:
    """How large figures are."""

    units: int
    amount: int
    tokens: int
    weights: tuple[Weights, ...]


SMALL = Sizes(
    units=60,
    amount=150,
    tokens=25,
    weights=(
        TOKENS,
        TOKENS,
        REQUESTS,
        Weights(prompt=250_000, cached=100_000, output=4_000_000),
        Weights(prompt=0, cached=0, output=333_333, per_request=2),
        Weights(prompt=1_000_001, cached=0, output=0, per_request=1),
    ),
)
LARGE = Sizes(
    units=MOST_UNITS,
    amount=MOST_QUOTA,
    tokens=3_000_000,
    weights=(
        TOKENS,
        Weights(prompt=MOST_WEIGHT, cached=99_999_999, output=MOST_WEIGHT, per_request=MOST_UNITS),
        Weights(prompt=33_333_333, cached=3, output=7),
        Weights(prompt=1, cached=0, output=99_999_997),
    ),
)


class Gateways(RuleBasedStateMachine):
    """One organization, which everything is about, beside another with the same keys that must not be seen in it.

    Attributes:
        meters: as they are now, by name; the key of a quota is its name and the period.
        requests: that nobody has settled or cancelled.
        ledger: of each quota, by key, what requests cost that were settled.
    """

    def __init__(self, run: Callable[[Awaitable[Any]], Any], subjects: Sequence[Callable[..., Subject]]) -> None:
        super().__init__()
        self.run = run
        self.now_ms = START_MS
        self.subjects = [subject(lambda: self.now_ms) for subject in subjects]
        self.reference = SlowLimits()
        self.sizes = SMALL
        self.period = 0
        self.meters: dict[str, Meter] = {}
        self.requests: dict[RequestId, Request] = {}
        self.ledger: Counter[str] = Counter()
        self.num_asked = 0

    def all_say(self, expected: object, ask: Callable[[LimitStore], Awaitable[object]]) -> None:
        for subject in self.subjects:
            answer = self.run(ask(subject.store))
            answer = list(answer) if isinstance(expected, list) else answer
            assert expected == answer, type(subject).__name__

    def ask_for(self, ask: Ask, *, is_checked: bool) -> None:
        before = self.reference.look(self.uses(), self.now_ms)
        if is_checked:
            self.all_say(self.reference.check(ask, self.now_ms), lambda store: store.check(ask))
        is_any_reaped = bool(self.reference.expired(self.now_ms))
        verdict = self.reference.admit(ask, self.now_ms)
        self.all_say(verdict, lambda store: store.admit(ask))
        if verdict.is_admitted:
            self.assert_holds(ask, verdict)
            self.requests[ask.request_id] = Request(ask, verdict.granted_output)
        elif not is_any_reaped and not is_checked:
            assert self.reference.look(self.uses(), self.now_ms) == before

    def assert_holds(self, ask: Ask, verdict: Verdict) -> None:
        assert ask.min_output <= verdict.granted_output <= ask.max_output
        for use, left in zip(ask.uses, verdict.remaining, strict=True):
            if not use.meter.is_shadow and not (isinstance(use.meter, Quota) and not use.meter.is_hard):
                assert left >= 0

    def end(self, request: Request, data: st.DataObject | None) -> None:
        """By its gateway, or by whoever finds what that one left."""
        output, cached = request.output, 0
        if data is not None:
            output = data.draw(st.integers(output, request.granted), "output in the end")
            cached = data.draw(st.integers(0, request.ask.prompt_tokens), "cached")
        usage = TokenUsage(request.ask.prompt_tokens, output, cached)
        story = self.reference.stories.get(request.ask.request_id)
        is_in_time = story is not None and story.status == "runs"
        before = [self.used(quota) for quota in request.exact_quotas]
        self.store_settles(request.ask.request_id, usage)
        if is_in_time:
            after = [self.used(quota) for quota in request.exact_quotas]
            assert all(used <= was for used, was in zip(after, before, strict=True))
        if data is not None and data.draw(st.booleans(), "settled again"):
            self.store_settles(request.ask.request_id, TokenUsage(3, 3))
        self.enter_in_ledger(request, usage)

    def tell(self) -> list[RequestId]:
        """Every gateway reports; the requests that have no reservation."""
        outputs = {}
        for request in self.own():
            outputs[request.ask.request_id] = request.reported = request.output
        missing = self.reference.report(outputs, LEASE_MS, self.now_ms)
        self.all_say(missing, lambda store: store.report(ORGANIZATION, outputs, LEASE_MS))
        return missing

    def raise_one(self, request: Request, data: st.DataObject) -> None:
        most = min(request.granted + self.sizes.tokens, MOST_TOKENS - request.ask.prompt_tokens)
        wanted = data.draw(st.integers(0, most), "wanted")
        now = {use.meter.key: use.meter for use in self.uses() if isinstance(use.meter, Quota)}
        changed = list(now.values()) if data.draw(st.booleans(), "as they are now") else []
        quotas = [now.get(quota.key, quota) if changed else quota for quota in request.exact_quotas]
        quotas = [quota for quota in quotas if quota.is_hard and not quota.is_shadow]
        before = [self.used(quota) for quota in quotas]
        granted = self.reference.raise_output(request.ask.request_id, wanted, changed)
        self.all_say(granted, lambda store: store.raise_output(ORGANIZATION, request.ask.request_id, wanted, changed))
        if granted is not None:
            assert request.granted <= granted <= max(wanted, request.granted)
            assert all(self.used(quota) <= max(quota.amount, was) for quota, was in zip(quotas, before, strict=True))
            request.granted = granted

    def cancel(self, request: Request) -> None:
        request_id = request.ask.request_id
        cancelled = self.reference.cancel(request_id, self.now_ms)
        self.all_say(cancelled, lambda store: store.cancel(ORGANIZATION, request_id))
        self.all_say(False, lambda store: store.cancel(ORGANIZATION, request_id))
        del self.requests[request_id]

    def store_settles(self, request_id: RequestId, usage: TokenUsage) -> None:
        settlement = self.reference.settle(request_id, usage, self.now_ms)
        self.all_say(settlement, lambda store: store.settle(ORGANIZATION, request_id, usage))

    def make_known(self, data: st.DataObject | None) -> None:
        """Two make known what runs; what crashed or was reaped is settled first."""
        for request in list(self.requests.values()):
            story = self.reference.stories.get(request.ask.request_id)
            if request.has_crashed or (story is not None and story.status == "reaped"):
                self.end(request, data)
        settled, num_parts = ({}, 0) if data is None else self.make_known_before(data)
        reservations = self.reservations()
        first, again = len(reservations), 0
        if data is not None:
            first = data.draw(st.integers(0, len(reservations)), "made known first")
            again = data.draw(st.integers(0, first), "made known twice")
        self.all_begin(
            dict(self.ledger), reservations[:first], view="first", settled=list(settled), num_parts=num_parts
        )
        self.all_begin(
            {key: units + 5 for key, units in self.ledger.items()},
            reservations[again:],
            view="late",
            settled=["nobody"],
        )
        for request_id, usage in settled.items():
            self.store_settles(request_id, usage)

    def make_known_before(self, data: st.DataObject) -> tuple[dict[RequestId, TokenUsage], int]:
        """In parts, while the organization is lost, with amounts that are not the last; which of the requests have
        ended meanwhile and are in the ledger already, and with what usage; and how many parts."""
        if self.reference.is_begun:
            return {}, 0
        known = self.reservations()
        known = known[: data.draw(st.integers(0, len(known)), "made known before the epoch")]
        half = len(known) // 2
        for part in (known[:half], known[half:]):
            self.all_begin(dict.fromkeys(self.ledger, 3), part, view="first", is_whole=False)
            self.all_begin(dict.fromkeys(self.ledger, 4), [], view="another", is_whole=False)
        settled: dict[RequestId, TokenUsage] = {}
        for each in self.own():
            story = self.reference.stories.get(each.ask.request_id)
            if story is None or story.status != "runs" or data.draw(st.booleans(), "runs on"):
                continue
            output = data.draw(st.integers(each.output, each.granted), "output in the ledger")
            usage = settled[each.ask.request_id] = TokenUsage(each.ask.prompt_tokens, output)
            self.enter_in_ledger(each, usage)
        if data.draw(st.booleans(), "a part is missing"):
            self.all_begin(dict.fromkeys(self.ledger, 9), [], view="another", settled=list(settled), num_parts=3)
        return settled, 2

    def all_begin(self, amounts: dict[str, int], reservations: list[Reservation], **options: Any) -> None:
        is_begun = self.reference.begin_epoch(amounts, reservations, self.now_ms, **options)
        self.all_say(is_begun, lambda store: store.begin_epoch(ORGANIZATION, amounts, reservations, **options))

    def enter_in_ledger(self, request: Request, usage: TokenUsage) -> None:
        for use in request.ask.uses:
            if isinstance(use.meter, Quota):
                self.ledger[use.meter.key] += cost(use.weights, usage)
        del self.requests[request.ask.request_id]

    def reservations(self) -> list[Reservation]:
        return [
            Reservation(
                ask=each.ask,
                granted_output=each.granted,
                reserved=holdings(each.ask, each.granted),
                reported_output=each.reported,
            )
            for each in self.own()
        ]

    def own(self) -> list[Request]:
        """Whose gateways live."""
        return [request for request in self.requests.values() if not request.has_crashed]

    def known(self) -> list[Story]:
        """Of whom stores must know what they were told."""
        return [
            story
            for story in self.reference.stories.values()
            if story.status != "settled" or self.now_ms - story.ended_at_ms < SETTLED_KNOWN_MS - 10_000
        ]

    def used(self, quota: Quota) -> int:
        return quota.amount - self.reference.left(quota)

    def buckets_in_debt(self) -> list[tuple[Bucket, int]]:
        """And how deep."""
        buckets = [meter for meter in self.meters.values() if isinstance(meter, Bucket)]
        levels = [(bucket, self.reference.remaining(bucket, self.now_ms)) for bucket in buckets]
        return [(bucket, -level) for bucket, level in levels if level < 0]

    def of_period(self, meter: Meter) -> Meter:
        if isinstance(meter, Quota):
            return msgspec.structs.replace(meter, key=f"{meter.key} {self.period}")
        return meter

    def uses(self) -> list[Use]:
        return [Use(self.of_period(meter)) for meter in self.meters.values()]

    def new_id(self, data: st.DataObject) -> RequestId:
        self.num_asked += 1
        return RequestId(data.draw(st.sampled_from("abc"), "id") + str(self.num_asked))

    def new_ask(self, data: st.DataObject) -> Ask:
        names = data.draw(st.lists(st.sampled_from(list(self.meters)), min_size=1, max_size=8, unique=True), "meters")
        uses = [
            Use(self.of_period(self.meters[name]), data.draw(st.sampled_from(self.sizes.weights), "weights"))
            for name in names
        ]
        tokens = st.integers(0, self.sizes.tokens)
        outputs = sorted(data.draw(st.tuples(tokens, tokens), "least and most"))
        return Ask(
            organization_id=ORGANIZATION,
            request_id=self.new_id(data),
            owner="a",
            lease_ms=data.draw(st.sampled_from([LEASE_MS, LEASE_MS, 1_000]), "lease"),
            prompt_tokens=data.draw(tokens, "prompt"),
            min_output=outputs[0] if data.draw(st.booleans(), "a minimum") else 0,
            expected_output=data.draw(st.sampled_from([0, outputs[1] // 2, outputs[1]]), "expected"),
            max_output=outputs[1],
            uses=tuple(uses),
        )

    def edit(self, meter: Meter, data: st.DataObject) -> None:
        """Its figures anew."""
        units = st.integers(0, self.sizes.units)
        new: dict[str, int]
        match meter:
            case Bucket():
                new = dict(
                    zip(("capacity", "refill", "max_debt"), data.draw(st.tuples(units, units, units)), strict=True)
                )
                new["period_ms"] = data.draw(st.sampled_from(PERIODS_MS))
            case Quota():
                new = {"amount": data.draw(st.integers(0, self.sizes.amount))}
            case Lease():
                new = {"limit": data.draw(st.integers(0, 9))}
        self.meters[meter.key] = msgspec.structs.replace(meter, **new)
