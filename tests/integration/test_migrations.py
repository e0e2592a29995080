"""The tables that the migrations make, on SQLite and PostgreSQL."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from pydantic import SecretStr
from sqlalchemy import Connection, inspect, text
from sqlalchemy.exc import DBAPIError
from storage_kit import charge, key, ledger_row, limit, organization, price, team, top_up

from gateway.commands import migrate as command
from gateway.domain.ids import TeamId
from gateway.domain.tenancy import KeyHolder
from gateway.settings import DatabaseSettings, Settings
from gateway.storage.database import Database
from gateway.storage.errors import SchemaError
from gateway.storage.schema import current, migrate
from gateway.storage.tables import metadata

NEWEST = "0003"
ROOT = Path(__file__).parents[2]

MIGRATE = """
import asyncio, sys
from pathlib import Path
from gateway.storage.database import Database
from gateway.storage.schema import migrate

async def main(url):
    database = Database.open(url, Path("unused"))
    print("ready", flush=True)
    sys.stdin.readline()
    print(await migrate(database))
    await database.close()

asyncio.run(main(sys.argv[1]))
"""


@pytest.fixture
async def empty(empty_database_url: str) -> AsyncIterator[Database]:
    database = Database.open(empty_database_url, Path("unused"))
    try:
        yield database
    finally:
        await database.close()


def described(connection: Connection) -> dict[str, Any]:
    """Everything that a database tells of its tables, in a form that can be compared."""
    inspector = inspect(connection)
    return {
        name: {
            "columns": [
                (column["name"], str(column["type"]), getattr(column["type"], "collation", None), column["nullable"])
                for column in inspector.get_columns(name)
            ],
            "primary key": inspector.get_pk_constraint(name),
            "foreign keys": sorted(map(str, inspector.get_foreign_keys(name))),
            "unique": sorted(map(str, inspector.get_unique_constraints(name))),
            "checks": sorted(map(str, inspector.get_check_constraints(name))),
            "indexes": sorted(map(str, inspector.get_indexes(name))),
        }
        for name in inspector.get_table_names()
        if name != "alembic_version"
    }


async def describe(database: Database) -> dict[str, Any]:
    async with database.migrating() as connection:
        return await connection.run_sync(described)


async def test_up_down_and_up_again(empty: Database) -> None:
    assert await current(empty) == "base"
    assert await migrate(empty) == NEWEST
    made = await describe(empty)
    assert await migrate(empty) == NEWEST, "nothing to do"

    assert await migrate(empty, "base") == "base"
    assert await current(empty) == "base"
    assert await describe(empty) == {}

    assert await migrate(empty, NEWEST) == NEWEST
    assert await current(empty) == NEWEST
    assert await describe(empty) == made
    async with empty.reading() as work:
        assert await work.version() == 0


async def test_down_and_up_with_something_in_it(storage: Database) -> None:
    for _ in range(2):
        async with storage.writing() as work:
            await work.organizations.add(organization())
        assert await migrate(storage, "base") == "base"
        assert await migrate(storage) == NEWEST


INSERT_AS_0001 = (
    "INSERT INTO ledger VALUES ('{id}', 1, 2, 'org_1', 'team_1', 'key_1', 'm', 'm', 'chat', true, 'batch', 'finished', "
    "'stop', NULL, 5, 4, 3, 10, 20, 30, 40, 50, NULL, 100)"
)


async def test_what_the_first_version_has_written_and_still_writes_was_never_parked(empty: Database) -> None:
    """An older gateway may still run while a newer one has moved the database on; it names the columns it knows."""
    await migrate(empty, "0001")
    async with empty.migrating() as connection:
        known = await connection.run_sync(lambda c: [column["name"] for column in inspect(c).get_columns("ledger")])
        await connection.execute(text(INSERT_AS_0001.format(id="before")))
    await migrate(empty)
    async with empty.migrating() as connection:
        statement = INSERT_AS_0001.replace("ledger", f"ledger ({', '.join(known)})", 1)
        await connection.execute(text(statement.format(id="after")))
    async with empty.reading() as work:
        rows = await work.ledger.rows(["before", "after"])
    assert [(row.parked_us, row.preempted_us, row.engine_us) for row in rows] == [(0, 40, 50)] * 2

    await migrate(empty, "0001")
    assert "parked_us" not in str((await describe(empty))["ledger"])
    await migrate(empty)
    async with empty.reading() as work:
        assert len(await work.ledger.rows(["before", "after"])) == 2


AS_0002 = """
INSERT INTO organizations (id, name, weight, created_at_ms) VALUES ('org_{n}', '{n}', 2, 3);
INSERT INTO teams (id, organization_id, name, weight, created_at_ms) VALUES ('team_{n}', 'org_{n}', '{n}', 1, 3);
INSERT INTO keys (id, team_id, name, public_id, digest, pepper_id, default_class, created_at_ms)
    VALUES ('key_{n}', 'team_{n}', '{n}', 'public_{n}', '', 'p', 'batch', 3);
