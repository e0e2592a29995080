"""Leases are renewed, late settlements tried again, what others left is set right, and who was given up is ended."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import pytest
from limit_keeping_kit import Gateway, Ledger, row_of
from limiter_kit import HARD, RUNNING, TOKENS, limited

from gateway.domain.ids import OrganizationId, RequestId
from gateway.domain.limits.policy import Concurrency
from gateway.domain.usage import TokenUsage
from gateway.errors import LimitsUnavailable
from gateway.limits.memory import MemoryLimits
from gateway.services.limiter import LEASE_S

ONE = limited(HARD, RUNNING)
OTHER = limited(Concurrency(amount=1), organization_id="org_2")
ROUND_S = LEASE_S / 4


class Running:
    """As far as a grant asks what runs."""

    def __init__(self) -> None:
        self.usage = TokenUsage(10, 0)
        self.is_aborted = False

    def abort(self) -> None:
        self.is_aborted = True


class PartlyAway(MemoryLimits):
    """Does not answer for the organizations in `away`; keeps of whom it was asked what."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.away: set[OrganizationId] = set()
        self.asked: list[tuple[str, OrganizationId]] = []
        self.is_closed = False

    def _of(self, organization_id: OrganizationId, now_ms: int) -> Any:
        if organization_id in self.away:
            raise LimitsUnavailable
        return super()._of(organization_id, now_ms)

    async def close(self) -> None:
        self.is_closed = True


@pytest.fixture
async def gateway() -> Gateway:
    gateway = Gateway(Ledger())
    gateway.store = gateway.limiter.store = PartlyAway(lambda: int(gateway.clock.time() * 1000))
    gateway.keeping = type(gateway.keeping)(gateway.limiter, gateway.ledger, gateway.clock)  # type: ignore[arg-type]
    for principal in (ONE, OTHER):
        await gateway.store.begin_epoch(principal.organization_id, {}, ())
        await gateway.limiter.note_known(principal.organization_id)
    return gateway


def runs(grant: Any) -> Running:
    grant.running = running = Running()
    return running


async def others_ask(gateway: Gateway) -> None:
    """For a lease time in which this process tells nothing, and they reap."""
    for _ in range(4):
        gateway.clock.now += ROUND_S
        await gateway.store.reap(ONE.organization_id, 9)


async def passes(gateway: Gateway, num_rounds: int) -> None:
    for _ in range(num_rounds):
        gateway.clock.now += ROUND_S
        await gateway.keeping.report()


async def test_what_runs_is_kept_as_long_as_it_is_told_of(gateway: Gateway) -> None:
    grant = await gateway.admit(ONE)
    runs(grant)
    await passes(gateway, 20)
    assert await gateway.left(ONE) == [890, 1]
    await gateway.end(grant, 5)

    assert await gateway.left(ONE) == [985, 2]


async def test_what_nobody_tells_of_any_more_costs_its_prompt_and_what_was_last_told(gateway: Gateway) -> None:
    grant = await gateway.admit(ONE)
    runs(grant).usage = TokenUsage(10, 33)
    await passes(gateway, 1)
    gateway.limiter.live.clear()
    await passes(gateway, 3)
    assert await gateway.store.held(ONE.organization_id) == [grant.info.request_id]
    await passes(gateway, 1)

    assert await gateway.left(ONE) == [957, 2]


async def test_an_organization_is_looked_at_until_nothing_of_it_is_held(gateway: Gateway) -> None:
    await gateway.end(await gateway.admit(ONE), 3)
    await passes(gateway, 2)
    assert gateway.keeping._seen == {}, "it had ended before the first round"
    grant, other = await gateway.admit(ONE), await gateway.admit(OTHER)
    await passes(gateway, 1)
    await gateway.end(grant, 3)
    gateway.limiter.live.clear()
    await passes(gateway, 1)
    assert list(gateway.keeping._seen) == [OTHER.organization_id]
    await passes(gateway, 4)

    assert gateway.keeping._seen == {}
    assert await gateway.left(OTHER) == [1]
    assert not await gateway.store.cancel(OTHER.organization_id, RequestId("req_none")), other


async def test_late_settlements_are_tried_again_and_their_reservations_kept_until_then(gateway: Gateway) -> None:
    grant = await gateway.admit(ONE)
    gateway.store.away = {ONE.organization_id}
    await gateway.end(grant, 5)
    await passes(gateway, 2)
    assert gateway.limiter.late
    gateway.store.away = set()
    await passes(gateway, 1)

    assert gateway.limiter.late == {}
    assert await gateway.left(ONE) == [985, 2]


async def test_what_cannot_be_told_of_one_keeps_nothing_of_others_from_being_told(gateway: Gateway) -> None:
    """Be it late settlements, reports, or what was recovered."""
    late, grant = await gateway.admit(ONE), await gateway.admit(OTHER)
    runs(grant)
    gateway.store.away = {ONE.organization_id}
    await gateway.end(late, 5)
    gateway.keeping.recovered([row_of(late, TokenUsage(10, 5))])
    await passes(gateway, 8)
    with pytest.raises(LimitsUnavailable):
        await gateway.admit(ONE)

    assert await gateway.left(OTHER) == [0], "its lease was renewed all the time"


# Dead processes


