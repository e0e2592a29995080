"""What a process allows by its share of the limits while the store that all share does not answer."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import pytest
from limited_hub import LimitedHub

from gateway.backends.scripted import Gate
from gateway.domain.ids import OrganizationId, RequestId
from gateway.domain.limits.admission import Ask, Settlement, Verdict
from gateway.domain.limits.policy import Concurrency, QuotaRule, Rule, TokenRate
from gateway.domain.usage import TokenUsage
from gateway.errors import ConcurrencyExceeded, LimitExceeded, LimitsUnavailable
from gateway.limits.degrading import DegradingLimits
from gateway.limits.memory import MemoryLimits

NOW_MS = 1_000_000


class Shared(MemoryLimits):
    """The store of all processes, which may be away."""

    def __init__(self) -> None:
        super().__init__(lambda: NOW_MS)
        self.is_away = False

    def _answer(self) -> None:
        if self.is_away:
            raise LimitsUnavailable

    async def check(self, ask: Ask) -> Verdict:
        self._answer()
        return await super().check(ask)

    async def admit(self, ask: Ask) -> Verdict:
        self._answer()
        return await super().admit(ask)

    async def settle(
        self, organization_id: OrganizationId, request_id: RequestId, usage: TokenUsage
    ) -> Settlement | None:
        self._answer()
        return await super().settle(organization_id, request_id, usage)

    async def cancel(self, organization_id: OrganizationId, request_id: RequestId) -> bool:
        self._answer()
        return await super().cancel(organization_id, request_id)


class Processes:
    """Two of them.

    Attributes:
        running: the requests of each that run.
    """

    def __init__(self, running: list[AsyncExitStack], *rules: Rule) -> None:
        self.shared = Shared()
        self.running = running
        self.hubs = [
            LimitedHub(
                *rules,
                script=[Gate("go")],
                store=DegradingLimits(self.shared, num_processes=2, now_ms=lambda: NOW_MS),
            )
            for _ in range(2)
        ]

    async def fill(self, index: int, most: int = 10) -> int:
        """As many requests as one of them takes; how many those are."""
        for num in range(most):
            try:
                await self.running[index].enter_async_context(await self.hubs[index].call("a b c", most=1))
            except LimitExceeded:
                return num
        return most


@asynccontextmanager
async def two(*rules: Rule) -> AsyncIterator[Processes]:
    async with AsyncExitStack() as first, AsyncExitStack() as second:
        processes = Processes([first, second], *rules)
        yield processes
        for hub in processes.hubs:
            hub.backend.gate("go").set()


async def test_what_runs_already_takes_its_part_of_the_share() -> None:
    async with two(Concurrency(amount=4)) as processes:
        assert await processes.fill(0, most=2) == 2
        assert await processes.fill(1, most=1) == 1
        processes.shared.is_away = True

        assert (await processes.fill(0), await processes.fill(1)) == (0, 1)


async def test_more_than_the_share_leaves_nothing_of_it() -> None:
    async with two(Concurrency(amount=4)) as processes:
        assert await processes.fill(0) == 4
        processes.shared.is_away = True
        with pytest.raises(ConcurrencyExceeded, match=r"This server's share of the key's limit of 4 requests") as error:
            await processes.hubs[0].ask()

        assert error.value.is_by_share


async def test_a_place_is_free_as_soon_as_its_request_has_ended_whether_the_store_knows_or_not() -> None:
    async with two(Concurrency(amount=4)) as processes:
        assert await processes.fill(0, most=2) == 2
        processes.shared.is_away = True
        await processes.running[0].aclose()
        assert sum(map(len, processes.hubs[0].limiter.late.values())) == 2
        assert await processes.fill(0) == 2

        await processes.running[0].aclose()
        processes.shared.is_away = False
        await processes.hubs[0].limiter.settle_late(processes.hubs[0].principal.organization_id)
        assert await processes.fill(0) == 4


async def test_what_ended_before_takes_nothing() -> None:
    async with two(Concurrency(amount=4)) as processes:
        assert await processes.fill(0) == 4
        await processes.running[0].aclose()
        processes.shared.is_away = True

        assert await processes.fill(0) == 2


async def test_a_prompt_that_only_a_share_cannot_take_is_not_said_to_be_too_large() -> None:
    async with two(TokenRate(amount=100, period="minute")) as processes:
        processes.shared.is_away = True
        with pytest.raises(LimitExceeded) as error:
            await processes.hubs[0].ask("a " * 60, most=1)

        assert error.value.message == (
            "The key's limit 'tokens/minute' is reached (50 left of this server's share of 100)."
        )
        assert (error.value.should_retry, error.value.retry_after_s) == (None, None)


async def test_a_prompt_that_the_whole_limit_cannot_take_is_said_to_be_too_large_by_a_share_too() -> None:
    async with two(TokenRate(amount=100, period="minute")) as processes:
        processes.shared.is_away = True
        with pytest.raises(LimitExceeded, match=r"ever allows at once \(100\): it needs at least 101\.") as error:
            await processes.hubs[0].ask("a " * 101, most=1)

        assert (error.value.should_retry, error.value.is_by_share) == (False, True)


async def test_hard_quotas_have_no_shares() -> None:
    async with two(QuotaRule(unit="tokens", period="day", amount=100)) as processes:
        processes.shared.is_away = True
        with pytest.raises(LimitsUnavailable):
            await processes.hubs[0].ask()
