"""No request reserves more than can be counted, and the engine never has leave for more than is reserved."""

from __future__ import annotations

import pytest
from limited_hub import LimitedHub, cause

from gateway.backends.scripted import Gate, Say
from gateway.domain.limits import rules, validation
from gateway.domain.limits.meters import MOST_TOKENS
from gateway.domain.limits.policy import Concurrency, QuotaRule
from gateway.errors import ContextLengthExceeded
from gateway.services import limiter

MONTH = QuotaRule(unit="tokens", period="month", amount=11_000_000)


async def test_more_output_than_can_be_counted_is_granted_in_parts() -> None:
    hub = await LimitedHub(MONTH, script=[Gate("go"), Say("x")], window=131_072).begun()
    async with await hub.call(*["a"] * 8, most=131_000, num_choices=16) as call:
        grant = call.grant
        assert grant.max_output == 8 * 16 * 131_000
        assert grant.granted == MOST_TOKENS - 8
        assert grant.is_clamped
        assert hub.generation._held_cap == grant.granted // 128
        assert await hub.left() == [11_000_000 - MOST_TOKENS]
        hub.backend.gate("go").set()


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Can be counted."""
    for module in (limiter, rules, validation):
        monkeypatch.setattr(module, "MOST_TOKENS", 100)


@pytest.mark.usefixtures("few")
async def test_prompts_of_more_than_can_be_counted_are_too_long() -> None:
    hub = LimitedHub(Concurrency(amount=1), script=[Say("x")])
    for prompts in (["a " * 100], ["a " * 101], ["a " * 49] * 2 + ["a"]):
        with pytest.raises(ContextLengthExceeded, match="maximum context length is 100 tokens") as refused:
            await hub.ask(*prompts)
        assert (refused.value.status, refused.value.code) == (400, "context_length_exceeded")

    call, _ = await hub.ask("a " * 99)
    assert call.usage.completion_tokens == 1
    assert await hub.left() == [1]


@pytest.mark.usefixtures("few")
async def test_an_answer_ends_where_no_more_can_be_reserved() -> None:
    hub = LimitedHub(Concurrency(amount=1), script=[Say("x")] * 200)
    call, events = await hub.ask("a " * 60, most=150)

    assert call.grant.granted == 40
    assert (call.usage.completion_tokens, cause(events)) == (40, "quota_exceeded")