async def test_a_dead_process_is_charged_what_it_used_as_soon_as_that_is_known(gateway: Gateway) -> None:
    before, after, cancelled = [await gateway.admit(limited(HARD)) for _ in range(3)]
    gateway.limiter.live.clear()
    gateway.keeping.recovered([row_of(before, TokenUsage(10, 60))])
    await passes(gateway, 1)
    assert await gateway.left(limited(HARD)) == [1_000 - 70 - 2 * 110]
    await others_ask(gateway)
    assert await gateway.left(limited(HARD)) == [1_000 - 70 - 2 * 10]
    gateway.keeping.recovered([row_of(after, TokenUsage(10, 40)), row_of(cancelled, TokenUsage())])
    await passes(gateway, 1)
    gateway.keeping.recovered([row_of(after, TokenUsage(10, 40))])
    await passes(gateway, 1)

    assert await gateway.left(limited(HARD)) == [1_000 - 70 - 50]


async def test_recovered_rows_wait_for_an_organization_that_is_lost_and_for_no_other(gateway: Gateway) -> None:
    lost, other = await gateway.admit(ONE), await gateway.admit(OTHER)
    gateway.limiter.live.clear()
    gateway.limiter.note_lost(ONE.organization_id)
    gateway.keeping.recovered([row_of(lost, TokenUsage(10, 60)), row_of(other, TokenUsage(10, 60))])
    await passes(gateway, 1)
    assert (await gateway.left(OTHER), await gateway.left(ONE)) == ([1], [890, 1])
    await gateway.limiter.note_known(ONE.organization_id)
    await passes(gateway, 1)

    assert await gateway.left(ONE) == [930, 2]


# Given up


async def test_who_was_given_up_is_ended_if_a_hard_quota_holds_for_it(gateway: Gateway) -> None:
    """Else it would write what is others' by now."""
    soft = limited(TOKENS, organization_id=ONE.organization_id)
    hard_one, soft_one, ended = await gateway.admit(ONE), await gateway.admit(soft), await gateway.admit(ONE)
    first, second = runs(hard_one), runs(soft_one)
    runs(ended)
    await others_ask(gateway)
    await gateway.end(ended, 7)
    await gateway.keeping.report()

    assert (first.is_aborted, hard_one.is_lost) == (True, True)
    assert (second.is_aborted, soft_one.is_lost) == (False, False)
    assert not ended.is_lost
    first.usage = TokenUsage(10, 80)
    await gateway.end(hard_one, 80)
    assert await gateway.left(ONE) == [1_000 - 17 - 90, 2]


async def test_one_that_ends_while_the_store_is_asked_is_not_ended_again(gateway: Gateway) -> None:
    grant = await gateway.admit(ONE)
    running = runs(grant)
    await others_ask(gateway)
    report = gateway.store.report

    async def slow(*arguments: Any) -> object:
        answer: object = await report(*arguments)
        await gateway.end(grant, 7)
        return answer

    gateway.store.report = slow  # type: ignore[method-assign]
    await gateway.keeping.report()

    assert not running.is_aborted
    assert await gateway.left(ONE) == [983, 2]


# While it runs


@pytest.fixture
def quick(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    gateway.limiter.lease_ms = 4
    monkeypatch.setattr("gateway.services.limit_keeping.RETRY_S", 0.001)


async def until(is_so: Any) -> None:
    async with asyncio.timeout(5):
        while not is_so():  # noqa: ASYNC110  (nobody tells of it)
            await asyncio.sleep(0.001)


@pytest.mark.usefixtures("quick")
async def test_it_reports_by_itself_through_outages_and_bugs_and_settles_at_its_end(
    gateway: Gateway, caplog: pytest.LogCaptureFixture
) -> None:
    grant = await gateway.admit(ONE)
    runs(grant)
    outputs: list[int] = []
    failures: list[Exception] = [LimitsUnavailable(), ZeroDivisionError("a bug")]
    report = gateway.store.report

    async def reported(*arguments: Any) -> object:
        outputs.extend(arguments[1].values())
        if len(outputs) % 2 and failures:
            raise failures.pop()
        answer: object = await report(*arguments)
        return answer

    gateway.store.report = reported  # type: ignore[method-assign]
    async with gateway.keeping.running():
        await until(lambda: len(outputs) > 8)
        gateway.store.away = {ONE.organization_id}
        await gateway.end(grant, 9)
        gateway.store.away = set()
        gateway.limiter.late[OTHER.organization_id] = {}

    assert not failures
    assert [record.exc_info[0] for record in caplog.records if record.exc_info] == [ZeroDivisionError]
    assert gateway.limiter.late == {}
    assert await gateway.left(ONE) == [981, 2]
    assert gateway.store.is_closed


@pytest.mark.usefixtures("quick")
async def test_its_end_waits_for_no_store_that_is_away(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.services.limit_keeping.DRAIN_S", 0.01)
    grant = await gateway.admit(ONE)
    async with gateway.keeping.running():
        gateway.store.away = {ONE.organization_id}
        await gateway.end(grant, 9)
    assert gateway.store.is_closed

    async with gateway.keeping.running():
        with contextlib.suppress(LimitsUnavailable):
            await gateway.keeping.report()

        async def never(*_: Any) -> None:
            await asyncio.Event().wait()

        gateway.store.away = set()
        gateway.store.settle = never  # type: ignore[method-assign]
    assert gateway.limiter.late