INSERT INTO ledger (request_id, opened_at_ms, closed_at_ms, organization_id, team_id, key_id, model, requested_model,
    endpoint, stream, request_class, outcome, finish_reason, prompt_tokens, cached_tokens, completion_tokens, queue_us,
    prefill_us, decode_us, preempted_us, engine_us, parked_us)
    VALUES ('req_{n}', 1, 2, 'org_{n}', 'team_{n}', 'key_{n}', 'm', 'm', 'chat', true, 'batch', 'finished', 'stop',
    5, 4, 3, 10, 20, 30, 40, 50, 60);
INSERT INTO hourly_usage (hour_ms, organization_id, team_id, key_id, model, num_requests, prompt_tokens, cached_tokens,
    completion_tokens, engine_us)
    VALUES (0, 'org_{n}', 'team_{n}', 'key_{n}', 'm', 1, 5, 4, 3, 50)
"""
"""What a gateway of revision 0002 writes, naming the columns it knows."""


async def test_what_the_second_version_has_written_and_still_writes_cost_nothing(empty: Database) -> None:
    await migrate(empty, "0002")
    async with empty.migrating() as connection:
        for statement in AS_0002.split(";"):
            await connection.execute(text(statement.format(n="before")))
    await migrate(empty, "0003")
    async with empty.migrating() as connection:
        for statement in AS_0002.split(";"):
            await connection.execute(text(statement.format(n="after")))

    for n in ("before", "after"):
        async with empty.reading() as work:
            holder = await work.keys.holder(f"public_{n}")
            (row,) = await work.ledger.rows([f"req_{n}"])
            (hour,) = await work.ledger.hourly(from_ms=0, until_ms=1, team_id=TeamId(f"team_{n}"), limit=9)
            assert [sentence async for sentence in work.ledger.mismatches()] == []
        assert holder is not None
        assert (holder.organization.time_zone, holder.organization.weight, holder.key.networks) == ("UTC", 2, None)
        assert (row.cost_microusd, row.charges, row.parked_us, row.engine_us) == (0, (), 60, 50)
        assert (hour.totals.cost_microusd, hour.totals.engine_us) == (0, 50)


async def test_going_back_to_the_second_version_keeps_what_that_has_room_for(empty: Database) -> None:
    await migrate(empty, "0002")
    before = await describe(empty)
    await migrate(empty, "0003")
    charged = ledger_row(1, cost_microusd=7, charges=(charge("quota", 5),))
    async with empty.writing() as work:
        await work.organizations.add(organization(time_zone="Asia/Kolkata"))
        await work.teams.add(team())
        await work.keys.add(key(networks=("10.0.0.0/8",)))
        await work.limits.set(limit())
        await work.limits.add_top_up(top_up())
        await work.limits.alert("quota", 80, organization_id=organization().id, at_ms=1)
        await work.catalog.add_price(price())
        await work.ledger.post([charged, ledger_row(2)])
        await work.ledger.roll_up(1)

    assert await migrate(empty, "0002") == "0002"
    assert await describe(empty) == before
    assert await migrate(empty, "0003") == "0003"
    async with empty.reading() as work:
        assert await work.keys.holder(key().secret.public_id) == KeyHolder(key(), team(), organization())
        assert await work.limits.of([organization().id]) == []
        assert await work.catalog.prices() == []
        free = [msgspec.structs.replace(each, cost_microusd=0, charges=()) for each in (ledger_row(2), charged)]
        assert await work.ledger.page(after="", limit=9) == free
        assert [sentence async for sentence in work.ledger.mismatches()] == []


def differences(connection: Connection) -> list[Any]:
    options = {"compare_type": True, "compare_server_default": True}
    return list(compare_metadata(MigrationContext.configure(connection, opts=options), metadata))


async def test_the_models_are_the_migrated_schema(empty: Database) -> None:
    """The same by Alembic's comparison, and by everything that the database tells, which is more."""
    await migrate(empty)
    async with empty.migrating() as connection:
        assert await connection.run_sync(differences) == []
    migrated = await describe(empty)

    await migrate(empty, "base")
    async with empty.migrating() as connection:
        await connection.run_sync(metadata.create_all)
    assert migrated == await describe(empty)
    assert set(migrated) == set(metadata.tables)


