"""What is kept of keys and catalogue is never too old, whatever overtakes what; and floods stay at the door."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable
from datetime import UTC, datetime
from typing import Any

import msgspec
import pytest
from identity_kit import KEY, MemoryStorage, SteppedClock, holder_of, new_key

from gateway.domain.catalog import Alias, Model
from gateway.domain.limits.policy import Concurrency, Limit, Price, QuotaPeriod, QuotaRule, Rule, Scope, TopUp
from gateway.errors import StorageDown
from gateway.services.directory import MAX_AGE_S, MAX_HOLDERS, MAX_LOOKUPS, QUERY_S, Directory

HOLDER = holder_of(KEY)
ID = HOLDER.key.secret.public_id
ORGANIZATION_ID, TEAM_ID, KEY_ID = HOLDER.organization.id, HOLDER.team.id, HOLDER.key.id


class Hub:
    """A directory over a storage in memory, on a clock that stands still."""

    def __init__(self, feed: Feed | None = None) -> None:
        self.clock = SteppedClock()
        self.storage = MemoryStorage(HOLDER)
        self.directory = Directory(self.storage, feed, self.clock)


class Feed:
    """Implements `gateway.services.stores.ChangeFeed`; a test announces."""

    def __init__(self) -> None:
        self._announced: asyncio.Queue[None] = asyncio.Queue()

    async def announce(self) -> None:
        self._announced.put_nowait(None)

    async def heard(self) -> AsyncIterator[None]:
        while True:
            yield await self._announced.get()


async def started(work: Awaitable[object], storage: MemoryStorage) -> asyncio.Task[object]:
    """The work as a task that has come to its next query."""
    change = storage.changed
    task = asyncio.ensure_future(work)
    await change.wait()
    return task


async def test_a_key_is_looked_up_once_and_then_known_at_once() -> None:
    hub = Hub()
    assert hub.directory.cached(ID) is None
    found = await hub.directory.find(ID)

    assert found == HOLDER
    assert hub.directory.cached(ID) is found
    assert await hub.directory.find(ID) is found
    assert hub.storage.looked_up == [ID]


async def test_what_is_known_is_not_used_when_it_was_not_confirmed_in_time() -> None:
    hub = Hub()
    await hub.directory.find(ID)
    hub.clock.now += MAX_AGE_S
    assert hub.directory.cached(ID) is not None
    hub.clock.now += 0.001
    assert hub.directory.cached(ID) is None

    assert await hub.directory.find(ID) == HOLDER
    assert hub.storage.looked_up == [ID], "the version is the same, so the key need not be read again"
    assert hub.directory.cached(ID) is not None


async def test_a_confirmation_counts_from_before_it_was_asked_for() -> None:
    hub = Hub()
    await hub.directory.find(ID)
    hub.clock.now += MAX_AGE_S + 0.001
    answer = hub.storage.hold("version")
    asking = await started(hub.directory.find(ID), hub.storage)
    hub.clock.now += 0.9
    answer.set()
    await asking
    assert hub.directory.cached(ID) is not None
    hub.clock.now += 0.2

    assert hub.directory.cached(ID) is None


async def test_a_revoked_key_is_seen_at_the_next_confirmation() -> None:
    hub = Hub()
    await hub.directory.find(ID)
    hub.storage.revoke(HOLDER)
    hub.clock.now += MAX_AGE_S + 0.001
    found = await hub.directory.find(ID)

    assert found is not None
    assert found.key.revoked_at_ms == 1
    assert hub.directory.cached(ID) is found


async def test_an_answer_that_a_change_has_overtaken_is_not_kept() -> None:
    """The key is read, then revoked and the new version seen, and only then the reading's answer arrives."""
    hub = Hub()
    await hub.directory.listing()
    answer = hub.storage.hold("holder")
    reading = await started(hub.directory.find(ID), hub.storage)
    await hub.storage.wait_until(lambda: hub.storage.looked_up)
    hub.storage.revoke(HOLDER)
    hub.clock.now += MAX_AGE_S + 0.001
    await hub.directory.listing()
    answer.set()
    await reading

    assert hub.directory.cached(ID) is None
    found = await hub.directory.find(ID)
    assert found is not None
    assert found.key.revoked_at_ms == 1


