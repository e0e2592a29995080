"""The rules of limits, kept by a real Redis."""

from __future__ import annotations

import pytest
from redis_limits_kit import Hub, bucket, lease, quota

from gateway.domain.ids import new_request_id
from gateway.domain.limits.admission import Settlement, Verdict
from gateway.domain.limits.meters import (
    REQUESTS,
    Bucket,
    Use,
    Weights,
)

DAY_MS = 86_400_000


# Buckets


async def test_a_bucket_is_charged_for_prompt_and_expected_output_and_refills(hub: Hub) -> None:
    _, first = await hub.admit(bucket(100), prompt=40, expected=20)
    _, second = await hub.admit(bucket(100), prompt=40, expected=20)
    hub.clock.now_ms += 19_999  # a unit a second
    _, third = await hub.admit(bucket(100), prompt=40, expected=20)
    hub.clock.now_ms += 1
    _, fourth = await hub.admit(bucket(100), prompt=40, expected=20)

    assert first == Verdict(is_admitted=True, granted_output=100, remaining=(40,))
    assert second == Verdict(is_admitted=False, binding=0, remaining=(40,), wait_ms=20_000)
    assert third == Verdict(is_admitted=False, binding=0, remaining=(59,), wait_ms=1)
    assert fourth == Verdict(is_admitted=True, granted_output=100, remaining=(0,))


async def test_expected_output_charges_no_more_than_the_capacity(hub: Hub) -> None:
    _, verdict = await hub.admit(bucket(50), prompt=40, expected=100)

    assert verdict == Verdict(is_admitted=True, granted_output=100, remaining=(0,))


async def test_a_prompt_above_the_capacity_never_fits(hub: Hub) -> None:
    _, verdict = await hub.admit(bucket(50), lease(0), prompt=51, expected=0)

    assert verdict == Verdict(is_admitted=False, binding=0, remaining=(50, 0), is_never=True)


async def test_a_bucket_without_refill_has_no_wait(hub: Hub) -> None:
    await hub.admit(bucket(50, 0), prompt=50, expected=0)
    hub.clock.now_ms += 1_000 * DAY_MS
    _, verdict = await hub.admit(bucket(50, 0), prompt=1, expected=0)

    assert verdict == Verdict(is_admitted=False, binding=0, remaining=(0,))


async def test_settling_gives_back_or_takes_down_to_the_debt_and_forgives_the_rest(hub: Hub) -> None:
    meter = bucket(100, max_debt=30)
    early, _ = await hub.admit(meter, prompt=10, expected=50)
    assert await hub.settle(early, 10, 20) == Settlement(charged=(30,), forgiven=(0,))
    assert await hub.left(meter) == [70]
    greedy, _ = await hub.admit(meter, prompt=10, expected=50, most=500)
    hub.clock.now_ms += 500  # half a unit
    assert await hub.settle(greedy, 10, 200) == Settlement(charged=(210,), forgiven=(109,))
    assert await hub.left(meter) == [-30]
    hub.clock.now_ms += 31_000
    assert await hub.left(meter) == [1]


async def test_the_wait_of_a_bucket_in_debt(hub: Hub) -> None:
    """31 units at 7 a minute."""
    meter = bucket(100, 7, max_debt=30)
    request, _ = await hub.admit(meter, prompt=10, expected=0)
    await hub.settle(request, 10, 200)
    assert (await hub.store.check(hub.ask(meter, prompt=1, expected=0))).wait_ms == 265_715
    hub.clock.now_ms += 265_714
    assert (await hub.store.check(hub.ask(meter, prompt=1, expected=0))).wait_ms == 1
    hub.clock.now_ms += 1
    assert (await hub.store.check(hub.ask(meter, prompt=1, expected=0))).is_admitted


async def test_what_is_given_back_stops_at_the_capacity(hub: Hub) -> None:
    request, _ = await hub.admit(bucket(100), prompt=10, expected=50)
    hub.clock.now_ms += 50_000
    await hub.settle(request, 10, 20)

    assert await hub.left(bucket(100)) == [100]


async def test_time_does_not_go_back(hub: Hub) -> None:
    await hub.admit(bucket(100), prompt=60, expected=0)
    hub.clock.now_ms -= 50_000
    assert await hub.left(bucket(100)) == [40]
    _, verdict = await hub.admit(bucket(100), prompt=10, expected=0)
    hub.clock.now_ms += 55_000

    assert verdict.remaining == (30,)
    assert await hub.left(bucket(100)) == [35]


