"""The administering commands on real databases: what a script reads from stdout, and what a person from stderr."""

from __future__ import annotations

import asyncio
import getpass
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from cli_kit import Cli, Done, rows_of
from sqlalchemy import delete

from gateway.domain.credential import ADMIN_TOKEN, API_KEY, issue, parse
from gateway.storage.database import Database
from gateway.storage.tables import audit


def test_from_an_organization_to_a_key(cli: Cli) -> None:
    organization = cli("org", "create", "Ácme", "--weight", "5").line
    team = cli("team", "create", "--org", "Ácme", "--weight", "3", "red").line
    made = cli("key", "create", "--org", "Ácme", "--team", "red", "--name", "agents", "--class", "batch", "--model",
               "a", "--model", "b/c", "--endpoint", "chat", "--expires-in", "30d", "--max-queue-depth", "4",
               "--deadline-ms", "500")  # fmt: skip
    raw = made.out.strip()
    public_id = parse(raw, API_KEY)
    assert public_id is not None

    (row,) = rows_of(cli("org", "list"))
    assert (row["id"], row["name"], row["weight"], row["disabled_at"]) == (organization, "Ácme", "5", "-")
    (row,) = rows_of(cli("team", "list", "--org", "Ácme"))
    assert (row["id"], row["organization"], row["name"], row["weight"]) == (team, "Ácme", "red", "3")
    (row,) = rows_of(cli("key", "list", "--org", "Ácme", "--team", "red"))
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
        before = rows_of(cli(*table))
        assert cli(*arguments) == Done(0, "", "")
        assert rows_of(cli(*table)) != before
    for arguments in (("org", "enable", "Ácme"), ("team", "enable", "--org", "Ácme", "red")):
        assert cli(*arguments) == Done(0, "", "")
    assert rows_of(cli("org", "list"))[0]["disabled_at"] == rows_of(cli("team", "list"))[0]["disabled_at"] == "-"


def test_admin_tokens(cli: Cli) -> None:
    assert parse(cli("admin-token", "create").line, ADMIN_TOKEN)
    assert parse(cli("admin-token", "create", "--role", "viewer", "--name", "audit", "--expires-in", "12h").line,
                 ADMIN_TOKEN)  # fmt: skip

    first, second = rows_of(cli("admin-token", "list"))
    assert (first["role"], first["expires_at"]) == ("admin", "-")
    assert (second["role"], second["name"], second["expires_at"] > second["created_at"]) == ("viewer", "audit", True)
    assert cli("admin-token", "revoke", first["id"]) == Done(0, "", "")
    assert [row["revoked_at"] == "-" for row in rows_of(cli("admin-token", "list"))] == [False, True]


def test_a_key_is_revoked_by_its_id_its_public_id_or_itself_whole_or_not(cli: Cli) -> None:
    cli("org", "create", "acme")
    cli("team", "create", "--org", "acme", "red")
    raws = [cli("key", "create", "--org", "acme", "--team", "red", "--name", "k").line for _ in range(5)]
    others = cli("admin-token", "create").line, cli("admin-token", "create").line

    for given in (raws[0], raws[1].split("_")[1], raws[2][:-9], f"eh_{raws[3].split('_')[1]}"):
        assert cli("key", "revoke", given) == Done(0, "", "")
    alive = [row["public_id"] for row in rows_of(cli("key", "list")) if row["revoked_at"] == "-"]
    assert alive == [raws[4].split("_")[1]]

    for given in (others[0], others[1].split("_")[1]):
        assert cli("key", "revoke", given) == Done(1, "", "evenhand: There is no key with this id.\n")
        assert cli("admin-token", "revoke", given) == Done(0, "", "")
    assert all(row["revoked_at"] != "-" for row in rows_of(cli("admin-token", "list")))


