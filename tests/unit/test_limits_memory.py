"""Limits in one process. That rules are kept whatever happens is for the property test; here is one case of each."""

from __future__ import annotations

import msgspec
import pytest
from limits_kit import LEASE_MS, ORGANIZATION, ask

from gateway.domain.ids import OrganizationId, RequestId
from gateway.domain.limits.admission import Ask, Reservation, Settlement, Verdict
from gateway.domain.limits.meters import Bucket, Lease, Meter, Quota, Use, Weights
from gateway.domain.limits.rules import holdings
from gateway.domain.usage import TokenUsage
from gateway.limit_opening import in_memory
from gateway.limits import kept_meters, kept_requests
from gateway.limits.memory import MemoryLimits

RATE = Bucket(key="rate", capacity=100, refill=60, max_debt=20)
SLOW = Bucket(key="slow", capacity=100, refill=0, max_debt=20)
QUOTA = Quota(key="quota", amount=100)
LEASE = Lease(key="lease", limit=2)
ALL = (SLOW, QUOTA, LEASE)


class Limits(MemoryLimits):
    """With a clock to move, and the organization's epoch begun."""

    def __init__(self) -> None:
        self.at_ms = 1_000_000
        super().__init__(lambda: self.at_ms)

    async def look_at(self, *meters: Meter, organization: str = ORGANIZATION) -> list[int]:
        return list(await self.look(OrganizationId(organization), [Use(meter) for meter in meters]))

    async def settles(self, request: str, *usage: int) -> Settlement | None:
        return await self.settle(ORGANIZATION, RequestId(request), TokenUsage(*usage))

    async def passes(self, ms: int) -> None:
        """Time, in which it is asked again and again."""
        end_ms = self.at_ms + ms
        while self.at_ms < end_ms:
            self.at_ms = min(self.at_ms + 500, end_ms)
            await self.held(ORGANIZATION)

    async def reaps(self, after_ms: int = LEASE_MS) -> list[str]:
        await self.passes(after_ms)
        return list(await self.reap(ORGANIZATION, 100))


@pytest.fixture
async def limits() -> Limits:
    limits = Limits()
    await limits.begin_epoch(ORGANIZATION, {}, [])
    return limits


# Admission


async def test_an_admitted_request_holds_part_of_every_meter(limits: Limits) -> None:
    verdict = await limits.admit(ask(*ALL))

    assert verdict == Verdict(is_admitted=True, granted_output=20, remaining=(85, 70, 1))
    assert await limits.look_at(*ALL) == [85, 70, 1]


async def test_a_check_says_the_same_and_consumes_nothing(limits: Limits) -> None:
    checked = await limits.check(ask(*ALL))

    assert await limits.look_at(*ALL) == [100, 100, 2]
    assert await limits.admit(ask(*ALL)) == checked


async def test_a_refusal_by_one_leaves_all_as_they_were(limits: Limits) -> None:
    verdict = await limits.admit(ask(*ALL, Lease(key="full", limit=0)))

    assert (verdict.is_admitted, verdict.binding, verdict.remaining) == (False, 3, (100, 100, 2, 0))
    assert await limits.look_at(*ALL) == [100, 100, 2]


async def test_asking_again_is_answered_the_same_whatever_has_become_of_the_request(limits: Limits) -> None:
    verdict = await limits.admit(ask(*ALL))
    await limits.admit(ask(*ALL, request="r2"))

    assert await limits.admit(ask(*ALL)) == verdict
    assert await limits.look_at(*ALL) == [70, 40, 0]
    await limits.settles("r1", 10, 20)
    assert await limits.admit(ask(*ALL)) == verdict
    assert await limits.reaps() == ["r2"]
    assert (await limits.admit(ask(*ALL, request="r2"))).is_admitted
    assert await limits.look_at(*ALL) == [60, 60, 2]


async def test_an_edited_limit_keeps_what_was_used(limits: Limits) -> None:
    await limits.admit(ask(*ALL))
    wider = [
        msgspec.structs.replace(SLOW, capacity=200),
        msgspec.structs.replace(QUOTA, amount=40),
        msgspec.structs.replace(LEASE, limit=7),
    ]

    assert await limits.look_at(*wider) == [85, 10, 6]


