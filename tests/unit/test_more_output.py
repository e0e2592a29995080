"""Answers wait at their cap while it cannot be told whether they may have more, and not for ever."""

from __future__ import annotations

import asyncio
import logging

import pytest
from limited_hub import ORGANIZATION, LimitedHub, cause

from gateway.backends.scripted import Say
from gateway.domain.limits.policy import QuotaRule
from gateway.domain.principal import Principal
from gateway.errors import LimitsUnavailable
from gateway.services import headroom

DAY = QuotaRule(unit="tokens", period="day", amount=503)
"""A prompt and 500 tokens."""


class Failing:
    """A refresh that fails so often, with this."""

    def __init__(self, error: Exception, num: int) -> None:
        self.error = error
        self.left = num
        self.asked = 0

    async def __call__(self, principal: Principal) -> Principal:
        self.asked += 1
        if self.left:
            self.left -= 1
            raise self.error
        return principal


@pytest.fixture
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(headroom, "PATIENCE_S", 0.2)
    monkeypatch.setattr(headroom, "RETRY_S", 0.01)


@pytest.mark.usefixtures("patience")
@pytest.mark.parametrize("error", [LimitsUnavailable(), RuntimeError("a bug")])
async def test_an_answer_ends_for_a_cause_of_its_own_if_nobody_can_tell(error: Exception) -> None:
    refresh = Failing(error, 1_000_000)
    hub = await LimitedHub(DAY, script=[Say("x")] * 2_000, refresh=refresh).begun()
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    call, events = await hub.ask(most=1_000)

    assert (call.usage.completion_tokens, cause(events)) == (500, "limits_unavailable")
    assert loop.time() - began_s >= 0.2
    assert 3 < refresh.asked < 30
    assert await hub.left() == [0]


@pytest.mark.usefixtures("patience")
@pytest.mark.parametrize("error", [LimitsUnavailable(), RuntimeError("a bug")])
async def test_an_answer_goes_on_as_soon_as_it_can_be_told(error: Exception) -> None:
    raised = QuotaRule(unit="tokens", period="day", amount=2_000)
    other = LimitedHub(raised).principal

    class Back(Failing):
        async def __call__(self, principal: Principal) -> Principal:
            await super().__call__(principal)
            return other

    hub = await LimitedHub(DAY, script=[Say("x")] * 2_000, refresh=Back(error, 4)).begun()
    call, events = await hub.ask(most=1_000)

    assert (call.usage.completion_tokens, cause(events)) == (1_000, None)


@pytest.mark.usefixtures("patience")
async def test_the_last_word_is_what_the_store_says_when_it_is_back() -> None:
    hub = await LimitedHub(DAY, script=[Say("x")] * 2_000, refresh=Failing(LimitsUnavailable(), 4)).begun()
    call, events = await hub.ask(most=1_000)

    assert (call.usage.completion_tokens, cause(events)) == (500, "quota_exceeded")


@pytest.mark.usefixtures("patience")
async def test_a_bug_is_logged_once_an_answer(caplog: pytest.LogCaptureFixture) -> None:
    hub = await LimitedHub(DAY, script=[Say("x")] * 2_000, refresh=Failing(RuntimeError("a bug"), 1_000_000)).begun()
    with caplog.at_level(logging.ERROR, "gateway.services.headroom"):
        await hub.ask(most=1_000)

    [record] = caplog.records
    assert record.exc_info is not None
    assert hub.records[0].info.request_id in record.getMessage()


@pytest.mark.usefixtures("patience")
async def test_a_store_that_is_known_to_be_lost_has_not_said_that_there_is_no_more() -> None:
    hub = await LimitedHub(DAY, script=[Say("x")] * 2_000).begun()
    async with asyncio.timeout(5), await hub.call(most=1_000) as call:
        hub.limiter.note_lost(ORGANIZATION)
        events = [event async for some in call for event in some]

    assert cause(events) == "limits_unavailable"


async def test_who_leaves_while_an_answer_waits_is_not_waited_for() -> None:
    hub = await LimitedHub(DAY, script=[Say("x")] * 2_000, refresh=Failing(LimitsUnavailable(), 1_000_000)).begun()
    task = asyncio.create_task(hub.ask(most=1_000))
    async with asyncio.timeout(5):
        await hub.backend.wait_until(lambda: bool(hub.backend.generations) and hub.generation.num_told == 500)
    task.cancel()
    await asyncio.wait({task}, timeout=1)

    assert task.cancelled()
    assert hub.generation.aborted
    assert await hub.left() == [0]
