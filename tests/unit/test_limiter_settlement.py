"""Every admission is settled once, whatever becomes of the store meanwhile; one that has forgotten is told again."""

from __future__ import annotations

from typing import Any

import pytest
from identity_kit import KEY, holder_of
from limiter_kit import HARD, MODEL, ORGANIZATION, REQUESTS, RUNNING, SOFT, TOKENS, Process, Wanted, limited, top_up

from gateway.domain.ids import RequestId
from gateway.domain.limits.policy import Limit, QuotaRule, RequestRate, Rule
from gateway.domain.principal import Principal
from gateway.domain.usage import TokenUsage
from gateway.errors import LimitsUnavailable, QuotaExceeded, StorageDown
from gateway.limits.memory import MemoryLimits
from gateway.services.limiter import Limiter
from gateway.services.refresher import Refresher

ALL = (REQUESTS, TOKENS, RUNNING, HARD)
DAY = "quota-tokens/day:key_1:2026-11-29:"


class FlakyLimits(MemoryLimits):
    """Answers while `is_up`."""

    is_up = True

    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        if name in ("settle", "cancel", "raise_output", "admit") and not self.is_up:
            raise LimitsUnavailable
        return found


class Flaky(Process):
    def __init__(self, *limits: Limit | Rule) -> None:
        super().__init__(*limits)
        self.flaky = FlakyLimits(lambda: int(self.clock.time() * 1000))
        self.limiter.store = self.store = self.flaky


async def flaky(*limits: Limit | Rule) -> Flaky:
    process = Flaky(*limits)
    await process.begin()
    return process


async def test_what_was_not_used_is_given_back() -> None:
    process = Process(*ALL)
    await process.begin()
    grant = await process.admit()
    await process.limiter.settle(grant, TokenUsage(10, 25, 4))

    assert await process.left() == [1, 65, 2, 965]
    assert (process.num_live, process.limiter.late) == (0, {})


async def test_what_has_done_nothing_gets_everything_back() -> None:
    process = Process(*ALL)
    await process.begin()
    grant = await process.admit()
    await process.limiter.settle(grant, TokenUsage())

    assert await process.left() == [2, 100, 2, 1_000]


async def test_settled_again_changes_nothing() -> None:
    process = Process(*ALL)
    await process.begin()
    grant = await process.admit()
    for _ in range(2):
        await process.limiter.settle(grant, TokenUsage(10, 25))
    await process.limiter.settle(grant, TokenUsage())

    assert await process.left() == [1, 65, 2, 965]


@pytest.mark.parametrize(("usage", "left"), [(TokenUsage(10, 25), [1, 65, 2, 965]), (TokenUsage(), [2, 100, 2, 1_000])])
async def test_what_the_store_does_not_take_is_late_and_settled_once_when_it_does(
    usage: TokenUsage, left: list[int]
) -> None:
    process = await flaky(*ALL)
    grant = await process.admit()
    process.flaky.is_up = False
    await process.limiter.settle(grant, usage)
    with pytest.raises(LimitsUnavailable):
        await process.limiter.settle_late(ORGANIZATION)
    assert (process.late_ids, process.num_live) == ([grant.info.request_id], 0)
    process.flaky.is_up = True
    assert await process.left() == [1, 0, 1, 890]
    for _ in range(2):
        await process.limiter.settle_late(ORGANIZATION)
    assert await process.left() == left
    assert process.limiter.late == {}


async def test_late_ones_are_settled_until_the_store_is_away_again() -> None:
    process = await flaky(RUNNING)
    grants = [await process.admit() for _ in range(2)]
    process.flaky.is_up = False
    for grant in grants:
        await process.limiter.settle(grant, TokenUsage(1, 1))
    process.flaky.is_up = True
    settle = process.flaky.settle

    async def settle_and_go(*settlement: Any) -> object:
        process.flaky.is_up = False
        return await settle(*settlement)

    process.flaky.settle = settle_and_go  # type: ignore[method-assign]
    with pytest.raises(LimitsUnavailable):
        await process.limiter.settle_late(ORGANIZATION)

    assert process.late_ids == [grants[1].info.request_id]


# A store that has forgotten


async def test_a_store_that_does_not_know_the_request_any_more_has_to_be_told_the_rest_first() -> None:
    process = Process(HARD, RUNNING)
    await process.begin()
    grant = await process.admit()
    process.store._books.clear()
    await process.limiter.settle(grant, TokenUsage(10, 25))

    assert process.limiter.lost == {ORGANIZATION}
    assert process.late_ids == [grant.info.request_id]


@pytest.mark.parametrize("rule", [SOFT, REQUESTS])
async def test_without_a_hard_quota_there_is_nothing_that_it_had_to_know_first(rule: Rule) -> None:
    process = Process(rule, RUNNING)
    grant = await process.admit()
    process.store._books.clear()
    await process.limiter.settle(grant, TokenUsage(10, 25))

    assert (process.limiter.lost, process.limiter.late) == (set(), {})


async def test_what_ends_while_the_organization_is_lost_is_settled_afterwards_unless_it_has_no_quota() -> None:
    process = Process(HARD, RUNNING)
    await process.begin()
    with_quota = await process.admit()
    process.principal = limited(RUNNING)
    without = await process.admit()
    process.limiter.note_lost(ORGANIZATION)
    await process.limiter.settle(with_quota, TokenUsage(10, 5))
    await process.limiter.settle(without, TokenUsage(10, 5))

    assert process.late_ids == [with_quota.info.request_id]
    assert await process.left() == [1], "the other one's is still held"


