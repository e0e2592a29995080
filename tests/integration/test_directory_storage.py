"""The directory over a real database: every process sees changes in time, and a database that is gone is told."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from databases import PostgresServer
from identity_kit import KEY, holder_of
from storage_kit import limit, price, top_up

from gateway.clock import SystemClock
from gateway.domain.limits.periods import period_at, zone_named
from gateway.domain.limits.policy import QuotaRule
from gateway.domain.tenancy import KeyHolder
from gateway.errors import StorageDown
from gateway.services.directory import Directory
from gateway.storage import schema
from gateway.storage.database import Database

HOLDER = holder_of(KEY)
ID = HOLDER.key.secret.public_id
BOUND_S = 2.0


async def enter(storage: Database) -> None:
    async with storage.writing() as work:
        await work.organizations.add(HOLDER.organization)
        await work.teams.add(HOLDER.team)
        await work.keys.add(HOLDER.key)
        await work.count_change()


async def until(is_so: Callable[[], bool], within_s: float) -> None:
    async with asyncio.timeout(within_s):
        while not is_so():  # noqa: ASYNC110 - nobody tells
            await asyncio.sleep(0.005)


async def test_a_revocation_reaches_two_processes_in_time(storage: Database, database_url: str, tmp_path: Path) -> None:
    await enter(storage)
    other = Database.open(database_url, tmp_path)
    directories = [Directory(storage, None, SystemClock()), Directory(other, None, SystemClock())]
    async with directories[0].running(), directories[1].running():
        for directory in directories:
            assert await directory.find(ID) == HOLDER
        revoked = msgspec.structs.replace(HOLDER.key, revoked_at_ms=5)
        async with storage.writing() as work:
            await work.keys.replace(revoked)
            await work.count_change()
        begun = time.monotonic()
        expected = KeyHolder(revoked, HOLDER.team, HOLDER.organization)
        for directory in directories:
            while await directory.find(ID) != expected:  # noqa: ASYNC110 - nobody tells
                await asyncio.sleep(0.005)
            assert time.monotonic() - begun < BOUND_S
            assert directory.cached(ID) == expected
    await other.close()


async def test_a_limit_a_top_up_and_a_price_reach_two_processes_in_time(
    storage: Database, database_url: str, tmp_path: Path
) -> None:
    await enter(storage)
    other = Database.open(database_url, tmp_path)
    directories = [Directory(storage, None, SystemClock()), Directory(other, None, SystemClock())]
    now_ms = int(time.time() * 1000)
    quota = QuotaRule(unit="tokens", period="month", amount=5)
    limits = (
        limit(scope_id=HOLDER.organization.id, rule=quota),
        limit(scope="team", scope_id=HOLDER.team.id),
        limit(scope="key", scope_id=HOLDER.key.id, model="m1"),
    )
    period_id = period_at("month", zone_named("UTC"), now_ms).id
    added = top_up(scope_id=HOLDER.organization.id, period_id=period_id, created_at_ms=now_ms)
    async with directories[0].running(), directories[1].running():
        for directory in directories:
            assert await directory.find(ID) == HOLDER
            assert (await directory.listing()).prices == ()
        async with storage.writing() as work:
            for each in reversed(limits):
                await work.limits.set(each)
            await work.limits.add_top_up(added)
            await work.limits.add_top_up(msgspec.structs.replace(added, id="past", period_id="2026-01"))
            await work.catalog.add_price(price())
            await work.count_change()
        begun = time.monotonic()
        expected = msgspec.structs.replace(HOLDER, limits=limits, top_ups=(added,))
        for directory in directories:
            while await directory.find(ID) != expected:  # noqa: ASYNC110 - nobody tells
                await asyncio.sleep(0.005)
            assert (await directory.listing()).prices == (price(),)
            assert time.monotonic() - begun < BOUND_S
    await other.close()


async def test_a_new_key_is_known_at_once(storage: Database) -> None:
    directory = Directory(storage, None, SystemClock())
    assert await directory.find(ID) is None
    fresh = Directory(storage, None, SystemClock())
    await fresh.listing()
    await enter(storage)

    assert await fresh.find(ID) == HOLDER, "though the last version it has seen is from before"


async def test_a_database_that_is_killed_is_told_and_found_again(tmp_path: Path, free_port: Callable[[], int]) -> None:
    server = PostgresServer(tmp_path / "postgres", free_port())
    server.start()
    storage = Database.open(server.new_database(), tmp_path)
    try:
        await schema.migrate(storage)
        await enter(storage)
        directory = Directory(storage, None, SystemClock())
        async with directory.running():
            await directory.find(ID)
            await until(lambda: directory.readiness().is_ready, 5)
            server.kill()
            await until(lambda: not directory.readiness().is_ready, 10)
            assert directory.cached(ID) is None
            with pytest.raises(StorageDown):
                await directory.find(ID)
            server.start()
            await until(lambda: directory.cached(ID) == HOLDER, 20)
            assert directory.readiness().is_ready
            server.freeze()
            try:
                await until(lambda: not directory.readiness().is_ready, 10)
                with pytest.raises(StorageDown):
                    await directory.find(ID)
            finally:
                server.thaw()
            await until(lambda: directory.cached(ID) == HOLDER, 20)
    finally:
        await storage.close()
        server.stop()
