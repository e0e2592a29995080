"""The administering commands on real databases: what a script reads from stdout, and what a person from stderr."""

from __future__ import annotations

import asyncio
import getpass
import json
import logging
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import structlog
from sqlalchemy import delete

from gateway.cli import main
from gateway.domain.credential import ADMIN_TOKEN, API_KEY, parse
from gateway.storage.database import Database
from gateway.storage.tables import audit


@dataclass(frozen=True, slots=True)
class Done:
    code: int
    out: str
    err: str

    @property
    def line(self) -> str:
        """The only one there is on stdout."""
        assert (self.code, self.err) == (0, "")
        assert self.out.count("\n") == 1
        return self.out.strip()


class Cli:
    """Runs commands in this process, each as if it were new."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self._monkeypatch = monkeypatch
        self._capsys = capsys

    def __call__(self, *arguments: str) -> Done:
        self._monkeypatch.setattr(sys, "argv", ["evenhand", *arguments])
        self._capsys.readouterr()
        try:
            main()
            code: object = 0
        except SystemExit as e:
            code = e.code or 0
        said = self._capsys.readouterr()
        assert isinstance(code, int)
        return Done(code, said.out, said.err)


@pytest.fixture
def cli(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, database_url: str
) -> Iterator[Cli]:
    root = logging.getLogger()
    handlers, level = root.handlers, root.level
    for name in [name for name in os.environ if name.startswith("EVENHAND_")]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("EVENHAND_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("EVENHAND_DATABASE__URL", database_url)
    yield Cli(monkeypatch, capsys)
    structlog.reset_defaults()
    root.handlers, root.level = handlers, level


def _table(done: Done) -> list[dict[str, str]]:
    assert (done.code, done.err) == (0, "")
    header, *rows = [line.split("\t") for line in done.out.splitlines()]
    return [dict(zip(header, row, strict=True)) for row in rows]


def test_from_an_organization_to_a_key(cli: Cli) -> None:
    organization = cli("org", "create", "Ácme", "--weight", "5").line
    team = cli("team", "create", "--org", "Ácme", "--weight", "3", "red").line
    raw = cli("key", "create", "--org", "Ácme", "--team", "red", "--name", "agents", "--class", "batch", "--model", "a",
              "--model", "b/c", "--endpoint", "chat", "--expires-in", "30d", "--max-queue-depth", "4",
              "--deadline-ms", "500").line  # fmt: skip
    public_id = parse(raw, API_KEY)
    assert public_id is not None

    (row,) = _table(cli("org", "list"))
    assert (row["id"], row["name"], row["weight"], row["disabled_at"]) == (organization, "Ácme", "5", "-")
    (row,) = _table(cli("team", "list", "--org", "Ácme"))
    assert (row["id"], row["organization"], row["name"], row["weight"]) == (team, "Ácme", "red", "3")
    (row,) = _table(cli("key", "list", "--org", "Ácme", "--team", "red"))
    assert (row["organization"], row["team"], row["name"], row["public_id"]) == ("Ácme", "red", "agents", public_id)
    assert row["models"] == "a,b/c"
    listed = json.loads(cli("key", "list", "--json").line)
    assert (listed["max_queue_depth"], listed["deadline_ms"], listed["endpoints"]) == (4, 500, ["chat"])
    assert listed["expires_at"] > listed["created_at"]

    for arguments, table in (
        (("org", "set-weight", "Ácme", "7"), ("org", "list")),
        (("org", "disable", "Ácme"), ("org", "list")),
        (("team", "set-weight", "--org", "Ácme", "red", "8"), ("team", "list")),
        (("team", "disable", "--org", "Ácme", "red"), ("team", "list")),
        (("key", "revoke", row["id"]), ("key", "list", "--org", "Ácme")),
    ):
        before = _table(cli(*table))
        assert cli(*arguments) == Done(0, "", "")
        assert _table(cli(*table)) != before
    for arguments in (("org", "enable", "Ácme"), ("team", "enable", "--org", "Ácme", "red")):
        assert cli(*arguments) == Done(0, "", "")
    assert _table(cli("org", "list"))[0]["disabled_at"] == _table(cli("team", "list"))[0]["disabled_at"] == "-"


def test_admin_tokens(cli: Cli) -> None:
    assert parse(cli("admin-token", "create").line, ADMIN_TOKEN)
    assert parse(cli("admin-token", "create", "--role", "viewer", "--name", "audit", "--expires-in", "12h").line,
                 ADMIN_TOKEN)  # fmt: skip

    first, second = _table(cli("admin-token", "list"))
    assert (first["role"], first["expires_at"]) == ("admin", "-")
    assert (second["role"], second["name"], second["expires_at"] > second["created_at"]) == ("viewer", "audit", True)
    assert cli("admin-token", "revoke", first["id"]) == Done(0, "", "")
    assert [row["revoked_at"] == "-" for row in _table(cli("admin-token", "list"))] == [False, True]


def test_the_audit_names_the_user_and_a_break_is_told(cli: Cli, database_url: str) -> None:
    cli("org", "create", "acme")
    cli("org", "create", "other")
    assert cli("audit", "verify") == Done(0, "", "The audit's chain is whole.\n")

    actors = asyncio.run(_actors_and_cut(database_url))

    assert actors == {f"cli:{getpass.getuser()}"}
    done = cli("audit", "verify")
    assert done.code == 1
    assert done.out == "Entry 2 comes where 1 was expected: entries are missing.\n"


async def _actors_and_cut(database_url: str) -> set[str]:
    """Who made the audit's entries, of which the first is gone then."""
    database = Database.open(database_url, Path("unused"))
    try:
        async with database.writing() as work:
            entries = await work.audit.page(after=0, limit=10)
            await work._transaction.run(delete(audit).where(audit.c.sequence == 1))
    finally:
        await database.close()
    return {entry.draft.actor for entry in entries}


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("team", "create", "--org", "none", "x"), "There is no organization 'none'."),
        (("org", "disable", "none"), "There is no organization 'none'."),
        (("team", "disable", "--org", "acme", "x"), "There is no team 'x' in the organization 'acme'."),
        (("key", "revoke", "key_1"), "There is no key with this id."),
        (("admin-token", "revoke", "x"), "There is no admin token with this id."),
        (("org", "create", "acme"), "There is an organization named"),
        (("org", "create", "a\nb"), "'name' must have printable characters only."),
        (("org", "set-weight", "acme", "0"), "'weight' must be between 1 and 1000000."),
        (("model", "disable", "x"), "There is no model of this name in the catalogue."),
        (("alias", "create", "y", "--model", "x"), "'model' must be the name of a model of the catalogue"),
        (("alias", "remove", "y"), "There is no alias of this name."),
    ],
)
def test_an_error_of_a_person_is_one_line_and_exit_code_1(cli: Cli, arguments: tuple[str, ...], expected: str) -> None:
    cli("org", "create", "acme")

    done = cli(*arguments)

    assert (done.code, done.out) == (1, "")
    assert done.err.startswith(f"evenhand: {expected}")
    assert done.err.count("\n") == 1


@pytest.mark.parametrize(
    "arguments",
    [
        ("key", "create", "--org", "a", "--team", "t", "--name", "n", "--expires-in", "soon"),
        ("key", "create", "--org", "a", "--team", "t", "--name", "n", "--class", "first"),
        ("key", "list", "--team", "t"),
        ("admin-token", "create", "--role", "god"),
    ],
)
def test_a_wrong_option_is_a_usage_error_and_touches_no_database(
    cli: Cli, arguments: tuple[str, ...], tmp_path: Path
) -> None:
    done = cli(*arguments)

    assert (done.code, done.out) == (2, "")
    assert not (tmp_path / "home").exists()


def test_a_database_that_does_not_answer_is_one_line(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, free_port: Callable[[], int]
) -> None:
    monkeypatch.setenv("EVENHAND_DATABASE__URL", f"postgresql://u:hidden@127.0.0.1:{free_port()}/evenhand")

    done = cli("org", "list")

    assert (done.code, done.out) == (1, "")
    assert done.err == "evenhand: The database does not answer right now. Please try again shortly.\n"