async def test_an_older_version_that_arrives_late_changes_nothing() -> None:
    hub = Hub()
    answer = hub.storage.hold("version")
    async with hub.directory.running():
        await hub.storage.wait_until(lambda: hub.storage.num_versions_asked == 1)
        hub.storage.let_through("version")
        hub.storage.put(HOLDER)
        hub.clock.now += 0.1
        found = await hub.directory.find(ID)
        answer.set()
        await hub.storage.wait_idle()

        assert hub.directory.cached(ID) is found is not None


async def test_a_database_that_was_set_back_is_believed() -> None:
    hub = Hub()
    await hub.directory.find(ID)
    hub.storage.set_back()
    hub.clock.now += MAX_AGE_S + 0.001

    assert await hub.directory.find(ID) is None
    hub.clock.now += 0.5
    assert hub.directory.readiness().is_ready


async def test_many_who_ask_for_the_same_key_share_one_query() -> None:
    hub = Hub()
    found = await asyncio.gather(*(hub.directory.find(ID) for _ in range(100)))

    assert found == [HOLDER] * 100
    assert hub.storage.looked_up == [ID]
    assert hub.storage.num_versions_asked == 2


async def test_one_who_stops_waiting_does_not_stop_the_others() -> None:
    hub = Hub()
    await hub.directory.listing()
    answer = hub.storage.hold("holder")
    first = await started(hub.directory.find(ID), hub.storage)
    second = asyncio.ensure_future(hub.directory.find(ID))
    await hub.storage.wait_until(lambda: hub.storage.looked_up)
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    answer.set()

    assert await second == HOLDER
    assert hub.storage.looked_up == [ID]


async def test_a_failure_nobody_waits_for_any_more_is_not_reported() -> None:
    """An exception that is never looked at would be a warning, which is an error here."""
    hub = Hub()
    answer = hub.storage.hold("version")
    asking = await started(hub.directory.find(ID), hub.storage)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    hub.storage.down = StorageDown()
    answer.set()
    await hub.storage.wait_idle()
    hub.storage.down = None

    assert await hub.directory.find(ID) == HOLDER


async def test_a_key_that_is_not_there_is_not_looked_up_again_until_something_changes() -> None:
    hub = Hub()
    for _ in range(3):
        assert await hub.directory.find("nobody") is None
    assert hub.storage.looked_up == ["nobody"]

    fresh = holder_of(new_key())
    assert await hub.directory.find(fresh.key.secret.public_id) is None
    hub.storage.put(fresh)
    hub.clock.now += MAX_AGE_S + 0.001
    assert await hub.directory.find(fresh.key.secret.public_id) == fresh


async def test_a_flood_of_made_up_keys_is_a_few_queries_at_a_time_and_pushes_nobody_out() -> None:
    hub = Hub()
    await hub.directory.find(ID)
    await asyncio.gather(*(hub.directory.find(f"made-up-{i}") for i in range(MAX_HOLDERS + 500)))

    assert hub.storage.most_reading == MAX_LOOKUPS
    assert hub.directory.cached(ID) is not None
    assert len(hub.directory._unknown) <= MAX_HOLDERS


async def test_a_storage_that_is_down_is_told_and_old_knowledge_is_not_used() -> None:
    hub = Hub()
    await hub.directory.find(ID)
    hub.storage.down = StorageDown()
    assert await hub.directory.find(ID) == HOLDER, "confirmed a moment ago"
    hub.clock.now += MAX_AGE_S + 0.001

    with pytest.raises(StorageDown):
        await hub.directory.find(ID)
    with pytest.raises(StorageDown):
        await hub.directory.listing()
    hub.storage.down = None
    assert await hub.directory.find(ID) == HOLDER


async def test_a_storage_that_hangs_is_not_waited_for_for_ever() -> None:
    hub = Hub()
    hub.storage.hold("holder")
    loop = asyncio.get_running_loop()
    begun = loop.time()
    results = await asyncio.gather(*(hub.directory.find(f"k{i}") for i in range(20)), return_exceptions=True)

    assert {type(result) for result in results} == {StorageDown}
    assert loop.time() - begun < 2 * QUERY_S, "those who wait for their turn wait no longer"
    assert hub.storage.num_reading == 0