def test_lists_tell_the_pepper_and_when_a_key_was_made(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVENHAND_AUTH__PEPPERS", "old:" + "0" * 64)
    cli("org", "create", "acme")
    cli("team", "create", "--org", "acme", "red")
    make_key = ("key", "create", "--org", "acme", "--team", "red", "--name", "k")
    cli(*make_key)
    cli("admin-token", "create")
    monkeypatch.setenv("EVENHAND_AUTH__PEPPERS", "new:" + "1" * 64 + ",old:" + "0" * 64)
    cli(*make_key)
    cli("admin-token", "create")

    keys = rows_of(cli("key", "list"))
    assert sorted(row["pepper_id"] for row in keys) == ["new", "old"]
    assert all(row["created_at"].startswith("20") for row in keys)
    assert sorted(row["pepper_id"] for row in rows_of(cli("admin-token", "list"))) == ["new", "old"]
    assert {json.loads(line)["pepper_id"] for line in cli("key", "list", "--json").out.splitlines()} == {"new", "old"}


def test_a_scope_that_nothing_is_in_today_is_noted(cli: Cli) -> None:
    cli("org", "create", "acme")
    cli("team", "create", "--org", "acme", "red")

    done = cli("key", "create", "--org", "acme", "--team", "red", "--name", "k", "--model", "smol")

    assert done.code == 0
    assert parse(done.out.strip(), API_KEY)
    assert done.err == "evenhand: note: there is no model or alias 'smol' today\n"


@pytest.mark.parametrize(
    ("option", "value"),
    [("--model", ""), ("--endpoint", "x"), ("--max-queue-depth", "0"), ("--deadline-ms", "0"), ("--expires-in", "0s")],
)
def test_an_error_names_the_option(cli: Cli, option: str, value: str) -> None:
    cli("org", "create", "acme")
    cli("team", "create", "--org", "acme", "red")

    done = cli("key", "create", "--org", "acme", "--team", "red", "--name", "k", option, value)

    assert (done.code, done.out) == (1, "")
    assert done.err.startswith(f"evenhand: {option} must ")


@pytest.mark.parametrize(
    "arguments",
    [
        ("key", "revoke", "{}"),
        ("key", "revoke", "x", "{}"),
        ("{}",),
        ("key", "{}"),
        ("org", "create", "{}"),
        ("org", "disable", "{}"),
        ("alias", "create", "a", "--model", "{}"),
        ("alias", "remove", "{}"),
        ("key", "list", "--org", "{}"),
        ("admin-token", "create", "--role", "{}"),
        ("migrate", "{}"),
    ],
)
def test_what_looks_like_a_credential_is_never_repeated(cli: Cli, arguments: tuple[str, ...]) -> None:
    raw, public_id = issue(API_KEY)

    done = cli(*(each.format(raw) for each in arguments))

    assert done.code != 0
    assert public_id not in done.out + done.err
    assert "Traceback" not in done.err


def test_going_down_needs_a_yes(cli: Cli) -> None:
    cli("org", "create", "acme")

    refused = cli("migrate", "base")

    assert (refused.code, refused.out) == (1, "")
    assert refused.err.startswith("evenhand: going down from revision 0003 to base deletes all keys, the ledger and")
    assert "--yes" in refused.err
    assert refused.err.count("\n") == 1
    assert [row["name"] for row in rows_of(cli("org", "list"))] == ["acme"]
    assert cli("migrate", "base", "--yes") == Done(0, "base\n", "")
    assert rows_of(cli("org", "list")) == []


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
        (
            ("alias", "create", "y", "--model", "x"),
            "There is no model 'x' in the catalogue; a model is known once it has been served (evenhand model list).",
        ),
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
    port = free_port()
    monkeypatch.setenv("EVENHAND_DATABASE__URL", f"postgresql://u:hidden@127.0.0.1:{port}/evenhand")

    done = cli("org", "list")

    assert (done.code, done.out) == (1, "")
    assert done.err.startswith(f"evenhand: the database at 127.0.0.1:{port} does not answer: ConnectionRefusedError: ")
    assert done.err.count("\n") == 1
    assert "hidden" not in done.err


@pytest.mark.parametrize(
    "url",
    ["postgresql://u:hidden@127.0.0.1:{}/e?password=hidden", "postgresql://u:1/hidden@127.0.0.1:{}/e"],
)
def test_no_part_of_a_password_is_shown_wherever_it_stands(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, free_port: Callable[[], int], url: str
) -> None:
    monkeypatch.setenv("EVENHAND_DATABASE__URL", url.format(free_port()))

    done = cli("org", "list")

    assert (done.code, done.out) == (1, "")
    assert "does not answer" in done.err
    assert "hidden" not in done.err