async def test_an_edited_limit_keeps_what_was_used(hub: Hub) -> None:
    await hub.admit(bucket(100), quota(1_000, is_hard=False), prompt=30, expected=0, most=0, least=0)

    assert await hub.left(bucket(200), quota(500)) == [70, 470]
    assert await hub.left(bucket(50), quota(20)) == [50, -10]
    await hub.admit(bucket(50), prompt=1, expected=0)
    assert await hub.left(bucket(200)) == [49]


async def test_a_debt_that_is_limited_more_is_forgiven_before_it_is_refilled(hub: Hub) -> None:
    request, _ = await hub.admit(bucket(100, max_debt=50), prompt=10, expected=0)
    await hub.settle(request, 10, 200)
    hub.clock.now_ms += 5_000

    assert await hub.left(bucket(100, max_debt=50), bucket(100, max_debt=20)) == [-45, -15]


async def test_a_shadow_bucket_is_charged_to_its_debt_and_no_further(hub: Hub) -> None:
    meter = bucket(50, 60, max_debt=20, is_shadow=True)
    _, verdict = await hub.admit(meter, prompt=60, expected=40)
    request, second = await hub.admit(meter, prompt=60, expected=40)

    assert verdict == Verdict(is_admitted=True, granted_output=100, remaining=(-10,), shadow_refused=(0,))
    assert second == Verdict(is_admitted=True, granted_output=100, remaining=(-20,), shadow_refused=(0,))
    await hub.store.cancel(hub.id, request)
    assert await hub.left(meter) == [-10]


# Quotas


async def test_a_hard_quota_clamps_and_then_refuses(hub: Hub) -> None:
    await hub.begin()
    uses = (quota(300, "team"), quota(200, "org"))
    first, verdict = await hub.admit(*uses, prompt=50, most=100)
    _, second = await hub.admit(*uses, prompt=20, most=100)
    _, third = await hub.admit(*uses, prompt=1, most=100)
    _, never = await hub.admit(*uses, prompt=200, most=100)

    assert verdict == Verdict(is_admitted=True, granted_output=100, remaining=(150, 50))
    assert second == Verdict(is_admitted=True, granted_output=30, binding=1, remaining=(100, 0))
    assert third == Verdict(is_admitted=False, binding=1, remaining=(100, 0))
    assert never == Verdict(is_admitted=False, binding=0, remaining=(100, 0), is_never=True)
    assert await hub.settle(first, 50, 7) == Settlement(charged=(57, 57), forgiven=(0, 0))
    assert await hub.left(*uses) == [193, 93]


async def test_of_quotas_that_grant_the_same_the_first_binds_and_none_that_grants_all(hub: Hub) -> None:
    await hub.begin()
    _, equal = await hub.admit(quota(90, "a"), quota(80, "b"), quota(80, "c"), prompt=10, most=100)
    _, whole = await hub.admit(quota(110, "d"), prompt=10, most=100)

    assert equal == Verdict(is_admitted=True, granted_output=70, binding=1, remaining=(10, 0, 0))
    assert whole == Verdict(is_admitted=True, granted_output=100, remaining=(0,))


async def test_weights_of_a_quota(hub: Hub) -> None:
    await hub.begin()
    price = Weights(prompt=2_500_000, cached=1_000_000, output=3_333_333, per_request=7)
    use = Use(quota(100), price)
    request, verdict = await hub.admit(use, prompt=10)

    assert verdict == Verdict(is_admitted=True, granted_output=20, binding=0, remaining=(1,))
    assert await hub.settle(request, 10, 3, cached=5) == Settlement(charged=(35,), forgiven=(0,))
    assert await hub.left(use) == [65]


async def test_output_that_costs_nothing_is_granted_whole(hub: Hub) -> None:
    await hub.begin()
    _, verdict = await hub.admit(Use(quota(10), Weights(output=0)), prompt=10)

    assert verdict == Verdict(is_admitted=True, granted_output=100, remaining=(0,))


async def test_a_soft_quota_counts_and_refuses_nothing(hub: Hub) -> None:
    meter = quota(50, is_hard=False)
    _, verdict = await hub.admit(meter, prompt=10)

    assert verdict == Verdict(is_admitted=True, granted_output=100, remaining=(-60,))


async def test_a_shadow_quota_says_what_it_would_have_refused(hub: Hub) -> None:
    await hub.begin()
    uses = (quota(5, "shadow", is_shadow=True), quota(80, "real"))
    _, verdict = await hub.admit(*uses)

    assert verdict == Verdict(is_admitted=True, granted_output=70, binding=1, remaining=(-75, 0), shadow_refused=(0,))


