"""Two processes over a Redis that is flushed while their requests run: refused until known again, then exact."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, suppress
from typing import Any

import pytest
import pytest_asyncio
from databases import RedisServer
from identity_kit import SteppedClock
from limit_keeping_kit import Gateway, Ledger
from limiter_kit import NOW_S, RUNNING, limit, limited
from redis_limits_kit import opened, until

from gateway.domain.ids import new_organization_id
from gateway.domain.limits.policy import QuotaRule
from gateway.domain.principal import Principal
from gateway.domain.usage import TokenUsage
from gateway.errors import LimitsUnavailable, QuotaExceeded
from gateway.services import limit_keeping
from gateway.services.grants import Grant
from gateway.services.limiter import LEASE_S

AMOUNT = 20_000
ROUND_S = LEASE_S / 4


class Running:
    """As far as a grant asks what runs; it is ended by its test."""

    def __init__(self) -> None:
        self.usage = TokenUsage(10, 0)
        self.is_aborted = False

    def abort(self) -> None:
        self.is_aborted = True


class Hub:
    """Two processes, and an organization of its own whose keys share a hard quota.

    Attributes:
        used: tokens of all requests that have ended, and of those that a row is missing of.
        late_rows: requests that are settled and whose rows are to be written, since their readers are slow.
    """

    def __init__(self, one: Gateway, other: Gateway, ledger: Ledger, raw: Any) -> None:
        self.gateways = (one, other)
        self.ledger = ledger
        self.clock = one.clock
        self.raw = raw
        self.organization_id = new_organization_id(random.Random().getrandbits(40))
        self.key = self.holder(QuotaRule(unit="tokens", period="day", amount=AMOUNT))
        self.live: list[tuple[Gateway, Grant]] = []
        self.late_rows: list[tuple[Gateway, Grant, TokenUsage]] = []
        self.used = 0

    def holder(self, *rules: Any) -> Principal:
        held = (limit(rule, "organization", scope_id=self.organization_id) for rule in rules)
        return limited(*held, organization_id=self.organization_id)

    async def begin(self, gateway: Gateway, num: int = 1, most: int = 300) -> None:
        for _ in range(num):
            grant = await gateway.admit(self.key, 10, most)
            grant.running = Running()  # type: ignore[assignment]
            self.live.append((gateway, grant))

    async def end(self, index: int = 0, output: int = 50, *, is_slow: bool = False) -> None:
        """With a row; of a slow reader with one that is to be written."""
        gateway, grant = self.live.pop(index)
        usage = TokenUsage(10, output)
        self.used += usage.total_tokens
        await gateway.limiter.settle(grant, usage)
        if is_slow:
            self.late_rows.append((gateway, grant, usage))
        else:
            gateway.write(grant, usage)

    def write_late_rows(self) -> None:
        for gateway, grant, usage in self.late_rows:
            gateway.write(grant, usage)
        self.late_rows.clear()

    def post(self) -> None:
        for gateway in self.gateways:
            gateway.post()

    async def lose(self) -> None:
        await self.raw.flushall()
        self.clock.now += 0.01  # it takes a moment

    async def passes(self, num_rounds: float, *gateways: Gateway) -> None:
        for _ in range(int(num_rounds)):
            self.clock.now += ROUND_S
            for gateway in gateways or self.gateways:
                with suppress(LimitsUnavailable):
                    await gateway.keeping.look_at_store()
                await gateway.keeping.report()
                await gateway.keeping._end_unheard()

    @property
    def are_aborted(self) -> list[bool]:
        """Of those that live."""
        return [grant.is_lost for _, grant in self.live]

    async def is_refused(self, gateway: Gateway) -> bool:
        try:
            await self.begin(gateway)
        except LimitsUnavailable:
            return True
        return False

    async def until_known(self, *gateways: Gateway) -> None:
        async def is_known() -> bool:
            for gateway in gateways or self.gateways:
                limiter = gateway.limiter
                if self.organization_id in limiter.lost | limiter.unsure or limiter.late:
                    return False
                if not await gateway.store.begin_epoch(self.organization_id, {}, (), is_whole=False):
                    return False
            return True

        await until(is_known)

    async def assert_exact(self) -> None:
        """What is left is what nobody has used, or holds."""
        held = sum(10 + grant.granted for _, grant in self.live)
        assert await self.gateways[0].left(self.key) == [AMOUNT - self.used - held]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limit_keeping, "RETRY_S", 0.005)
    monkeypatch.setattr(limit_keeping, "LOOKS_PER_LEASE", 1e6)
    monkeypatch.setattr("gateway.services.limiter.REVIVAL_S", 0.05)


@pytest_asyncio.fixture
async def hub(redis: RedisServer, raw: Any) -> AsyncIterator[Hub]:
    await raw.flushall()
    clock, ledger = SteppedClock(NOW_S), Ledger()
    async with AsyncExitStack() as stack:
        gateways = []
        for _ in range(2):
            store = await stack.enter_async_context(opened(redis.url, lambda: int(clock.time() * 1000), answer_s=2.0))
            gateways.append(Gateway(ledger, store, clock=clock))
        hub = Hub(*gateways, ledger, raw)
        for gateway in gateways:
            await gateway.store.begin_epoch(hub.organization_id, {}, ())
            await gateway.limiter.note_known(hub.organization_id)
            await gateway.keeping.look_at_store()
            await stack.enter_async_context(gateway.reviving())
        clock.now += LEASE_S  # Redis has been there for long
        yield hub


async def test_hard_quotas_are_refused_for_a_lease_time_and_then_exact(hub: Hub) -> None:
    one, other = hub.gateways
    await hub.begin(one, 3)
    await hub.begin(other, 3)
    await hub.end(0)
    hub.post()
    await hub.lose()
    for gateway in hub.gateways:
        assert await hub.is_refused(gateway)
    await hub.end(0)  # of the first process, which has told of it again
    await hub.end(3)  # of the second
    hub.post()
    await hub.passes(3)
    assert await hub.is_refused(one)
    assert await hub.is_refused(other)
    await hub.end(1)
    await hub.passes(1)
    await hub.until_known()

    await hub.assert_exact()
    await hub.begin(one)
    await hub.begin(other)
    while hub.live:
        await hub.end(0)
    await hub.assert_exact()
    hub.post()
    [key] = {charge.key for row in hub.ledger.rows.values() for charge in row.charges}
    assert hub.ledger.committed(key) == hub.used


@pytest.mark.parametrize("seed", range(12))
async def test_nothing_is_counted_twice_or_lost_whatever_ends_meanwhile(hub: Hub, seed: int) -> None:
    dice = random.Random(seed)
    for gateway in hub.gateways:
        await hub.begin(gateway, dice.randrange(1, 12))
    is_lost = False
    for num_round in range(dice.randrange(4, 12)):
        for _ in range(dice.randrange(4)):
            if len(hub.live) > 1:
                await hub.end(dice.randrange(len(hub.live)), dice.randrange(1, 300), is_slow=dice.random() < 0.3)
        if dice.random() < 0.5:
            dice.choice(hub.gateways).post()
        if dice.random() < 0.2:
            hub.write_late_rows()
        if num_round == 2 or (is_lost and dice.random() < 0.1):
            await hub.lose()
            is_lost = True
        gateways = list(hub.gateways)
        dice.shuffle(gateways)
        await hub.passes(1, *gateways)
        assert min(await gateways[0].left(hub.key)) >= 0
    await hub.passes(6)
    await hub.until_known()

    await hub.assert_exact()
    for gateway in hub.gateways:
        await hub.begin(gateway, 2)
    await hub.assert_exact()
    while hub.live:
        await hub.end(0, dice.randrange(1, 300), is_slow=dice.random() < 0.3)
        hub.write_late_rows()
        hub.post()
    await hub.passes(5)
    await hub.assert_exact()


async def test_two_that_have_seen_different_ledgers_count_nothing_twice(hub: Hub) -> None:
    """A row is posted between their looks; of the one who looks first it is missing, and the other one tells first."""
    one, other = hub.gateways
    await hub.begin(one, 2)
    await hub.begin(other)
    await hub.lose()
    await hub.passes(1)
    await hub.end(0, 70)
    num_looks = 0

    async def between() -> None:
        nonlocal num_looks
        num_looks += 1
        if num_looks == 1:
            hub.post()
            other.limiter.note_lost(hub.organization_id)
            await other.keeping.revive()

    hub.ledger.has_read = between
    await hub.passes(4)
    await hub.until_known()

    assert num_looks > 1
    await hub.assert_exact()


async def test_a_redis_that_is_lost_again_while_the_ledger_is_read_is_told_nothing_of_what_was_read(hub: Hub) -> None:
    """Nor do the others know yet that they have to make their requests known."""
    one, other = hub.gateways
    await hub.begin(one, 2, most=4_000)
    await hub.begin(other, 2, most=4_000)
    await hub.end(0, 900)
    hub.post()
    await hub.until_known()
    await hub.lose()
    num_looks = 0

    async def lose_it() -> None:
        nonlocal num_looks
        num_looks += 1
        if num_looks == 1:
            await hub.lose()

    hub.ledger.has_read = lose_it
    await hub.passes(5)

    async def has_looked() -> bool:
        return num_looks > 0

    await until(has_looked)
    assert await hub.is_refused(one)
    assert await hub.is_refused(other)
    await hub.passes(6)
    await hub.until_known()

    await hub.assert_exact()


async def test_a_process_in_which_nothing_runs_tells_what_the_ledger_does_not_have_yet(hub: Hub) -> None:
    """Its reader is slow: the answer is settled, and its row is still to come."""
    one, other = hub.gateways
    await hub.begin(one)
    await hub.begin(other)
    await hub.end(0, 250, is_slow=True)
    assert one.limiter.live == {}
    await hub.lose()
    assert await hub.is_refused(other)
    await hub.passes(5)
    await hub.until_known()
    await hub.assert_exact()
    hub.write_late_rows()
    hub.post()
    await hub.lose()
    await hub.passes(1)
    assert await hub.is_refused(other)
    await hub.passes(5)
    await hub.until_known()

    await hub.assert_exact()


async def test_soft_quotas_are_made_known_again_as_well(hub: Hub) -> None:
    one, other = hub.gateways
    hub.key = hub.holder(QuotaRule(unit="tokens", period="day", amount=500, is_hard=False))
    await hub.begin(one)
    await hub.end(0, 290)
    hub.post()
    await hub.lose()
    await hub.begin(other)
    assert hub.live[0][1].request_class == "interactive", "not known yet"
    await hub.passes(6)
    await hub.until_known()
    await hub.begin(other)

    assert hub.live[1][1].request_class == "batch"
    assert await one.left(hub.key) == [500 - 300 - 2 * 310]


async def test_what_has_no_quota_goes_on_as_if_nothing_had_happened(hub: Hub) -> None:
    one, other = hub.gateways
    await hub.begin(one)
    hub.key = hub.holder(RUNNING)
    await hub.begin(other)
    await hub.lose()
    await hub.passes(1)
    assert await one.left(hub.key) == [1], "its place is taken again"
    await hub.end(1)
    assert await one.left(hub.key) == [2], "at once"
    await hub.begin(other, 2)


async def test_who_cannot_tell_of_its_requests_for_most_of_a_lease_ends_them(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others begin without them, and may use up what they had reserved."""
    one, other = hub.gateways
    await hub.begin(one)
    await hub.begin(other, 2, most=9_000)
    await hub.passes(1)
    await hub.lose()
    with monkeypatch.context() as away:
        away.setattr(other.store, "_run", _unavailable)
        await hub.passes(5)
        assert hub.are_aborted == [False, True, True]
        await hub.end(1, 400)
        await hub.end(1, 500)
        await hub.until_known(one)
        await hub.begin(one, 1, most=15_000)
    await hub.passes(2)
    await hub.until_known()

    await hub.assert_exact()
    assert hub.are_aborted == [False, False]


