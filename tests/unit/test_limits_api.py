"""What callers see of limits: headers of what is answered and refused, and error bodies."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
import structlog
from identity_kit import PRINCIPAL
from limiter_kit import (
    HARD,
    MODEL,
    NOW_S,
    REQUESTS,
    RUNNING,
    SOFT,
    TOKENS,
    Wanted,
    info_of,
    limit,
)
from limits_api_kit import MESSAGES, PROMPT, WORDS, of_limits, opened

from gateway.backends.scripted import Gate, Say, Script
from gateway.domain.limits.policy import (
    Concurrency,
    ContextSize,
    QuotaRule,
    RequestRate,
    Rule,
    TokenRate,
)
from gateway.domain.usage import TokenUsage
from gateway.errors import LimitsUnavailable
from gateway.limits.degrading import DegradingLimits
from gateway.limits.memory import MemoryLimits
from gateway.services.ports import Readiness
from gateway.web.limit_headers import duration

# Answers


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_says_what_is_left_of_rates_after_it(stream: bool) -> None:
    """100 tokens of a bucket that gets ten a second are as many as 10 and 100 expected ones, at most."""
    wider = limit(TokenRate(amount=9_000, period="minute"), "team")
    async with opened(WORDS, wider, REQUESTS, TOKENS) as hub:
        answer = await hub.chat(stream=stream)

        assert answer.status_code == 200
        assert of_limits(answer) == {
            "x-ratelimit-limit-requests": "2",
            "x-ratelimit-remaining-requests": "1",
            "x-ratelimit-reset-requests": "1s",
            "x-ratelimit-limit-tokens": "100",
            "x-ratelimit-remaining-tokens": "0",
            "x-ratelimit-reset-tokens": "10s",
        }
        hub.clock.now += 0.5
        again = await hub.chat(most=5)
        assert again.headers["x-ratelimit-reset-requests"] == "2s", "a part of a request is not there yet"
        assert again.headers["x-ratelimit-remaining-tokens"] == str(100 - 40 + 5 - 15)


async def test_without_limits_there_are_no_such_headers() -> None:
    async with opened(WORDS) as hub:
        assert of_limits(await hub.chat()) == {}
    async with opened(WORDS, limit(REQUESTS, is_shadow=True), RUNNING, HARD) as hub:
        assert of_limits(await hub.chat()) == {}


async def test_of_a_rate_that_never_refills_the_reset_says_so() -> None:
    async with opened(WORDS, RequestRate(amount=0, period="day", burst=1)) as hub:
        assert (await hub.chat()).headers["x-ratelimit-reset-requests"] == "never"
        refused = await hub.chat()
        assert (refused.status_code, refused.headers["x-ratelimit-reset-requests"]) == (429, "never")
        assert "retry-after" not in refused.headers


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("endpoint", ["chat/completions", "completions"])
async def test_an_answer_that_a_quota_cuts_says_so_before_and_at_its_end(stream: bool, endpoint: str) -> None:
    async with opened(WORDS, QuotaRule(unit="tokens", period="day", amount=17)) as hub:
        body = {"model": MODEL, "max_tokens": 100, "stream": stream}
        prompts = {"completions": {"prompt": PROMPT}, "chat/completions": {"messages": MESSAGES}}
        answer = await hub.client.post(f"/v1/{endpoint}", json=body | prompts[endpoint])

    assert of_limits(answer) == {"x-evenhand-output-cap": "7", "x-evenhand-output-cap-reason": "quota"}
    if stream:
        chunks = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
        [choice] = chunks[-1]["choices"]
        assert all("stop_reason" not in chunk["choices"][0] for chunk in chunks[:-1])
    else:
        [choice] = answer.json()["choices"]
        assert answer.json()["usage"]["completion_tokens"] == 7
    assert (choice["finish_reason"], choice["stop_reason"]) == ("length", "quota_exceeded")


@pytest.mark.parametrize("endpoint", ["chat/completions", "completions"])
async def test_an_answer_that_ends_by_itself_or_where_it_was_told_to_has_no_stop_reason(endpoint: str) -> None:
    async with opened(WORDS, HARD) as hub:
        for most in (5, 100):
            prompt = {"prompt": PROMPT, "messages": MESSAGES}
            answer = await hub.client.post(f"/v1/{endpoint}", json={"model": MODEL, "max_tokens": most} | prompt)
            assert "stop_reason" not in answer.json()["choices"][0]


async def test_work_beyond_a_soft_quota_says_which_class_it_runs_in() -> None:
    async with opened(WORDS, SOFT) as hub:
        assert of_limits(await hub.chat()) == {}
        grant = await hub.limiter.admit(info_of(hub.principal), Wanted(), (), num_choices=1)
        await hub.limiter.settle(grant, TokenUsage(10, 950))
        told = {"x-evenhand-class": "batch", "x-evenhand-class-reason": "soft-quota"}

        assert of_limits(await hub.chat()) == told
        assert of_limits(await hub.chat(stream=True)) == told
        answer = await hub.client.post(
            "/v1/chat/completions",
            json={"model": MODEL, "messages": [{"role": "user", "content": "hi"}]},
            headers={"x-evenhand-class": "batch"},
        )
        assert of_limits(answer) == {}, "it is what was asked for"


# Refusals


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("rule", "num_before", "code", "error", "headers"),
    [
        (
            TOKENS,
            2,
            "rate_limit_exceeded",
            {
                "message": "The team's (m) limit 'tokens/minute' is reached (20 of 100 left). "
                "Please try again in 2.000 s.",
                "type": "rate_limit_error",
                "limit": {"name": "tokens/minute", "amount": 100, "remaining": 20, "wait_ms": 2_000},
            },
            {
                "retry-after": "2",
                "retry-after-ms": "2000",
                "x-ratelimit-limit-tokens": "100",
                "x-ratelimit-remaining-tokens": "20",
                "x-ratelimit-reset-tokens": "8s",
            },
        ),
        (
            RequestRate(amount=7, period="minute", burst=1),
            1,
            "rate_limit_exceeded",
            {
                "message": "The team's (m) limit 'requests/minute' is reached (0 of 1 left). "
                "Please try again in 8.572 s.",
                "type": "rate_limit_error",
                "limit": {"name": "requests/minute", "amount": 1, "remaining": 0, "wait_ms": 8_572},
            },
            {
                "retry-after": "9",
                "retry-after-ms": "8572",
                "x-ratelimit-limit-requests": "1",
                "x-ratelimit-remaining-requests": "0",
                "x-ratelimit-reset-requests": "8.572s",
            },
        ),
        (
            QuotaRule(unit="tokens", period="day", amount=45),
            1,
            "insufficient_quota",
            {
                "message": "The team's (m) quota 'quota-tokens/day' of 2026-11-29 has 5 of 45 left, less than the "
                "request needs.",
                "type": "insufficient_quota",
                "limit": {"name": "quota-tokens/day", "amount": 45, "remaining": 5, "wait_ms": 1_600_000},
            },
            {"retry-after": "1600", "retry-after-ms": "1600000", "x-should-retry": "false"},
        ),
    ],
    ids=lambda each: each.name if hasattr(each, "name") else "",
)
async def test_a_refusal_names_the_limit_what_is_left_and_the_wait(
    stream: bool, rule: Rule, num_before: int, code: str, error: dict[str, Any], headers: dict[str, str]
) -> None:
    async with opened(WORDS, limit(rule, "team", model=MODEL)) as hub:
        for _ in range(num_before):
            assert (await hub.chat(stream=stream)).status_code == 200
        answer = await hub.chat(stream=stream)

    assert answer.status_code == 429
    expected_limit = {"scope": "team", "model": MODEL, "help": "/v1/limits"} | error["limit"]
    assert answer.json() == {"error": error | {"param": None, "code": code, "limit": expected_limit}}
    assert of_limits(answer) == headers


async def test_as_many_at_a_time_as_may_be() -> None:
    async with opened(Script(steps=(Gate("go"), Say("a"))), Concurrency(amount=1)) as hub:
        first = asyncio.create_task(hub.chat())
        await hub.backend.wait_until(lambda: bool(hub.backend.generations))
        answer = await hub.chat()
        assert (answer.status_code, answer.json()["error"]["code"]) == (429, "concurrency_limit_exceeded")
        assert answer.json()["error"]["limit"]["wait_ms"] == 1_000
        assert of_limits(answer) == {"retry-after": "1", "retry-after-ms": "1000"}
        hub.backend.gate("go").set()
        assert (await first).status_code == 200
        assert (await hub.chat()).status_code == 200


async def test_what_is_too_large_for_ever_is_not_to_be_tried_again() -> None:
    async with opened(WORDS, TokenRate(amount=600, period="minute", burst=9)) as hub:
        answer = await hub.chat()

    assert answer.json()["error"]["limit"]["wait_ms"] is None
    assert of_limits(answer) == {
        "x-should-retry": "false",
        "x-ratelimit-limit-tokens": "9",
        "x-ratelimit-remaining-tokens": "9",
        "x-ratelimit-reset-tokens": "0s",
    }


async def test_sizes_are_refused_as_the_model_s_own() -> None:
    async with opened(WORDS, ContextSize(amount=10)) as hub:
        answer = await hub.chat()

    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "context_length_exceeded")
    assert "limit" not in answer.json()["error"]


async def test_limits_that_cannot_be_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    async with opened(WORDS, HARD) as hub:
        monkeypatch.setattr("gateway.services.limiter.REVIVAL_S", 0.01)
        hub.store._books.clear()
        hub.limiter.note_store_lost()
        for answer in (await hub.chat(), await hub.client.get("/v1/limits")):
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "limits_unavailable")
            assert of_limits(answer) == {"retry-after": "1", "retry-after-ms": "1000"}


# Degraded


class Away(MemoryLimits):
    async def admit(self, *_: Any) -> Any:
        raise LimitsUnavailable


async def test_shares_of_limits_are_told_of_in_headers_and_readiness() -> None:
    away = Away(lambda: int(NOW_S * 1000))
    store = DegradingLimits(away, num_processes=2, now_ms=lambda: int(NOW_S * 1000))
    async with opened(WORDS, REQUESTS, store=store) as hub:
        answer, refused = await hub.chat(), await hub.chat()
        hub.readiness = Readiness(True, "limits are degraded")
        ready = await hub.client.get("/ready")
        hub.readiness = Readiness(False, "limits cannot be checked")
        unready = await hub.client.get("/ready")

    assert (answer.status_code, answer.headers["x-evenhand-limits"]) == (200, "degraded")
    assert (refused.status_code, refused.headers["x-evenhand-limits"]) == (429, "degraded")
    assert (ready.status_code, ready.json()) == (200, {"status": "degraded", "reason": "limits are degraded"})
    assert (unready.status_code, unready.json()["reason"]) == (503, "limits cannot be checked")


@pytest.mark.parametrize(
    ("ms", "text"),
    [
        (0, "0s"),
        (1, "1ms"),
        (999, "999ms"),
        (1_000, "1s"),
        (1_500, "1.5s"),
        (1_234, "1.234s"),
        (59_999, "59.999s"),
        (60_000, "1m0s"),
        (360_000, "6m0s"),
        (3_599_010, "59m59.01s"),
        (3_600_000, "1h0m0s"),
        (90_061_001, "25h1m1.001s"),
    ],
)
def test_times_are_written_as_the_vendor_s_are(ms: int, text: str) -> None:
    assert duration(ms) == text


# What administrators see of it


async def test_a_refusal_s_log_line_says_whose_request_and_which_limit() -> None:
    async with opened(WORDS, REQUESTS) as hub:
        with structlog.testing.capture_logs() as lines:
            answers = [(await hub.chat()).status_code for _ in range(3)]

    assert answers == [200, 200, 429]
    [line] = [line for line in lines if line["event"] == "request.refused"]
    told = {name: line.get(name) for name in ("organization", "team", "key_id", "limit", "scope", "code")}
    assert told == {
        "organization": PRINCIPAL.organization,
        "team": PRINCIPAL.team,
        "key_id": PRINCIPAL.key_id,
        "limit": "requests/minute",
        "scope": "key",
        "code": "rate_limit_exceeded",
    }