async def test_the_catalogue_is_read_once_and_again_after_a_change() -> None:
    hub = Hub()
    hub.storage.put_model(Model(name="m", created_at_ms=0))
    [first, same] = await asyncio.gather(hub.directory.listing(), hub.directory.listing())
    assert same is first is await hub.directory.listing()
    assert list(first.models) == ["m"]
    assert hub.storage.num_listings_asked == 1

    hub.storage.put_alias(Alias(name="gpt-4o", model="m", created_at_ms=0))
    hub.clock.now += MAX_AGE_S + 0.001
    assert list((await hub.directory.listing()).aliases) == ["gpt-4o"]
    assert hub.storage.num_listings_asked == 2


async def test_the_catalogue_has_the_prices_and_a_new_one_after_a_change() -> None:
    hub = Hub()
    prices = [Price(model="m", valid_from_ms=n, prompt=n, cached=0, completion=n) for n in (1, 2)]
    hub.storage.put_price(prices[0])
    assert (await hub.directory.listing()).prices == (prices[0],)

    hub.storage.put_price(prices[1])
    hub.clock.now += MAX_AGE_S + 0.001
    assert (await hub.directory.listing()).prices == tuple(prices)


async def test_a_holder_has_the_limits_of_the_organization_the_team_and_the_key_in_this_order() -> None:
    hub = Hub()
    kept = [
        _limit(scope, scope_id, Concurrency(amount=n))
        for n, (scope, scope_id) in enumerate((("key", KEY_ID), ("team", TEAM_ID), ("organization", ORGANIZATION_ID)))
    ]
    for each in (*kept, _limit("team", "team_other", Concurrency(amount=9))):
        hub.storage.put_limit(each)

    assert await hub.directory.find(ID) == msgspec.structs.replace(HOLDER, limits=tuple(kept[::-1]))


async def test_a_changed_limit_is_seen_at_the_next_confirmation() -> None:
    hub = Hub()
    assert await hub.directory.find(ID) == HOLDER
    limit = _limit("team", TEAM_ID, Concurrency(amount=1))
    hub.storage.put_limit(limit)
    hub.clock.now += MAX_AGE_S + 0.001
    found = await hub.directory.find(ID)

    assert found == msgspec.structs.replace(HOLDER, limits=(limit,))
    assert hub.directory.cached(ID) is found


async def test_limits_that_a_change_has_overtaken_are_not_kept() -> None:
    """The key is read, then its limit changed and the new version seen, and only then its limits are read."""
    hub = Hub()
    await hub.directory.listing()
    answer = hub.storage.hold("limits")
    reading = await started(hub.directory.find(ID), hub.storage)
    await hub.storage.wait_until(lambda: hub.storage.looked_up)
    hub.storage.put_limit(_limit("team", TEAM_ID, Concurrency(amount=1)))
    hub.clock.now += MAX_AGE_S + 0.001
    await hub.directory.listing()
    answer.set()
    await reading

    assert hub.directory.cached(ID) is None
    found = await hub.directory.find(ID)
    assert found is not None
    assert [limit.rule for limit in found.limits] == [Concurrency(amount=1)]


async def test_a_holder_has_the_top_ups_of_its_quotas_but_those_whose_period_has_passed() -> None:
    """At one in the night in Auckland the day before is over, while in Greenwich it has not even begun."""
    organization = msgspec.structs.replace(HOLDER.organization, time_zone="Pacific/Auckland")
    hub = Hub()
    hub.storage.put(msgspec.structs.replace(HOLDER, organization=organization))
    hub.clock.now = datetime(2026, 11, 29, 12, tzinfo=UTC).timestamp()
    now_ms = int(hub.clock.now * 1000)
    periods: tuple[QuotaPeriod, ...] = ("day", "week", "month")
    for period in periods:
        hub.storage.put_limit(_limit("team", TEAM_ID, QuotaRule(unit="tokens", period=period, amount=1)))
    hub.storage.put_limit(_limit("key", KEY_ID, QuotaRule(unit="tokens", period="day", amount=1), model="m"))
    wanted = [
        _top_up("day", "2026-11-30"),
        _top_up("day", "2027-01-01"),
        _top_up("week", "2026-W49"),
        _top_up("month", "2026-11"),
        _top_up("month", "2027-11", created_at_ms=now_ms - 366 * 86_400_000),
        _top_up("day", "2026-11-30", scope="key", scope_id=KEY_ID, model="m"),
    ]
    passed = [_top_up("day", "2026-11-29"), _top_up("week", "2026-W48"), _top_up("month", "2026-10")]
    of_no_quota = [
        _top_up("day", "2026-11-30", model="m"),
        _top_up("day", "2026-11-30", scope="organization", scope_id=ORGANIZATION_ID),
        _top_up("day", "2026-11-30", name="quota-microusd/day"),
        _top_up("day", "2026-11-30", scope_id="team_other"),
    ]
    for each in (*passed, *wanted, *of_no_quota):
        hub.storage.put_top_up(each)
    found = await hub.directory.find(ID)

    assert found is not None
    assert found.top_ups == tuple(wanted)
    assert len(found.limits) == 4


