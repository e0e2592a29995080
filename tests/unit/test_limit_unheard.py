"""What is kept while requests run: who cannot report of a request ends it before others may take what it holds."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from identity_kit import PRINCIPAL

from gateway.clock import SystemClock
from gateway.domain.ids import OrganizationId, RequestId, new_request_id
from gateway.domain.limits.policy import Limit, QuotaRule
from gateway.domain.record import RequestInfo
from gateway.errors import LimitsUnavailable
from gateway.limits.memory import MemoryLimits
from gateway.services.grants import Grant
from gateway.services.limit_keeping import LimitKeeping
from gateway.services.limiter import Limiter

LEASE_S = 1.0


class Deaf(MemoryLimits):
    """Does not answer reports while `is_deaf`."""

    is_deaf = False

    async def report(
        self, organization_id: OrganizationId, outputs: Mapping[RequestId, int], lease_ms: int
    ) -> Sequence[RequestId]:
        if self.is_deaf:
            raise LimitsUnavailable
        return await super().report(organization_id, outputs, lease_ms)


class Gateway:
    def __init__(self) -> None:
        clock: Any = SystemClock()
        self.store = Deaf(lambda: int(clock.monotonic() * 1000))
        self.limiter = Limiter(self.store, clock, lease_s=LEASE_S)
        self.keeping = LimitKeeping(self.limiter, storage=SimpleNamespace(), clock=clock)  # type: ignore[arg-type]  # not asked: nothing is lost

    async def admit(self, *, is_hard: bool) -> Grant:
        rule = QuotaRule(unit="tokens", period="day", amount=1_000, is_hard=is_hard)
        limit = Limit(scope="key", scope_id=PRINCIPAL.key_id, rule=rule, changed_at_ms=0)
        principal = msgspec.structs.replace(PRINCIPAL, limits=(limit,))
        info = RequestInfo(
            request_id=new_request_id(0),
            principal=principal,
            request_class="interactive",
            endpoint="chat",
            stream=False,
        )
        prepared: Any = SimpleNamespace(model="m", output_caps=[10], prompt_lengths=[5], num_prompt_tokens=5)
        return await self.limiter.admit(info, prepared, (), num_choices=1)


@pytest.fixture
async def gateway() -> Gateway:
    gateway = Gateway()
    await gateway.store.begin_epoch(PRINCIPAL.organization_id, {}, ())
    return gateway


async def test_a_request_of_a_hard_quota_ends_if_nothing_can_be_reported_of_it(gateway: Gateway) -> None:
    async with gateway.keeping.running():
        hard, soft = await gateway.admit(is_hard=True), await gateway.admit(is_hard=False)
        await asyncio.sleep(1.2 * LEASE_S)
        assert not hard.is_lost
        gateway.store.is_deaf = True
        await asyncio.sleep(0.2 * LEASE_S)
        assert not hard.is_lost
        await asyncio.sleep(1.2 * LEASE_S)

        assert (hard.is_lost, soft.is_lost) == (True, False)


async def test_a_process_that_was_held_up_reports_before_it_ends_anything(gateway: Gateway) -> None:
    clock_s = 0.0
    gateway.keeping._clock = SimpleNamespace(time=lambda: 0.0, monotonic=lambda: clock_s)
    async with gateway.keeping.running():
        grant = await gateway.admit(is_hard=True)
        await asyncio.sleep(0.15 * LEASE_S)
        clock_s = 10 * LEASE_S
        await asyncio.sleep(0.2 * LEASE_S)

        assert not grant.is_lost