async def test_organizations_do_not_share_meters_of_one_key(limits: Limits) -> None:
    await limits.begin_epoch(OrganizationId("org_b"), {}, [])
    await limits.admit(ask(*ALL))

    assert await limits.look_at(*ALL, organization="org_b") == [100, 100, 2]
    assert await limits.settle(OrganizationId("org_b"), RequestId("r1"), TokenUsage(1)) is None


async def test_an_ask_that_breaks_its_rules_raises_before_anything_is_done(limits: Limits) -> None:
    for method in (limits.check, limits.admit):
        with pytest.raises(ValueError, match="min_output"):
            await method(ask(*ALL, min_output=21))
    with pytest.raises(ValueError, match="min_output"):
        await limits.begin_epoch(ORGANIZATION, {}, [reservation(ask(*ALL)), reservation(ask(*ALL, min_output=21))])
    with pytest.raises(ValueError, match="no reservation of org_a"):
        await limits.begin_epoch(ORGANIZATION, {}, [reservation(ask(*ALL, organization_id=OrganizationId("org_b")))])
    assert await limits.look_at(*ALL) == [100, 100, 2]


# Raising


async def test_raising_goes_by_the_quotas_as_they_are_now(limits: Limits) -> None:
    quota = next(meter for meter in ALL if isinstance(meter, Quota))
    await limits.admit(ask(*ALL, max_output=10))

    for amount, granted in ((60, 50), (130, 120), (40, 120)):
        changed = msgspec.structs.replace(quota, amount=amount)
        assert await limits.raise_output(ORGANIZATION, RequestId("r1"), 500, [changed]) == granted


async def test_raising_takes_from_all_quotas_and_stops_where_the_hard_one_ends(limits: Limits) -> None:
    soft = Quota(key="soft", amount=25, is_hard=False)
    await limits.admit(ask(*ALL, soft, max_output=10))

    assert await limits.raise_output(ORGANIZATION, RequestId("r1"), 15) == 15
    assert await limits.look_at(*ALL, soft) == [85, 75, 1, 0]
    assert await limits.raise_output(ORGANIZATION, RequestId("r1"), 500) == 90
    assert await limits.look_at(*ALL, soft) == [85, 0, 1, -75]
    assert await limits.raise_output(ORGANIZATION, RequestId("r1"), 5) == 90
    assert await limits.raise_output(ORGANIZATION, RequestId("r2"), 5) is None


# Settling


async def test_a_settlement_gives_back_what_was_not_used(limits: Limits) -> None:
    await limits.admit(ask(*ALL))

    assert await limits.settles("r1", 10, 2) == Settlement(charged=(12, 12, 0), forgiven=(0, 0, 0))
    assert await limits.look_at(*ALL) == [88, 88, 2]


async def test_settling_again_says_the_same_and_changes_nothing(limits: Limits) -> None:
    await limits.admit(ask(*ALL))
    first = await limits.settles("r1", 10, 2)
    assert first is not None

    assert await limits.settles("r1", 10, 20) == msgspec.structs.replace(first, was_settled=True)
    assert await limits.look_at(*ALL) == [88, 88, 2]


async def test_a_bucket_goes_into_debt_and_no_further(limits: Limits) -> None:
    await limits.admit(ask(SLOW, prompt_tokens=80, max_output=500))

    settlement = await limits.settles("r1", 80, 50)
    assert settlement == Settlement(charged=(130,), forgiven=(10,))
    assert await limits.look_at(SLOW) == [-20]


async def test_nothing_is_settled_that_never_was(limits: Limits) -> None:
    assert await limits.settles("r1", 10, 2) is None
    assert not await limits.cancel(ORGANIZATION, RequestId("r1"))


async def test_a_cancelled_request_gets_everything_back_and_may_be_asked_for_anew(limits: Limits) -> None:
    await limits.admit(ask(*ALL))

    assert await limits.cancel(ORGANIZATION, RequestId("r1"))
    assert await limits.look_at(*ALL) == [100, 100, 2]
    assert await limits.settles("r1", 10, 2) is None
    assert (await limits.admit(ask(*ALL))).is_admitted
    assert await limits.look_at(*ALL) == [85, 70, 1]


