"""A server whose limits cannot be checked takes itself out of service only if somebody goes by them."""

from __future__ import annotations

import httpx
import msgspec
from identity_kit import KEY, PEPPERS, FixedKeys, SteppedClock, holder_of

from gateway.app import build
from gateway.backends.scripted import Script, ScriptedBackend
from gateway.domain.limits.policy import Concurrency, Limit
from gateway.limit_opening import DOWN, OpenedLimits, in_memory
from gateway.services.authenticate import Authenticator
from gateway.services.ports import Readiness
from gateway.settings import ServerSettings

LIMIT = Limit(scope="key", scope_id="key_1", rule=Concurrency(amount=1), changed_at_ms=0)
BODY = {"model": "m", "messages": [{"role": "user", "content": "a b c"}]}


async def readiness(*limits: Limit) -> tuple[int, int]:
    """What ``/ready`` says before and after a request of a key with these limits, while their store is away."""
    holder = msgspec.structs.replace(holder_of(KEY), limits=limits)
    app = build(
        backend=ScriptedBackend({"m": Script.saying("yes")}),
        authenticator=Authenticator(FixedKeys(holder), PEPPERS, SteppedClock(), None),
        server=ServerSettings(),
        limits=OpenedLimits(in_memory(SteppedClock()), lambda: False, lambda: Readiness(False, DOWN)),
    )
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
        before = await client.get("/ready")
        answer = await client.post("/v1/chat/completions", json=BODY, headers={"authorization": f"Bearer {KEY}"})
        assert answer.status_code == 200
        after = await client.get("/ready")
    return before.status_code, after.status_code


async def test_a_store_of_limits_that_nobody_has_takes_no_server_out_of_service() -> None:
    assert await readiness() == (200, 200)


async def test_a_store_of_limits_that_somebody_has_does() -> None:
    assert await readiness(LIMIT) == (200, 503)
