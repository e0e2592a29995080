"""Names and weights follow the storage's version, without a reading for every change, and whatever fails."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

import msgspec
import pytest
from identity_kit import KEY, PRINCIPAL, MemoryStorage, SteppedClock, holder_of

import gateway.services.roll
from gateway.domain.tenancy import KeyHolder
from gateway.errors import StorageDown
from gateway.services.directory import Directory
from gateway.services.roll import Roll

WEIGHTS = {"org:org_1": 1, "team:team_1": 1}


def weighed(weight: int, name: str = "red") -> KeyHolder:
    return holder_of(KEY, msgspec.structs.replace(PRINCIPAL, team_weight=weight, team=name))


class Hub:
    """A roll that follows a directory over a storage in memory; versions are asked for when a test says so."""

    def __init__(self) -> None:
        self.clock = SteppedClock()
        self.storage = MemoryStorage(weighed(1))
        self.directory = Directory(self.storage, None, self.clock)
        self.told: asyncio.Queue[Mapping[str, int]] = asyncio.Queue()
        self.roll = Roll(self.storage, self.directory, self.told.put_nowait)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        async with asyncio.timeout(10), self.roll.running():
            yield

    async def confirm(self) -> None:
        """The directory asks for the version, which its old confirmation makes it do."""
        self.clock.now += 10
        await self.directory.listing()


@pytest.fixture(autouse=True)
def _no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateway.services.roll, "READ_EVERY_S", 0.01)


async def test_all_weights_are_told_at_first_and_after_a_change() -> None:
    hub = Hub()
    async with hub.running():
        await hub.confirm()
        assert await hub.told.get() == WEIGHTS
        hub.storage.put(weighed(4))
        await hub.confirm()

        assert await hub.told.get() == {"org:org_1": 1, "team:team_1": 4}


async def test_nothing_is_read_before_a_version_is_known_nor_while_it_stays() -> None:
    hub = Hub()
    async with hub.running():
        await asyncio.sleep(0)
        assert hub.storage.num_rolls_asked == 0
        await hub.confirm()
        await hub.told.get()
        for _ in range(3):
            await hub.confirm()
        hub.storage.put(weighed(4))
        await hub.confirm()
        await hub.told.get()

    assert hub.storage.num_rolls_asked == 2


async def test_many_changes_in_a_row_are_few_readings_and_the_last_one_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateway.services.roll, "READ_EVERY_S", 0.3)
    hub = Hub()
    async with hub.running():
        await hub.confirm()
        await hub.told.get()
        for weight in range(2, 500):
            hub.storage.put(weighed(weight))
            await hub.confirm()
        while (await hub.told.get())["team:team_1"] != 499:
            pass

    assert hub.storage.num_rolls_asked <= 5


async def test_a_change_during_a_reading_leads_to_another_one() -> None:
    hub = Hub()
    answer = hub.storage.hold("roll")
    async with hub.running():
        await hub.confirm()
        await hub.storage.wait_until(lambda: hub.storage.num_rolls_asked == 1)
        hub.storage.put(weighed(4))
        await hub.confirm()
        hub.storage.let_through("roll")
        answer.set()

        assert (await hub.told.get())["team:team_1"] == 1, "what was there when the reading began"
        assert (await hub.told.get())["team:team_1"] == 4


@pytest.mark.parametrize("failure", [StorageDown(), RuntimeError("a bug")], ids=["down", "bug"])
async def test_a_reading_that_fails_is_done_again(failure: Exception) -> None:
    hub = Hub()
    answer = hub.storage.hold("roll")
    async with hub.running():
        await hub.confirm()
        await hub.storage.wait_until(lambda: hub.storage.num_rolls_asked == 1)
        hub.storage.let_through("roll")
        hub.storage.down = failure
        answer.set()
        await hub.storage.wait_idle()
        hub.storage.down = None

        assert await hub.told.get() == WEIGHTS


async def test_names_are_those_of_the_last_reading() -> None:
    hub = Hub()
    assert hub.roll.names("team:team_1") is None
    async with hub.running():
        await hub.confirm()
        await hub.told.get()
        assert hub.roll.names("team:team_1") == ("acme", "red")
        assert hub.roll.names("team:team_2") is None
        hub.storage.put(weighed(1, "crimson"))
        await hub.confirm()
        await hub.told.get()

        assert hub.roll.names("team:team_1") == ("acme", "crimson")