async def test_a_settled_request_cannot_be_cancelled(limits: Limits) -> None:
    await limits.admit(ask(*ALL))
    await limits.settles("r1", 10, 2)

    assert not await limits.cancel(ORGANIZATION, RequestId("r1"))
    assert await limits.look_at(*ALL) == [88, 88, 2]


# Time


async def test_a_wall_clock_that_is_set_changes_nothing() -> None:
    clock, quick = _SetClock(), Bucket(key="quick", capacity=15, refill=15, period_ms=1_000)
    limits = in_memory(clock)
    await limits.admit(ask(quick))
    for step_s in (-3_600.0, 7_200.0):
        clock.wall_s += step_s
        assert not (await limits.check(ask(quick, request="r2"))).is_admitted
    assert await limits.reap(ORGANIZATION, 9) == []
    clock.steady_s += 1
    assert (await limits.admit(ask(quick, request="r2"))).is_admitted


class _SetClock:
    wall_s = 1_800_000_000.0
    steady_s = 5.0

    def time(self) -> float:
        return self.wall_s

    def monotonic(self) -> float:
        return self.steady_s


# Leases that run out


async def test_one_that_nobody_reports_is_settled_at_its_prompt_and_last_reported_output(limits: Limits) -> None:
    await limits.admit(ask(*ALL))
    await limits.report(ORGANIZATION, {RequestId("r1"): 7}, LEASE_MS)

    assert await limits.reaps(LEASE_MS - 1) == []
    assert await limits.reaps(1) == ["r1"]
    assert await limits.look_at(*ALL) == [83, 83, 2]
    assert await limits.report(ORGANIZATION, {RequestId("r1"): 8}, LEASE_MS) == ["r1"]
    assert await limits.raise_output(ORGANIZATION, RequestId("r1"), 30) is None


async def test_a_report_begins_the_lease_anew_be_it_longer_or_shorter(limits: Limits) -> None:
    for request in ("r1", "r2"):
        await limits.admit(ask(LEASE, request=request))
    limits.at_ms += 10_000
    await limits.report(ORGANIZATION, {RequestId("r1"): 1}, 20_000)
    await limits.report(ORGANIZATION, {RequestId("r2"): 1}, 2_000)

    assert await limits.reaps(2_000) == ["r2"]
    assert await limits.reaps(17_999) == []
    assert await limits.reaps(1) == ["r1"]


async def test_a_reaped_one_is_corrected_once_if_its_owner_comes_after_all(limits: Limits) -> None:
    await limits.admit(ask(*ALL))
    await limits.report(ORGANIZATION, {RequestId("r1"): 7}, LEASE_MS)
    await limits.reaps()
    limits.at_ms += kept_requests.REAPED_KEPT_MS - 1

    corrected = await limits.settles("r1", 10, 9)
    assert corrected == Settlement(charged=(19, 19, 0), forgiven=(0, 0, 0), was_reaped=True)
    assert await limits.look_at(*ALL) == [81, 81, 2]
    assert await limits.settles("r1", 10, 9) == msgspec.structs.replace(corrected, was_settled=True)
    assert await limits.look_at(*ALL) == [81, 81, 2]


async def test_what_a_correction_charges_beyond_the_debt_is_forgiven_like_the_rest(limits: Limits) -> None:
    await limits.admit(ask(SLOW, prompt_tokens=80, max_output=500))
    await limits.report(ORGANIZATION, {RequestId("r1"): 50}, LEASE_MS)
    await limits.reaps()

    assert await limits.settles("r1", 80, 53) == Settlement(charged=(133,), forgiven=(13,), was_reaped=True)
    assert await limits.look_at(SLOW) == [-20]


async def test_a_reaped_one_that_had_done_nothing_gets_back_what_it_was_charged(limits: Limits) -> None:
    await limits.admit(ask(*ALL))
    await limits.reaps()
    assert await limits.look_at(*ALL) == [90, 90, 2]

    assert await limits.cancel(ORGANIZATION, RequestId("r1"))
    assert await limits.look_at(*ALL) == [100, 100, 2]
    assert await limits.settles("r1", 10, 2) is None


