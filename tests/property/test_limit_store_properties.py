"""Whatever happens in whatever order, every store says what the slow and obvious reference says, and hard limits hold.

The machine plays the gateways: it admits, raises, reports, settles and crashes, and keeps a ledger of its own.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from databases import RedisServer
from examples import examples
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule, run_state_machine_as_test
from limits_gateways import (
    LARGE,
    LEASE_MS,
    NEIGHBOUR,
    ORGANIZATION,
    REAPED_KNOWN_MS,
    SMALL,
    START_MS,
    Gateways,
    InMemory,
    Sizes,
    Subject,
)
from limits_reference import SlowLimits
from redis_limits_kit import InRedis

from gateway.domain.ids import RequestId
from gateway.domain.limits.admission import Ask
from gateway.domain.limits.meters import MOST_QUOTA, Bucket, Lease, Quota, Use
from gateway.domain.usage import TokenUsage


class LimitMachine(Gateways):
    @initialize(sizes=st.sampled_from([SMALL, SMALL, SMALL, LARGE]), data=st.data())
    def begin(self, sizes: Sizes, data: st.DataObject) -> None:
        self.sizes = sizes
        for name in ("rate", "burst", "slow", "shadow rate"):
            self.edit(Bucket(key=name, capacity=0, refill=0, is_shadow=name.startswith("shadow")), data)
        for name in ("hard", "other hard", "soft", "shadow hard"):
            self.edit(Quota(key=name, amount=0, is_hard=name != "soft", is_shadow=name.startswith("shadow")), data)
        for name in ("running", "shadow running"):
            self.edit(Lease(key=name, limit=0, is_shadow=name.startswith("shadow")), data)
        for subject in self.subjects:
            self.run(subject.lose())
            self.run(subject.store.begin_epoch(NEIGHBOUR, {"hard 0": 7}, []))
        if data.draw(st.sampled_from([True, True, True, False]), "an epoch"):
            self.make_known(data)

    # What is asked of the stores

    @rule(data=st.data(), is_checked=st.booleans())
    def admit(self, data: st.DataObject, is_checked: bool) -> None:
        self.ask_for(self.new_ask(data), is_checked=is_checked)

    @rule(data=st.data())
    def admit_several(self, data: st.DataObject) -> None:
        """Of one kind, as when a crowd comes."""
        ask = self.new_ask(data)
        for _ in range(data.draw(st.integers(2, 12), "how many")):
            self.ask_for(msgspec.structs.replace(ask, request_id=self.new_id(data)), is_checked=False)

    @rule(data=st.data())
    def check(self, data: st.DataObject) -> None:
        ask = self.new_ask(data)
        self.all_say(self.reference.check(ask, self.now_ms), lambda store: store.check(ask))

    @precondition(lambda self: self.known())
    @rule(data=st.data())
    def admit_again(self, data: st.DataObject) -> None:
        story = data.draw(st.sampled_from(self.known()), "again")
        before = self.reference.look(self.uses(), self.now_ms)
        self.all_say(story.verdict, lambda store: store.check(story.ask))
        self.all_say(story.verdict, lambda store: store.admit(story.ask))
        assert self.reference.look(self.uses(), self.now_ms) == before

    @precondition(lambda self: self.own())
    @rule(data=st.data())
    def requests_go_on(self, data: st.DataObject) -> None:
        """Each in its own way."""
        for request in self.own():
            match data.draw(st.sampled_from(["runs", "runs", "raised", "settled", "cancelled", "crashes"]), "goes on"):
                case "raised":
                    self.raise_one(request, data)
                case "settled":
                    self.end(request, data)
                case "cancelled":
                    self.cancel(request)
                case "crashes":
                    request.has_crashed = True

    @rule(data=st.data(), lease_ms=st.sampled_from([1, 5_000, LEASE_MS, 60_000]))
    def report(self, data: st.DataObject, lease_ms: int) -> None:
        outputs = {RequestId("nobody"): 3}
        for request in self.own():
            if data.draw(st.booleans(), "reports"):
                request.output = data.draw(st.integers(request.output, request.granted), "output")
                outputs[request.ask.request_id] = request.reported = request.output
        missing = self.reference.report(outputs, lease_ms, self.now_ms)
        self.all_say(missing, lambda store: store.report(ORGANIZATION, outputs, lease_ms))

    @precondition(lambda self: self.known())
    @rule(data=st.data(), output=st.integers(0, 50))
    def settle_again(self, data: st.DataObject, output: int) -> None:
        settled = [story for story in self.known() if story.status == "settled"]
        if settled:
            story = data.draw(st.sampled_from(settled), "settled again")
            self.store_settles(story.ask.request_id, TokenUsage(output, output))
        self.store_settles(RequestId("nobody"), TokenUsage(output, output))

    @rule(most=st.integers(0, 5))
    def reap(self, most: int) -> None:
        reaped = self.reference.reap(most, self.now_ms)
        self.all_say(reaped, lambda store: store.reap(ORGANIZATION, most))

    @rule(request_tokens=st.integers(0, 30))
    def neighbour(self, request_tokens: int) -> None:
        """Asks with the same request id and keys."""
        ask = Ask(
            organization_id=NEIGHBOUR,
            request_id=RequestId("same"),
            owner="n",
            lease_ms=LEASE_MS,
            prompt_tokens=request_tokens,
            min_output=0,
            expected_output=0,
            max_output=0,
            uses=tuple(Use(meter) for meter in self.meters.values()),
        )
        for subject in self.subjects:
            self.run(subject.store.admit(ask))

    # What happens besides

    @rule(
        ms=st.one_of(
            st.integers(-2_000, 50),
            st.integers(0, 5_000),
            st.sampled_from([1, 1_000, LEASE_MS - 1, LEASE_MS, 60_000, 400_000, 3_000_000, 90_000_000]),
        ),
        data=st.data(),
    )
    def time_passes(self, ms: int, data: st.DataObject) -> None:
        """Whoever was reaped is settled by somebody within the hour. In all some days: no meter is idle for a week."""
        if self.now_ms > START_MS + 4 * 86_400_000:
            ms = min(ms, 5_000)
        for request in list(self.requests.values()):
            story = self.reference.stories.get(request.ask.request_id)
            if (
                story is not None
                and story.status == "reaped"
                and self.now_ms + ms - story.ended_at_ms >= REAPED_KNOWN_MS - 10_000
            ):
                self.end(request, data)
        self.now_ms += ms

    @precondition(lambda self: self.own())
    @rule(
        data=st.data(),
        ms=st.sampled_from([LEASE_MS // 2 + 1, LEASE_MS, 60_000, 400_000]),
        late_ms=st.integers(0, LEASE_MS - 1),
    )
    def stores_are_silent(self, data: st.DataObject, ms: int, late_ms: int) -> None:
        """Whoever reports within a lease of their answering again has lost nothing, though others ask before: so what
        it uses in the end was never given away."""
        missing = set(self.tell())
        for passed_ms in (ms, late_ms):
            self.now_ms += passed_ms
            self.ask_for(self.new_ask(data), is_checked=False)
        assert set(self.tell()) == missing

    @rule(data=st.data())
    def limits_are_edited(self, data: st.DataObject) -> None:
        meters = st.lists(st.sampled_from(list(self.meters.values())), min_size=1, max_size=3, unique=True)
        for meter in data.draw(meters, "edited"):
            self.edit(meter, data)

    @precondition(lambda self: self.buckets_in_debt())
    @rule(data=st.data(), ms=st.integers(1, 5_000))
    def debts_are_limited_more(self, data: st.DataObject, ms: int) -> None:
        for bucket, debt in self.buckets_in_debt():
            self.meters[bucket.key] = msgspec.structs.replace(bucket, max_debt=data.draw(st.integers(0, debt), "debt"))
        self.now_ms += ms

    @rule(data=st.data(), part=st.floats(0, 1))
    def top_up(self, data: st.DataObject, part: float) -> None:
        quotas = [meter for meter in self.meters.values() if isinstance(meter, Quota)]
        quota = data.draw(st.sampled_from(quotas), "topped up")
        amount = min(quota.amount + int(part * self.sizes.amount), MOST_QUOTA)
        self.meters[quota.key] = msgspec.structs.replace(quota, amount=amount)

    @rule()
    def period_changes(self) -> None:
        self.period += 1

    @precondition(lambda self: any(request.has_crashed for request in self.requests.values()))
    @rule(data=st.data())
    def crashed_one_is_recovered(self, data: st.DataObject) -> None:
        crashed = [request for request in self.requests.values() if request.has_crashed]
        self.end(data.draw(st.sampled_from(crashed), "recovered"), data)

    @rule(data=st.data(), is_noticed=st.booleans(), later=st.sampled_from([False, False, True]))
    def stores_lose_all(self, data: st.DataObject, is_noticed: bool, later: bool) -> None:
        for subject in self.subjects:
            self.run(subject.lose())
        self.reference = SlowLimits()
        if is_noticed:
            # Gateways make their requests known again, and these go on without an epoch.
            known = self.reservations()
            self.all_begin({}, known[: data.draw(st.integers(0, len(known)), "made known at once")], is_whole=False)
            self.requests_go_on(data)
        if not later:
            self.make_known(data)

    @precondition(lambda self: not self.reference.is_begun)
    @rule(data=st.data())
    def epoch_begins(self, data: st.DataObject) -> None:
        self.make_known(data)

    @precondition(lambda self: self.reference.is_begun)
    @rule(amount=st.integers(0, 50))
    def late_gateway_begins_it_again(self, amount: int) -> None:
        """It is heard of quotas that are new."""
        quotas = [self.of_period(meter) for meter in self.meters.values() if isinstance(meter, Quota)]
        for quota in quotas:
            if self.reference.is_new(quota.key):
                self.ledger[quota.key] += amount
        self.all_begin({quota.key: amount for quota in quotas}, self.reservations())

    # What holds at any moment

    @invariant()
    def meters_stand_where_the_reference_has_them(self) -> None:
        uses = self.uses()
        looked = self.reference.look(uses, self.now_ms)
        self.all_say(looked, lambda store: store.look(ORGANIZATION, uses))
        for use, left in zip(uses, looked, strict=True):
            if isinstance(use.meter, Bucket):
                assert -use.meter.max_debt <= left <= use.meter.capacity

    @invariant()
    def those_are_held_that_run(self) -> None:
        expected = sorted(self.reference.held())
        for subject in self.subjects:
            assert sorted(self.run(subject.store.held(ORGANIZATION))) == expected, type(subject).__name__

    @invariant()
    def what_is_committed_is_what_the_ledger_has(self) -> None:
        """And what was reaped and nobody settled yet."""
        if not self.reference.is_begun:
            return
        committed: Counter[str] = Counter()
        for key, units in self.reference.committed:
            committed[key] += units
        for story in self.reference.stories.values():
            if story.status == "reaped" and story.settlement is not None:
                for use, units in zip(story.ask.uses, story.settlement.charged, strict=True):
                    committed[use.meter.key] -= units if isinstance(use.meter, Quota) else 0
        assert +committed == +self.ledger

    def teardown(self) -> None:
        """Everybody is settled: nothing is reserved, and stores have committed what the ledger has."""
        if not self.meters:
            return
        if not self.reference.is_begun:
            self.make_known(None)
        for request in list(self.requests.values()):
            self.end(request, None)
        quotas = [Use(Quota(key=key, amount=0)) for key in self.ledger]
        leases = [Use(Lease(key=meter.key, limit=0)) for meter in self.meters.values() if isinstance(meter, Lease)]
        expected = [-self.ledger[use.meter.key] for use in quotas] + [0] * len(leases)
        self.all_say(expected, lambda store: store.look(ORGANIZATION, [*quotas, *leases]))


def test_stores_say_what_the_reference_says_whatever_happens(redis_server: RedisServer) -> None:
    in_redis = InRedis(redis_server.url)
    stores: list[Callable[..., Subject]] = [InMemory, in_redis]

    async def wait(asked: Awaitable[Any]) -> Any:
        return await asked

    with asyncio.Runner() as runner:

        class Machine(LimitMachine):
            def __init__(self) -> None:
                super().__init__(lambda asked: runner.run(wait(asked)), stores)

        try:
            run_state_machine_as_test(
                Machine,
                settings=settings(
                    max_examples=examples(60),
                    stateful_step_count=50,
                    deadline=None,
                    suppress_health_check=[
                        HealthCheck.too_slow,
                        HealthCheck.data_too_large,
                        HealthCheck.filter_too_much,
                    ],
                ),
            )
        finally:
            runner.run(in_redis.close())