async def test_what_was_settled_is_told_again_as_long_as_the_ledger_does_not_have_it() -> None:
    process = Process(HARD)
    await process.begin()
    grants = [await process.admit() for _ in range(3)]
    for grant in grants[:2]:
        await process.limiter.settle(grant, TokenUsage(10, 5))
    await process.limiter.settle(grants[2], TokenUsage())
    first, second, _ = (grant.info.request_id for grant in grants)
    process.limiter.posted([first, RequestId("req_of_another")])
    assert process.late_ids == []

    process.limiter.note_store_lost()
    assert (process.late_ids, process.limiter.lost) == ([second], {ORGANIZATION})
    await process.limiter.settle_late(ORGANIZATION)
    assert await process.left() == [970], "it still knew it, after all"
    process.limiter.posted([second])
    process.limiter.note_store_lost()
    assert process.late_ids == []


async def test_no_more_is_remembered_than_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.services.limiter.MOST_UNPOSTED", 2)
    process = Process(HARD)
    await process.begin()
    grants = [await process.admit(Wanted(output_caps=(1,))) for _ in range(3)]
    for grant in grants:
        await process.limiter.settle(grant, TokenUsage(10, 1))
    process.limiter.note_store_lost()

    assert process.late_ids == [grant.info.request_id for grant in grants[1:]]


# More output


async def test_output_is_raised_as_far_as_the_quota_has_it_and_never_lowered() -> None:
    process = Process(QuotaRule(unit="tokens", period="day", amount=200))
    await process.begin()
    other = await process.admit(Wanted((10,), (50,)))
    grant = await process.admit(Wanted((10,), (500,)))
    assert (grant.granted, grant.is_clamped) == (130, True)
    await process.limiter.settle(other, TokenUsage(10, 20))

    assert await process.limiter.raise_output(grant, 140) == grant.granted == 140
    assert await process.limiter.raise_output(grant, 500) == grant.granted == 160
    assert await process.limiter.raise_output(grant, 20) == 160
    assert await process.left() == [0]


async def test_what_is_not_limited_or_granted_already_is_not_asked_for() -> None:
    process = await flaky()
    unlimited = await process.admit()
    process.principal = limited(HARD)
    grant = await process.admit()
    process.flaky.is_up = False

    assert await process.limiter.raise_output(unlimited, 100) == 100
    assert await process.limiter.raise_output(grant, 100) == 100
    with pytest.raises(LimitsUnavailable):
        await process.limiter.raise_output(grant, 101)


async def test_a_request_that_the_store_has_forgotten_or_may_have_is_not_raised() -> None:
    process = Process(HARD)
    await process.begin()
    grant = await process.admit()
    process.limiter.note_lost(ORGANIZATION)
    with pytest.raises(LimitsUnavailable):
        await process.limiter.raise_output(grant, 200)
    await process.begin()
    process.store._books.clear()
    with pytest.raises(LimitsUnavailable):
        await process.limiter.raise_output(grant, 200)
    assert grant.granted == 100


async def test_a_top_up_or_an_edit_is_found_out_when_more_is_asked_for() -> None:
    quota = limited(QuotaRule(unit="tokens", period="day", amount=110)).limits[0]
    now: list[Principal] = [limited(quota)]

    async def refresh(principal: Principal) -> Principal:
        assert principal.key_id == "key_1"
        return now[-1]

    process = Process(quota)
    process.limiter = Limiter(process.store, process.clock, refresh=refresh)
    await process.begin()
    grant = await process.admit(Wanted((10,), (500,)))
    assert await process.limiter.raise_output(grant, 500) == 100

    now.append(limited(quota, top_ups=(top_up(30, of=quota, period_id="2026-11-29"),)))
    assert await process.limiter.raise_output(grant, 500) == 130
    now.append(limited(QuotaRule(unit="tokens", period="day", amount=50)))
    assert await process.limiter.raise_output(grant, 500) == 130
    process.clock.now += 2_000
    now.append(limited(QuotaRule(unit="tokens", period="day", amount=900)))
    assert await process.limiter.raise_output(grant, 500) == 130, "that is another day's quota"


class Holders:
    """Implements `gateway.services.refresher.Holders`."""

    def __init__(self, *answers: Any) -> None:
        self.answers = list(answers)

    async def find(self, public_id: str) -> Any:
        assert public_id == "public"
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


async def test_a_principal_is_looked_up_again_and_stays_the_same_while_nothing_changes() -> None:
    holder, changed = holder_of(KEY), holder_of(KEY, limited(team="blue"))
    refresh = Refresher(Holders(holder, holder, changed, None, StorageDown()))
    asked = limited(public_id="public")
    first, second, third = [await refresh(asked) for _ in range(3)]

    assert first is second
    assert (first.team, third.team) == ("red", "blue")
    assert await refresh(asked) is asked
    with pytest.raises(LimitsUnavailable):
        await refresh(asked)


# What alerts look at


async def test_quotas_are_known_by_what_was_last_held_to_them_admitted_or_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.services.limiter.MOST_QUOTAS", 2)
    month = QuotaRule(unit="tokens", period="month", amount=115)
    process = Process(RequestRate(amount=9, period="day"), HARD, month)
    await process.begin()
    await process.admit()
    with pytest.raises(QuotaExceeded):
        await process.admit()
    keys = [DAY, "quota-tokens/month:key_1:2026-11:"]
    assert list(process.limiter.quotas) == keys
    assert process.limiter.quotas[DAY] == (ORGANIZATION, process.limiter.plan(process.principal, MODEL, ()).metered[1])

    process.principal = limited(QuotaRule(unit="tokens", period="week", amount=1))
    with pytest.raises(QuotaExceeded):
        await process.admit()
    assert list(process.limiter.quotas) == [keys[1], "quota-tokens/week:key_1:2026-W48:"]
