"""The whole HTTP side over a scripted engine, for one key with limits."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
from identity_kit import KEY, PEPPERS, FixedKeys, SteppedClock, holder_of
from limiter_kit import (
    MODEL,
    NOW_S,
    ORGANIZATION,
    limited,
)

from gateway.app import build
from gateway.backends.scripted import Script, ScriptedBackend
from gateway.domain.limits.policy import (
    Limit,
    Rule,
)
from gateway.limit_opening import OpenedLimits
from gateway.limits.memory import MemoryLimits
from gateway.services.authenticate import Authenticator
from gateway.services.limiter import Limiter
from gateway.services.ports import Readiness
from gateway.settings import ServerSettings

PROMPT = "one two three four five six seven eight nine ten"
MESSAGES = [{"role": "user", "content": PROMPT}]
WORDS = Script.saying(*["word "] * 30)


class Hub:
    """One key on a scripted backend."""

    def __init__(self, script: Script, *limits: Limit | Rule, store: Any = None, **fields: Any) -> None:
        self.clock = SteppedClock(NOW_S)
        self.principal = limited(*limits, **fields)
        self.store = store or MemoryLimits(lambda: int(self.clock.time() * 1000))
        self.limiter = Limiter(self.store, self.clock)
        self.backend = ScriptedBackend({MODEL: script, "other": script}, sleep=self.clock.sleep)
        self.readiness = Readiness(True)
        app = build(
            backend=self.backend,
            authenticator=Authenticator(FixedKeys(holder_of(KEY, self.principal)), PEPPERS, self.clock),
            limiter=self.limiter,
            limits=OpenedLimits(self.store, lambda: True, lambda: self.readiness),
            clock=self.clock,
            server=ServerSettings(),
        )
        self.client = httpx.AsyncClient(
            transport=httpx.ASGITransport(app, raise_app_exceptions=False),
            base_url="http://test",
            headers={"x-api-key": KEY},
        )

    async def chat(self, *, prompt: str = PROMPT, most: int | None = 100, **fields: Any) -> httpx.Response:
        body = {"model": MODEL, "messages": [{"role": "user", "content": prompt}], "max_tokens": most} | fields
        return await self.client.post("/v1/chat/completions", json=body)

    async def limits(self) -> list[dict[str, Any]]:
        answer = await self.client.get("/v1/limits")
        assert answer.status_code == 200
        assert answer.json()["object"] == "limits"
        data: list[dict[str, Any]] = answer.json()["data"]
        return data


@asynccontextmanager
async def opened(script: Script, *limits: Limit | Rule, **fields: Any) -> AsyncIterator[Hub]:
    hub = Hub(script, *limits, **fields)
    await hub.store.begin_epoch(ORGANIZATION, {}, ())
    await hub.limiter.note_known(ORGANIZATION)
    async with hub.client:
        yield hub


def of_limits(answer: httpx.Response) -> dict[str, str]:
    names = ("x-ratelimit-", "retry-after", "x-should-retry", "x-evenhand-")
    return {name: value for name, value in answer.headers.items() if name.startswith(names)}
