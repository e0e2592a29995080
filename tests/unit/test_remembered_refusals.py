"""What was refused a moment ago is refused again without asking; not what has been given back meanwhile."""

from __future__ import annotations

import msgspec
import pytest
from limited_hub import MODEL, LimitedHub, limited

from gateway.backends.scripted import Gate, Say
from gateway.domain.ids import KeyId
from gateway.domain.limits.meters import Bucket, Use
from gateway.domain.limits.policy import Concurrency, QuotaRule, TokenRate
from gateway.domain.principal import Principal
from gateway.errors import LimitExceeded, QuotaExceeded
from gateway.services.refusals import QUOTA_REMEMBERED_S, RefusalMemory

DAY = QuotaRule(unit="tokens", period="day", amount=100)
RATE = TokenRate(amount=100, period="minute", is_strict=True)


@pytest.mark.parametrize("rule", [DAY, RATE])
async def test_what_a_request_gives_back_can_be_had_at_once(rule: QuotaRule | TokenRate) -> None:
    hub = await LimitedHub(rule, script=[Say("x"), Gate("go")]).begun()
    async with await hub.call(most=97) as first:
        for _ in range(2):
            with pytest.raises(LimitExceeded) as refused:
                await hub.ask(most=10)
            assert refused.value.limit.remaining == 0
        hub.backend.gate("go").set()
        async for _ in first:
            pass
        call, _ = await hub.ask(most=10)

    assert call.usage.completion_tokens == 1


async def test_what_a_request_of_other_limits_gives_back_changes_nothing() -> None:
    hub = await LimitedHub(DAY, script=[Gate("go")]).begun()
    mine = hub.principal
    async with await hub.call(most=97):
        with pytest.raises(QuotaExceeded):
            await hub.ask(most=10)
        hub.principal = msgspec.structs.replace(limited(Concurrency(amount=5)), key_id=KeyId("key_2"))
        hub.backend.gate("go").set()
        await hub.ask(most=1)
        hub.principal = mine
        with pytest.raises(QuotaExceeded):
            hub.limiter.guard(mine, MODEL, ())


async def test_a_quotas_refusal_is_not_remembered_for_long() -> None:
    hub = await LimitedHub(DAY, script=[Gate("go")]).begun()
    async with await hub.call(most=97) as first:
        with pytest.raises(QuotaExceeded):
            await hub.ask(most=10)
        await hub.store.settle(first.info.principal.organization_id, first.info.request_id, first.usage)
        hub.clock.now += QUOTA_REMEMBERED_S - 0.001
        with pytest.raises(QuotaExceeded):
            await hub.call(most=10)
        hub.clock.now += 0.002
        await hub.call(most=10)
        hub.backend.gate("go").set()
    assert QUOTA_REMEMBERED_S <= 0.05


def test_all_that_a_meter_refused_is_forgotten_and_nothing_else() -> None:
    memory = RefusalMemory()
    hub = LimitedHub(DAY, RATE)
    plan = hub.limiter.plan(hub.principal, MODEL, ())
    quota, rate = plan.uses
    places = [(KeyId(f"key_{i}"), MODEL) for i in range(4)]
    for place, index in zip(places, (0, 1, 0, 1), strict=True):
        memory.keep(place, plan, index, 0, None, 0.0)
    memory.keep(places[2], plan, 1, 0, None, 0.0)

    memory.forget([Use(Bucket(key="another", capacity=1, refill=1)), quota])
    assert [memory.find(place, plan, 0.0) is None for place in places] == [True, False, False, False]
    memory.forget([rate])
    assert len(memory) == 0
    memory.forget([rate])


async def test_more_output_leaves_plan_and_refusals_as_they_are() -> None:
    async def refresh(principal: Principal) -> Principal:
        return msgspec.structs.replace(principal)

    hub = await LimitedHub(DAY, script=[Gate("go")], refresh=refresh).begun()
    async with await hub.call(most=1_000) as call:
        plan = hub.limiter.plan(hub.principal, MODEL, ())
        with pytest.raises(QuotaExceeded):
            await hub.ask(most=10)
        assert await hub.limiter.raise_output(call.grant, 1_000) == 97

        assert hub.limiter.plan(hub.principal, MODEL, ()) is plan
        with pytest.raises(QuotaExceeded):
            hub.limiter.guard(hub.principal, MODEL, ())
        hub.backend.gate("go").set()
