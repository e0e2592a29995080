"""What every test may use: the real model's file, free ports, databases, and hypothesis' two lengths."""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest
from databases import PostgresServer, RedisServer
from evenhand_process import EvenhandProcess
from hypothesis import settings

from engine.models.fetch import SMOLLM2_135M_INSTRUCT, fetch
from gateway.storage.database import Database
from gateway.storage.schema import migrate

settings.register_profile("full", max_examples=10 * settings.default.max_examples)


@pytest.fixture(scope="session")
def model_folder() -> Path:
    """The folder that fetched models are kept in, shared with the user's own servers: 98 MB are fetched once."""
    return Path(os.environ.get("EVENHAND_HOME") or "~/.evenhand").expanduser() / "models"


@pytest.fixture(scope="session")
def smollm2_path(model_folder: Path) -> Path:
    """The GGUF file of SmolLM2-135M-Instruct, fetched if it is not there."""
    return fetch(SMOLLM2_135M_INSTRUCT, model_folder)


@pytest.fixture(scope="session")
def free_port() -> Callable[[], int]:
    """Ports of 127.0.0.1 that nobody listens on; none is given twice."""
    given: set[int] = set()

    def next_port() -> int:
        while True:
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", 0))
                port: int = probe.getsockname()[1]
            if port not in given:
                given.add(port)
                return port

    return next_port


@pytest.fixture(scope="session")
def postgres(tmp_path_factory: pytest.TempPathFactory, free_port: Callable[[], int]) -> Iterator[PostgresServer]:
    """A PostgreSQL for all; a test that stops or kills one makes its own."""
    server = PostgresServer(tmp_path_factory.mktemp("postgres"), free_port())
    server.start()
    try:
        yield server
    finally:
        server.stop()


@pytest.fixture(scope="session")
def redis_server(tmp_path_factory: pytest.TempPathFactory, free_port: Callable[[], int]) -> Iterator[RedisServer]:
    """A Redis for all; a test that stops or kills one makes its own."""
    server = RedisServer(tmp_path_factory.mktemp("redis"), free_port())
    server.start()
    try:
        yield server
    finally:
        server.stop()


@pytest.fixture(scope="session")
def migrated_sqlite(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A SQLite file to copy: all tables, nothing in them."""
    path = tmp_path_factory.mktemp("migrated") / "evenhand.db"
    asyncio.run(_migrate(f"sqlite:///{path}"))
    return path


@pytest.fixture(scope="session")
def migrated_postgresql(postgres: PostgresServer) -> str:
    """The url of a PostgreSQL database to copy: all tables, nothing in them."""
    url = postgres.new_database()
    asyncio.run(_migrate(url))
    return url


async def _migrate(url: str) -> None:
    database = Database.open(url, Path("unused"))
    try:
        await migrate(database)
    finally:
        await database.close()


@pytest.fixture(params=["sqlite", "postgresql"])
def empty_database_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """`database.url` of a database without any tables; the test runs once on each kind."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'evenhand.db'}"
    server: PostgresServer = request.getfixturevalue("postgres")
    return server.new_database()


@pytest.fixture(params=["sqlite", "postgresql"])
def database_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """`database.url` of a new database with all tables; the test runs once on each kind."""
    if request.param == "sqlite":
        path = tmp_path / "evenhand.db"
        shutil.copyfile(request.getfixturevalue("migrated_sqlite"), path)
        return f"sqlite:///{path}"
    server: PostgresServer = request.getfixturevalue("postgres")
    return server.new_database(request.getfixturevalue("migrated_postgresql"))


@pytest.fixture
async def storage(database_url: str) -> AsyncIterator[Database]:
    """A new database with all tables, open; the test runs once on each kind."""
    database = Database.open(database_url, Path("unused"))
    try:
        yield database
    finally:
        await database.close()


@pytest.fixture(scope="session")
def new_home(tmp_path_factory: pytest.TempPathFactory, smollm2_path: Path) -> Callable[[], Path]:
    """Makes homes for servers: without a key, with the models that are already fetched."""

    def make() -> Path:
        home = tmp_path_factory.mktemp("home") / "evenhand"
        home.mkdir()
        (home / "models").symlink_to(smollm2_path.parents[1])
        return home

    return make


@pytest.fixture(scope="session")
def evenhand_server(new_home: Callable[[], Path], free_port: Callable[[], int]) -> Iterator[EvenhandProcess]:
    """The whole, running with the real model: gateway, engine and supervisor; shared, so leave it as it was."""
    server = EvenhandProcess(new_home(), free_port(), free_port())
    try:
        server.wait_ready()
        yield server
        assert server.stop() == 0
    finally:
        server.close()