async def test_a_model_that_is_not_the_schema_is_found(empty: Database) -> None:
    await migrate(empty)
    async with empty.migrating() as connection:
        await connection.execute(text("DROP INDEX ix_keys_team_id_id"))
        await connection.execute(text("ALTER TABLE audit ADD COLUMN planted INTEGER"))

    async with empty.migrating() as connection:
        assert {each[0] for each in await connection.run_sync(differences)} == {"add_index", "remove_column"}


async def test_a_newer_database_is_refused_and_left_alone(storage: Database) -> None:
    async with storage.migrating() as connection:
        await connection.execute(text("UPDATE alembic_version SET version_num = '9999'"))
    before = await describe(storage)

    for revision in ("head", "base", NEWEST):
        with pytest.raises(SchemaError, match="'9999', which this version of Evenhand does not know"):
            await migrate(storage, revision)
    with pytest.raises(SchemaError, match="9999"):
        await current(storage)
    assert await describe(storage) == before


async def test_an_unknown_revision_is_refused(storage: Database) -> None:
    with pytest.raises(SchemaError, match="no revision '0004x'; there are base, 0001, 0002, 0003 and head"):
        await migrate(storage, "0004x")


async def test_a_migration_that_fails_leaves_nothing(empty: Database) -> None:
    async with empty.migrating() as connection:
        await connection.execute(text("CREATE TABLE audit (x INTEGER)"))
    before = await describe(empty)

    with pytest.raises(DBAPIError, match=r"audit.* already exists"):
        await migrate(empty)

    assert await describe(empty) == before
    assert await current(empty) == "base"


async def test_processes_that_migrate_at_once_do_no_harm(empty: Database, empty_database_url: str) -> None:
    processes = [
        await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", MIGRATE, empty_database_url),
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for _ in range(4)
    ]
    for process in processes:
        assert process.stdout is not None
        assert await process.stdout.readline() == b"ready\n"
    ends = await asyncio.gather(*(process.communicate(b"\n") for process in processes))

    assert ends == [(f"{NEWEST}\n".encode(), b"")] * 4
    assert await current(empty) == NEWEST
    async with empty.reading() as work:
        assert await work.version() == 0


def test_the_command_prints_the_revision_alone(
    empty_database_url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = Settings(home=tmp_path, database=DatabaseSettings(url=SecretStr(empty_database_url)))

    assert command.run(settings, None) == 0
    assert capsys.readouterr() == (f"{NEWEST}\n", "")
    assert command.run(settings, "base", may_lose=True) == 0
    assert capsys.readouterr() == ("base\n", "")


def test_the_command_says_why_a_database_does_not_answer(
    tmp_path: Path, free_port: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    url = f"postgresql://somebody:very-secret@127.0.0.1:{free_port()}/evenhand"

    assert command.run(Settings(home=tmp_path, database=DatabaseSettings(url=SecretStr(url))), None) == 1

    said = capsys.readouterr()
    assert said.out == ""
    assert "does not answer: " in said.err
    assert "ConnectionRefusedError" in said.err
    assert "very-secret" not in said.err