def _limit(scope: Scope, scope_id: str, rule: Rule, *, model: str | None = None) -> Limit:
    return Limit(scope=scope, scope_id=scope_id, model=model, rule=rule, changed_at_ms=1)


def _top_up(period: QuotaPeriod, period_id: str, **fields: Any) -> TopUp:
    """Of the team, if nothing is said."""
    defaults: dict[str, Any] = {
        "id": "top_1",
        "scope": "team",
        "scope_id": TEAM_ID,
        "name": f"quota-tokens/{period}",
        "period_id": period_id,
        "amount": 1,
        "reason": "",
        "created_at_ms": 1_780_000_000_000,
    }
    return TopUp(**defaults | fields)


async def test_it_is_ready_while_the_database_answers() -> None:
    hub = Hub()
    assert hub.directory.readiness() == (False, "the database does not answer")
    await hub.directory.find(ID)
    hub.clock.now += 2.0
    assert hub.directory.readiness().is_ready
    hub.clock.now += 0.001
    assert not hub.directory.readiness().is_ready


async def test_it_keeps_asking_while_it_runs_even_if_the_database_is_down_for_a_while() -> None:
    hub = Hub()
    async with hub.directory.running():
        await hub.storage.wait_until(lambda: hub.storage.num_versions_asked == 1)
        hub.storage.down = StorageDown()
        hub.clock.now += 5
        await asyncio.sleep(0)
        assert not hub.directory.readiness().is_ready
        hub.storage.down = None
        await hub.storage.wait_until(lambda: hub.storage.num_versions_asked == 3)
        assert hub.directory.readiness().is_ready
    num_asked = hub.storage.num_versions_asked
    await asyncio.sleep(0)

    assert hub.storage.num_versions_asked == num_asked


async def test_a_change_that_is_announced_is_seen_at_once() -> None:
    feed = Feed()
    hub = Hub(feed)
    async with hub.directory.running():
        await hub.directory.find(ID)
        hub.storage.revoke(HOLDER)
        assert hub.directory.cached(ID) is not None
        loop = asyncio.get_running_loop()
        begun = loop.time()
        await feed.announce()
        await hub.storage.wait_until(lambda: hub.directory.cached(ID) is None)

        assert loop.time() - begun < 0.4, "without waiting for the next regular question"
        found = await hub.directory.find(ID)
        assert found is not None
        assert found.key.revoked_at_ms == 1


async def test_an_announcement_during_a_question_leads_to_another_one() -> None:
    """The question that is on its way may have been answered from before the change."""
    feed = Feed()
    hub = Hub(feed)
    answer = hub.storage.hold("version")
    async with hub.directory.running():
        await hub.storage.wait_until(lambda: hub.storage.num_versions_asked == 1)
        await feed.announce()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        begun = asyncio.get_running_loop().time()
        answer.set()
        await hub.storage.wait_until(lambda: hub.storage.num_versions_asked == 2)

        assert asyncio.get_running_loop().time() - begun < 0.4


async def test_leaving_ends_what_is_on_its_way() -> None:
    hub = Hub()
    async with hub.directory.running():
        await hub.directory.listing()
        hub.storage.hold("holder")
        asking = await started(hub.directory.find(ID), hub.storage)
        await hub.storage.wait_until(lambda: hub.storage.looked_up)
    with pytest.raises(asyncio.CancelledError):
        await asking

    assert hub.storage.num_reading == 0
