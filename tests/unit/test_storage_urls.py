from __future__ import annotations

import stat
from pathlib import Path

import pytest

from gateway.domain.ledger import HourlyUsage, LedgerRow, UsageTotals
from gateway.domain.limits.policy import Price, TopUp
from gateway.domain.tenancy import Organization, Team
from gateway.storage.database import Database
from gateway.storage.errors import UnusableDatabase
from gateway.storage.schema import migrate
from gateway.storage.tables import hourly_usage, ledger, organizations, prices, teams, top_ups
from gateway.storage.urls import PostgresqlServer, SqliteFile, read_url

HOME = Path("/home/somebody/.evenhand")


@pytest.mark.parametrize(
    ("url", "place"),
    [
        (None, SqliteFile(HOME / "evenhand.db")),
        ("sqlite:////var/lib/e.db", SqliteFile(Path("/var/lib/e.db"))),
        ("sqlite+aiosqlite:////var/lib/my%20hub.db", SqliteFile(Path("/var/lib/my hub.db"))),
        ("sqlite:///e.db", SqliteFile(Path("e.db"))),
        ("postgresql://u:p@h/d", PostgresqlServer("postgresql://u:p@h/d")),
        ("postgres://u:p@h:1/d?sslmode=require", PostgresqlServer("postgresql://u:p@h:1/d?sslmode=require")),
        ("postgresql+asyncpg://h/d", PostgresqlServer("postgresql://h/d")),
        ("postgresql://h1:1,h2:2/d", PostgresqlServer("postgresql://h1:1,h2:2/d")),
        ("postgresql:///?host=/run/pg&dbname=d", PostgresqlServer("postgresql:///?host=/run/pg&dbname=d")),
    ],
)
def test_an_address_is_understood(url: str | None, place: SqliteFile | PostgresqlServer) -> None:
    assert read_url(url, HOME) == place


@pytest.mark.parametrize(
    "url",
    [
        "",
        "evenhand.db",
        "sqlite://",
        "sqlite:///",
        "sqlite:///:memory:",
        "sqlite:////e.db?mode=ro",
        "mysql://u:secret@h/d",
        "postgresql+psycopg://u:secret@h/d",
        "postgresql://u:secret@h",
        "postgresql://u:secret@h:port/d",
        "postgresql://u:secret@[h/d",
    ],
)
def test_an_address_that_names_no_database_is_refused_without_being_quoted(url: str) -> None:
    with pytest.raises(UnusableDatabase, match=r"^database\.url: ") as caught:
        read_url(url, HOME)
    assert "secret" not in str(caught.value)


def test_a_password_is_in_no_repr() -> None:
    assert "secret" not in repr(read_url("postgresql://u:secret@h/d", HOME))


async def test_the_file_is_made_for_its_owner_alone(tmp_path: Path) -> None:
    database = Database.open(None, tmp_path / "home")
    await migrate(database)
    async with database.writing() as work:
        await work.count_change()
        modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "home").iterdir()}
    await database.close()

    assert modes == {"evenhand.db": 0o600, "evenhand.db-wal": 0o600, "evenhand.db-shm": 0o600}


def test_a_file_that_cannot_be_made_is_unusable(tmp_path: Path) -> None:
    (tmp_path / "file").touch()

    with pytest.raises(UnusableDatabase, match=r"file/evenhand\.db: cannot be used as database: "):
        Database.open(f"sqlite:///{tmp_path}/file/evenhand.db", tmp_path)


def test_columns_are_the_fields_of_the_values() -> None:
    assert tuple(ledger.c.keys()) == LedgerRow.__struct_fields__
    assert set(organizations.c.keys()) == set(Organization.__struct_fields__)
    assert tuple(teams.c.keys()) == Team.__struct_fields__
    assert tuple(hourly_usage.c.keys()) == HourlyUsage.__struct_fields__[:-1] + UsageTotals.__struct_fields__
    assert tuple(top_ups.c.keys()) == TopUp.__struct_fields__
    assert tuple(prices.c.keys()) == Price.__struct_fields__