async def test_who_was_held_up_itself_ends_what_others_have_begun_without(hub: Hub) -> None:
    one, other = hub.gateways
    await hub.begin(one)
    await hub.begin(other, 2, most=9_000)
    await hub.passes(1)
    await hub.until_known()
    await hub.lose()
    await hub.passes(6, one)
    await hub.until_known(one)
    await hub.begin(one, 1, most=15_000)
    await hub.passes(1)

    assert hub.are_aborted == [False, True, True, False]
    await hub.end(1, 400)
    await hub.end(1, 500)
    await hub.until_known()
    await hub.assert_exact()


async def test_who_was_given_up_while_redis_was_there_ends_its_requests(hub: Hub) -> None:
    one, other = hub.gateways
    await hub.begin(other, 1, most=AMOUNT)
    for _ in range(4):
        with pytest.raises(QuotaExceeded):
            await hub.begin(one)
        hub.clock.now += ROUND_S
    await hub.begin(one)
    await other.keeping.report()

    assert hub.are_aborted == [True, False]
    await hub.end(0, 120)
    await hub.assert_exact()


async def test_a_reservation_that_is_missing_for_no_reason_is_made_again(hub: Hub) -> None:
    """As when another Redis takes over, which had not heard of it yet."""
    one, other = hub.gateways
    await hub.begin(one)
    await hub.passes(1)
    [(_, grant)] = hub.live
    await one.store.cancel(hub.organization_id, grant.info.request_id)
    assert await other.left(hub.key) == [AMOUNT]
    await hub.passes(1)

    assert hub.are_aborted == [False]
    await hub.assert_exact()


async def test_nothing_more_is_granted_to_what_runs_until_it_is_known_what_is_left(hub: Hub) -> None:
    one, other = hub.gateways
    await hub.begin(one, 1, most=15_000)
    await hub.begin(other, 1, most=30_000)
    _, clamped = hub.live[1]
    assert clamped.granted == AMOUNT - 15_010 - 10
    await hub.end(0, 15_000)
    hub.post()
    await hub.lose()
    await hub.passes(2)
    with pytest.raises(LimitsUnavailable):
        await other.limiter.raise_output(clamped, 30_000)
    assert await other.store.raise_output(hub.organization_id, clamped.info.request_id, 30_000) == clamped.granted
    await hub.passes(4)
    await hub.until_known()

    assert await other.limiter.raise_output(clamped, 30_000) == clamped.granted
    await hub.assert_exact()


async def _unavailable(*_: Any) -> Any:
    raise LimitsUnavailable