async def test_a_reaped_one_gets_back_no_more_than_it_lost(limits: Limits) -> None:
    await limits.admit(ask(SLOW, request="r0", prompt_tokens=35))
    await limits.settles("r0", 35, 5)
    await limits.admit(ask(SLOW, max_output=500))
    await limits.report(ORGANIZATION, {RequestId("r1"): 90}, LEASE_MS)
    await limits.reaps()
    assert await limits.look_at(SLOW) == [-20]  # 80 of 100 units; 20 are forgiven

    await limits.cancel(ORGANIZATION, RequestId("r1"))
    assert await limits.look_at(SLOW) == [60]


async def test_admission_reaps_eight_those_first_that_have_waited_longest(limits: Limits) -> None:
    ten = Lease(key="ten", limit=10)
    for number in range(10):
        await limits.admit(ask(ten, request=f"r{number}", lease_ms=2_000 - number))
    await limits.passes(2_000)

    assert (await limits.admit(ask(ten, request="new"))).remaining == (7,)
    assert await limits.reaps(0) == ["r1", "r0"]


async def test_a_check_is_not_refused_for_the_sake_of_those_whose_leases_have_run_out(limits: Limits) -> None:
    for request in ("r1", "r2"):
        await limits.admit(ask(LEASE, request=request))
    assert not (await limits.check(ask(LEASE, request="r3"))).is_admitted
    await limits.passes(LEASE_MS)

    assert (await limits.check(ask(LEASE, request="r3"))).is_admitted


async def test_time_in_which_nobody_could_report_does_not_count(limits: Limits) -> None:
    await limits.admit(ask(QUOTA, max_output=80))
    limits.at_ms += 10 * LEASE_MS

    assert not (await limits.admit(ask(QUOTA, request="r2", min_output=1))).is_admitted
    await limits.passes(LEASE_MS - 1)
    assert await limits.report(ORGANIZATION, {RequestId("r1"): 80}, LEASE_MS) == []
    limits.at_ms += 10 * LEASE_MS
    await limits.held(ORGANIZATION)
    assert await limits.reaps(LEASE_MS - 1) == [], "what was told of since is spared again"
    assert await limits.reaps(1) == ["r1"]


async def test_one_whose_owner_is_gone_is_reaped_though_the_organization_asks_seldom(limits: Limits) -> None:
    await limits.admit(ask(LEASE))
    reaped = []
    for _ in range(5):
        limits.at_ms += LEASE_MS - 5_000
        reaped.append(await limits.reap(ORGANIZATION, 1))

    assert reaped == [[], [], [], ["r1"], []]


# A store that has lost what it knew


def reservation(asked: Ask, output: int = 20, reported: int = 0) -> Reservation:
    return Reservation(ask=asked, granted_output=output, reserved=holdings(asked, output), reported_output=reported)


async def test_hard_quotas_wait_for_an_epoch_and_nothing_else_does() -> None:
    limits = Limits()
    soft, shadow = msgspec.structs.replace(QUOTA, is_hard=False), msgspec.structs.replace(QUOTA, is_shadow=True)

    assert await limits.check(ask(LEASE, QUOTA)) == Verdict(is_admitted=False, is_lost=True)
    assert await limits.admit(ask(LEASE, QUOTA)) == Verdict(is_admitted=False, is_lost=True)
    assert await limits.look_at(LEASE) == [2]
    assert (await limits.admit(ask(RATE, LEASE, soft))).is_admitted
    assert (await limits.admit(ask(RATE, LEASE, shadow, request="r2"))).is_admitted


async def test_what_was_lost_is_made_known_again_once_by_however_many() -> None:
    limits = Limits()
    first, second = reservation(ask(*ALL), 12, 4), reservation(ask(*ALL, request="r2"), 20)
    await limits.begin_epoch(ORGANIZATION, {"quota": 30}, [first])
    await limits.begin_epoch(ORGANIZATION, {"quota": 31}, [first, second])

    assert await limits.look_at(*ALL) == [70, 18, 0]
    assert await limits.raise_output(ORGANIZATION, RequestId("r1"), 14) == 14
    assert await limits.settles("r2", 10, 1) == Settlement(charged=(11, 11, 0), forgiven=(0, 0, 0))
    assert await limits.reaps() == ["r1"]
    assert await limits.look_at(*ALL) == [75, 45, 2]