async def test_output_is_raised_as_far_as_a_quota_allows_that_was_changed_meanwhile(hub: Hub) -> None:
    await hub.begin()
    request, _ = await hub.admit(quota(100), prompt=10, most=20)

    for amount, granted in ((60, 50), (130, 120), (40, 120)):
        assert await hub.store.raise_output(hub.id, request, 500, [quota(amount)]) == granted
    assert await hub.store.raise_output(hub.id, request, 500, [quota(1, is_hard=False)]) == 500
    assert await hub.left(quota(600)) == [90]


async def test_output_is_raised_as_far_as_hard_quotas_allow(hub: Hub) -> None:
    await hub.begin()
    uses = (quota(100), quota(10, "soft", is_hard=False), bucket(1_000))
    request, _ = await hub.admit(*uses, prompt=10, most=20)

    assert await hub.store.raise_output(hub.id, request, 10) == 20
    assert await hub.store.raise_output(hub.id, request, 50) == 50
    assert await hub.left(*uses) == [40, -50, 970]
    assert await hub.store.raise_output(hub.id, request, 500) == 90
    assert await hub.store.raise_output(hub.id, request, 501) == 90
    assert await hub.left(*uses) == [0, -90, 970]
    assert await hub.store.raise_output(hub.id, new_request_id(1), 5) is None
    await hub.settle(request, 10, 90)
    assert await hub.left(*uses) == [0, -90, 900]
    assert await hub.store.raise_output(hub.id, request, 5) is None


async def test_a_request_is_settled_in_the_period_it_was_admitted_in(hub: Hub) -> None:
    await hub.begin()
    request, _ = await hub.admit(quota(200, "day_1"))
    await hub.admit(quota(200, "day_2"))
    await hub.settle(request, 10, 5)

    assert await hub.left(quota(200, "day_1"), quota(200, "day_2")) == [185, 90]


# All of them


async def test_a_refusal_leaves_everything_as_it_was(hub: Hub) -> None:
    await hub.begin()
    uses = (Use(bucket(5), REQUESTS), quota(1_000), lease(1))
    held, _ = await hub.admit(*uses)
    refused = {(await hub.admit(*uses))[1] for _ in range(10)}
    assert refused == {Verdict(is_admitted=False, binding=2, remaining=(4, 890, 0))}
    await hub.store.cancel(hub.id, held)

    assert await hub.left(*uses) == [5, 1_000, 1]


async def test_the_first_that_refuses_binds_and_there_is_no_wait_if_one_has_none(hub: Hub) -> None:
    slow = Bucket(key="slow", capacity=100, refill=60)
    quick = Bucket(key="quick", capacity=100, refill=600)
    await hub.admit(slow, quick, lease(1), prompt=100, expected=0)

    _, buckets = await hub.admit(quick, slow, prompt=50, expected=0)
    _, all_three = await hub.admit(lease(1), quick, slow, prompt=50, expected=0)

    assert buckets == Verdict(is_admitted=False, binding=0, remaining=(0, 0), wait_ms=50_000)
    assert all_three == Verdict(is_admitted=False, binding=0, remaining=(0, 0, 0))


async def test_a_check_says_what_admit_would_and_consumes_nothing(hub: Hub) -> None:
    await hub.begin()
    ask = hub.ask(bucket(150), quota(80), lease(1))
    checked = [await hub.store.check(ask) for _ in range(3)]
    assert await hub.left(bucket(150), quota(80), lease(1)) == [150, 80, 1]
    admitted = await hub.store.admit(ask)

    assert checked == [admitted] * 3
    assert admitted == Verdict(is_admitted=True, granted_output=70, binding=1, remaining=(40, 0, 0))


async def test_the_same_request_again_gets_the_same_answer(hub: Hub) -> None:
    await hub.begin()
    ask = hub.ask(bucket(150), quota(80), lease(1))
    answers = [await hub.store.admit(ask) for _ in range(3)]
    answers.append(await hub.store.check(ask))
    assert await hub.left(bucket(150), quota(80), lease(1)) == [40, 0, 0]
    await hub.settle(ask.request_id, 10, 10)
    answers.append(await hub.store.admit(ask))

    assert answers == [answers[0]] * 5
    assert await hub.left(bucket(150), quota(80), lease(1)) == [130, 60, 1]


async def test_no_meters_at_all(hub: Hub) -> None:
    request, verdict = await hub.admit()

    assert verdict == Verdict(is_admitted=True, granted_output=100)
    assert await hub.settle(request, 10, 10) == Settlement(charged=(), forgiven=())
    assert await hub.left() == []


async def test_an_ask_that_breaks_its_own_rules_is_not_sent(hub: Hub) -> None:
    with pytest.raises(ValueError, match="two uses"):
        await hub.admit(lease(1), lease(2))
    with pytest.raises(ValueError, match="min_output"):
        await hub.store.check(hub.ask(least=5, most=4))