async def test_requests_made_known_again_charge_a_bucket_no_lower_than_its_debt() -> None:
    limits = Limits()
    running = [reservation(ask(SLOW, request=f"r{number}", prompt_tokens=65)) for number in range(2)]
    await limits.begin_epoch(ORGANIZATION, {}, running)

    assert await limits.look_at(SLOW) == [-20]  # 70 and 50
    await limits.cancel(ORGANIZATION, RequestId("r1"))
    assert await limits.look_at(SLOW) == [30]


async def test_one_that_has_ended_is_not_made_known_again(limits: Limits) -> None:
    for request in ("r1", "r2"):
        await limits.admit(ask(*ALL, request=request))
    await limits.settles("r1", 10, 0)
    await limits.reaps()
    await limits.begin_epoch(ORGANIZATION, {}, [reservation(ask(*ALL)), reservation(ask(*ALL, request="r2"))])

    assert await limits.look_at(*ALL) == [80, 80, 2]


# What is kept


async def test_meters_that_stand_as_at_first_are_forgotten_when_nobody_uses_them(limits: Limits) -> None:
    for number in range(20):
        meters = [Bucket(key=f"b{number}", capacity=100, refill=1), Quota(key=f"q{number}", amount=100)]
        await limits.admit(ask(*meters, Lease(key=f"l{number}", limit=1), request=f"r{number}"))
        await limits.settles(f"r{number}", 10, 0)
    kept = limits._books[ORGANIZATION].meters
    assert (len(kept.buckets), len(kept.quotas), len(kept.leases)) == (20, 20, 0)
    limits.at_ms += kept_meters.QUOTA_IDLE_MS

    for number in range(10):
        await limits.admit(ask(RATE, QUOTA, request=f"new{number}"))
        await limits.cancel(ORGANIZATION, RequestId(f"new{number}"))
    assert list(kept.buckets) == ["rate"]
    assert list(kept.quotas) == ["quota"]


async def test_meters_in_use_or_not_full_are_kept(limits: Limits) -> None:
    await limits.admit(ask(*ALL, lease_ms=86_400_000))
    for _ in range(50):
        limits.at_ms += 86_400_000
        await limits.report(ORGANIZATION, {RequestId("r1"): 1}, 86_400_000)
    await limits.admit(ask(RATE, request="r2"))

    assert await limits.look_at(*ALL) == [85, 70, 1]


async def test_ended_requests_are_known_for_a_time(limits: Limits) -> None:
    await limits.admit(ask(request="settled"))
    await limits.settles("settled", 10, 0)
    await limits.admit(ask(request="reaped"))
    assert await limits.reaps() == ["reaped"]
    limits.at_ms += kept_requests.REAPED_KEPT_MS
    for request in ("one", "two"):
        await limits.admit(ask(request=request))
    await limits.settles("one", 10, 0)
    await limits.reaps()

    assert await limits.settles("settled", 10, 0) is None
    assert await limits.settles("reaped", 10, 0) is None


async def test_no_more_ended_requests_are_kept_than_may_be(limits: Limits, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_requests, "MOST_KEPT", 3)
    for number in range(5):
        await limits.admit(ask(request=f"r{number}"))
        await limits.settles(f"r{number}", 10, 0)

    assert [await limits.settles(f"r{number}", 10, 0) is None for number in range(5)] == [
        True,
        True,
        False,
        False,
        False,
    ]


async def test_many_reports_leave_nothing_behind(limits: Limits) -> None:
    await limits.admit(ask(LEASE))
    for _ in range(100):
        limits.at_ms += 1_000
        await limits.report(ORGANIZATION, {RequestId("r1"): 1}, LEASE_MS)

    assert len(limits._books[ORGANIZATION].requests._looks) == 1


async def test_weights_are_those_of_the_admission(limits: Limits) -> None:
    money = Weights(prompt=2_000_000, cached=500_000, output=10_000_000)
    await limits.admit(ask(Use(Quota(key="money", amount=1000), money)))

    assert await limits.look_at(Quota(key="money", amount=1000)) == [780]
    await limits.settles("r1", 10, 3, 4)
    assert await limits.look_at(Quota(key="money", amount=1000)) == [956]
