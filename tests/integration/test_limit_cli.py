"""Commands about limits, quotas, prices, time zones and networks, on real databases."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import pytest
from cli_kit import Cli, Done, rows_of

from gateway.domain.catalog import Model
from gateway.domain.credential import API_KEY, issue
from gateway.storage.database import Database

NOTHING = Done(0, "", "")
MODEL = "org/model-1"


async def _enter(database_url: str, name: str) -> None:
    database = Database.open(database_url, Path("unused"))
    try:
        async with database.writing() as work:
            await work.catalog.enter_model(Model(name=name, created_at_ms=1))
    finally:
        await database.close()


@pytest.fixture
def hub(cli: Cli, database_url: str) -> Cli:
    """With an organization `acme`, its team `red`, and a model."""
    cli("org", "create", "acme", "--time-zone", "Asia/Kolkata")
    cli("team", "create", "--org", "acme", "red")
    asyncio.run(_enter(database_url, MODEL))
    return cli


def _key(hub: Cli, *options: str) -> str:
    return hub("key", "create", "--org", "acme", "--team", "red", "--name", "k", *options).line


def _json(done: Done) -> list[dict[str, Any]]:
    assert (done.code, done.err) == (0, "")
    return [json.loads(line) for line in done.out.splitlines()]


TEAM = ("--org", "acme", "--team", "red")


def test_limits_of_every_kind(hub: Cli) -> None:
    raw = _key(hub)
    for arguments in (
        ("--org", "acme", "requests", "100/minute", "--burst", "20"),
        ("requests", "100 per hour", *TEAM, "--shadow"),
        ("tokens", "100000/minute", *TEAM, "--model", MODEL, "--strict", "--max-debt", "5", "--burst", "6",
         "--prompt-percent", "50", "--cached-percent", "10", "--output-percent", "200"),
        ("concurrent", "10", "--key", raw),
        ("context", "8192", "--key", raw.split("_")[1]),
        ("output", "1024", "--org", "acme"),
    ):  # fmt: skip
        assert hub("limit", "set", *arguments) == NOTHING

    rows = rows_of(hub("limit", "list"))
    told = [(row["organization"], row["team"], row["key"], row["name"], row["allows"], row["mode"]) for row in rows]
    assert told == [
        ("acme", "red", "k", "concurrent", "10", "enforced"),
        ("acme", "red", "k", "context", "8192", "enforced"),
        ("acme", "-", "-", "output", "1024", "enforced"),
        ("acme", "-", "-", "requests/minute", "100/minute, burst 20", "enforced"),
        ("acme", "red", "-", "requests/hour", "100/hour", "shadow"),
        ("acme", "red", "-", "tokens/minute",
         "100000/minute, burst 6, debt 5, prompt 50%, cached 10%, output 200%, strict", "enforced"),
    ]  # fmt: skip
    assert [row["model"] for row in rows] == ["-", "-", "-", "-", "-", MODEL]
    assert rows_of(hub("limit", "list", "--org", "acme")) == rows[2:4]
    assert rows_of(hub("limit", "list", *TEAM)) == rows[4:]
    assert rows_of(hub("limit", "list", "--key", raw)) == rows[:2]
    strict = _json(hub("limit", "list", *TEAM, "--json"))[1]
    assert strict["rule"]["kind"] == "tokens"
    assert (strict["rule"]["strict"], strict["shadow"], strict["scope"]) == (True, False, "team")

    assert hub("limit", "set", *TEAM, "requests", "5/hour") == NOTHING
    assert rows_of(hub("limit", "list", *TEAM))[0]["allows"] == "5/hour"
    assert hub("limit", "remove", "tokens/minute", *TEAM, "--model", MODEL) == NOTHING
    assert hub("limit", "remove", "concurrent", "--key", raw) == NOTHING
    assert [row["name"] for row in rows_of(hub("limit", "list"))] == [
        "context", "output", "requests/minute", "requests/hour",
    ]  # fmt: skip


def test_quotas_are_set_shown_topped_up_and_removed(hub: Cli) -> None:
    raw = _key(hub)
    assert hub("quota", "set", "tokens", "5000000/month", "--org", "acme") == NOTHING
    assert hub("quota", "set", "--key", raw, "tokens", "1000/day", "--soft", "--alert", "90", "--alert", "50",
               "--model", MODEL, "--shadow") == NOTHING  # fmt: skip
    assert hub("quota", "set", "tokens", "7/week", *TEAM, "--no-alerts") == NOTHING
    assert hub("quota", "set", "usd", "250.075/month", *TEAM) == Done(
        0, "", f"evenhand: note: '{MODEL}' has no price, so it costs nothing (evenhand price set)\n"
    )

    rows = rows_of(hub("quota", "show", "--key", raw))
    told = [(row["scope"], row["quota"], row["of"], row["more"], row["used"], row["percent"]) for row in rows]
    assert told == [
        ("organization", "tokens/month", "5000000", "0", "0", "0"),
        ("team", "usd/month", "250.075", "0.00", "0.00", "0"),
        ("team", "tokens/week", "7", "0", "0", "0"),
        ("key", "tokens/day", "1000", "0", "0", "0"),
    ]
    assert [(row["kind"], row["mode"], row["reached"]) for row in rows] == [
        ("hard", "enforced", "-"),
        ("hard", "enforced", "-"),
        ("hard", "enforced", "-"),
        ("soft", "shadow", "-"),
    ]
    assert re.fullmatch("20[0-9]{2}-[01][0-9]", rows[0]["period_id"])
    assert rows_of(hub("quota", "show", *TEAM)) == rows[:3]
    alerts = [row["alerts"] for row in _json(hub("quota", "show", "--key", raw, "--json"))]
    assert alerts == [[80, 100], [80, 100], [], [50, 90]]

    assert hub("quota", "top-up", "usd", "0.005/month", *TEAM, "--reason", "quarterly reports") == NOTHING
    assert hub("quota", "top-up", "tokens", "10/day", "--key", raw, "--model", MODEL, "--reason", "r", "--period",
               rows[3]["period_id"]) == NOTHING  # fmt: skip
    rows = rows_of(hub("quota", "show", "--key", raw))
    assert [row["more"] for row in rows] == ["0", "0.005", "0", "10"]
    (made,) = rows_of(hub("quota", "top-ups", *TEAM))
    assert (made["quota"], made["more"], made["reason"], made["model"]) == (
        "usd/month", "0.005", "quarterly reports", "-",
    )  # fmt: skip
    (made,) = rows_of(hub("quota", "top-ups", "--key", raw))
    assert (made["quota"], made["more"], made["period_id"]) == ("tokens/day", "10", rows[3]["period_id"])
    assert _json(hub("quota", "show", *TEAM, "--json"))[1]["topped_up"] == 5000

    names = [row["name"] for row in rows_of(hub("limit", "list", *TEAM))]
    assert names == ["quota-microusd/month", "quota-tokens/week"]
    assert hub("quota", "remove", "usd/month", *TEAM) == NOTHING
    assert hub("limit", "remove", "quota-tokens/week", *TEAM) == NOTHING
    assert [row["scope"] for row in rows_of(hub("quota", "show", "--key", raw))] == ["organization", "key"]


def test_a_priced_model_needs_no_note(hub: Cli) -> None:
    assert hub("price", "set", MODEL, "--prompt", "0", "--completion", "0") == NOTHING

    assert hub("quota", "set", "usd", "1/month", *TEAM) == NOTHING
    assert hub("quota", "set", "usd", "1/month", *TEAM, "--model", MODEL) == NOTHING


def test_prices_are_usd_here_and_micro_usd_inside(hub: Cli) -> None:
    old = ("--from", "2020-02-01")
    assert hub("price", "set", MODEL, "--prompt", "0.15", "--cached", "0.075", "--completion", "0.60", *old) == NOTHING
    assert hub("price", "set", MODEL, "--prompt", "0.1", "--completion", "100", "--from", "2099-01-01T00:00:00+01:00"
               ) == NOTHING  # fmt: skip

    rows = rows_of(hub("price", "list"))
    assert rows == [
        {"model": MODEL, "valid_from": "2020-02-01T00:00:00.000Z", "prompt": "0.15", "cached": "0.075",
         "completion": "0.60"},
        {"model": MODEL, "valid_from": "2098-12-31T23:00:00.000Z", "prompt": "0.10", "cached": "0.10",
         "completion": "100.00"},
    ]  # fmt: skip
    first = _json(hub("price", "list", "--model", MODEL, "--json"))[0]
    assert (first["prompt"], first["cached"], first["completion"]) == (150_000, 75_000, 600_000)
    assert hub("price", "set", MODEL, "--prompt", "0.15", "--cached", "0.075", "--completion", "0.6") == NOTHING
    assert rows_of(hub("price", "list")) == rows


def test_a_time_zone_of_an_organization(hub: Cli) -> None:
    hub("org", "create", "other")
    assert [row["time_zone"] for row in rows_of(hub("org", "list"))] == ["Asia/Kolkata", "UTC"]
    assert hub("org", "set-time-zone", "acme", "America/New_York") == NOTHING
    assert rows_of(hub("org", "list"))[0]["time_zone"] == "America/New_York"


def test_a_key_s_networks(hub: Cli) -> None:
    raw = _key(hub, "--network", "10.0.0.0/8", "--network", "2001:db8::1")
    assert rows_of(hub("key", "list"))[0]["networks"] == "10.0.0.0/8,2001:db8::1/128"
    assert hub("key", "set-networks", raw, "--network", "::ffff:192.0.2.0/120") == NOTHING
    assert rows_of(hub("key", "list"))[0]["networks"] == "192.0.2.0/24"
    assert hub("key", "set-networks", raw, "--everywhere") == NOTHING
    assert rows_of(hub("key", "list"))[0]["networks"] == "-"


REFUSED: list[tuple[tuple[str, ...], str]] = [
    (("limit", "set", "requests", "5/day", "--org", "none"), "There is no organization 'none'."),
    (("limit", "set", "requests", "5/day", "--org", "acme", "--team", "x"), "There is no team 'x' in the organiza"),
    (("limit", "set", "requests", "5/day", "--key", "key_1"), "There is no key with this id."),
    (("limit", "set", "requests", "5/day", *TEAM, "--model", "x"), "There is no model 'x' in the catalogue; "),
    (("limit", "set", "requests", "100000001/day", *TEAM), "AMOUNT is 100000001, not 0 to 100000000."),
    (("limit", "set", "requests", "1/day", *TEAM, "--burst", "-1"), "--burst is -1, not 0 to 100000000."),
    (("limit", "set", "tokens", "1/day", *TEAM, "--max-debt", "-1"), "--max-debt is -1, not 0 to 100000000."),
    (("limit", "set", "tokens", "1/day", *TEAM, "--cached-percent", "101"), "--cached-percent is more than prompt"),
    (("limit", "set", "context", "0", *TEAM), "AMOUNT is 0, not 1 to 10000000."),
    (("limit", "remove", "requests/day", *TEAM), "The team has no limit of this name for all models."),
    (("limit", "remove", "\udcff", *TEAM), "The team has no limit of this name for all models."),
    (("quota", "set", "tokens", "1/day", *TEAM, "--alert", "0"), "--alert are percents from 1 to 1000, "),
    (("quota", "set", "usd", "1000000000.01/day", *TEAM), "AMOUNT is 1000000000010000, not 0 to 1000000000000000."),
    (("quota", "top-up", "tokens", "1/day", *TEAM, "--reason", "r"), "The team has no limit of this name for all"),
    (("quota", "top-up", "tokens", "0/week", *TEAM, "--reason", "r"), "AMOUNT must be between 1 and 10000000000"),
    (("quota", "top-up", "tokens", "1/week", *TEAM, "--reason", " "), "--reason must have 1 to 200 printable"),
    (("quota", "top-up", "tokens", "1/week", *TEAM, "--reason", "r", "--period", "x"), "--period must be a week"),
    (("quota", "top-up", "tokens", "1/week", *TEAM, "--reason", "r", "--period", "2020-W01"),
     "--period must not be over: 2020-W01 is."),
    (("quota", "remove", "usd/week", *TEAM), "The team has no limit of this name for all models."),
    (("price", "set", "x", "--prompt", "1", "--completion", "1"), "There is no model 'x' in the catalogue; "),
    (("price", "set", MODEL, "--prompt", "100.01", "--completion", "1"), "--prompt must be between 0 and 10000"),
    (("price", "set", MODEL, "--prompt", "1", "--completion", "1", "--cached", "2"), "--cached must not be more"),
    (("price", "set", MODEL, "--prompt", "1", "--completion", "1", "--from", "2021-01-01"),
     "The model has a price, so --from must not lie in the past: what was charged stays charged."),
    (("price", "list", "--model", "x"), "There is no model of this name in the catalogue."),
    (("org", "create", "x", "--time-zone", "Mars/Olympus"), "There is no time zone 'Mars/Olympus': names"),
    (("org", "set-time-zone", "acme", "\udcff"), "There is no such time zone: names are like "),
    (("key", "create", *TEAM, "--name", "k", "--network", "x"), "--network must be a network such as "),
    (("key", "set-networks", "key_1", "--network", "::1"), "There is no key with this id."),
]  # fmt: skip


def test_an_error_of_a_person_is_one_line_and_exit_code_1(hub: Cli) -> None:
    hub("quota", "set", "tokens", "5/week", *TEAM)
    hub("price", "set", MODEL, "--prompt", "9", "--completion", "9")

    for arguments, expected in REFUSED:
        done = hub(*arguments)
        assert (done.code, done.out) == (1, ""), arguments
        assert done.err.startswith(f"evenhand: {expected}"), arguments
        assert done.err.count("\n") == 1, arguments


RATE = ("limit", "set", "requests")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((*RATE, "5/day"), "say whose: --org NAME, --org NAME --team NAME, or --key ID"),
        ((*RATE, "5/day", "--team", "red"), "--team needs --org"),
        ((*RATE, "5/day", "--key", "k", "--org", "o"), "--key stands alone"),
        ((*RATE, "5/day", "--key", "k", "--team", "t"), "--team needs --org"),
        ((*RATE, "10/5minutes", *TEAM), "AMOUNT must be an amount for one second, minute, hour or day, such as"),
        ((*RATE, "5/month", *TEAM), "for a calendar month there are quotas"),
        ((*RATE, "1/day;2/hour", *TEAM), "of several limits each is set for itself"),
        ((*RATE, "5", *TEAM), "AMOUNT must be an amount for one second"),
        ((*RATE, "5/day", *TEAM, "--strict"), "--strict is not for limits of requests"),
        ((*RATE, "5/day", *TEAM, "--output-percent", "5"), "--output-percent is not for limits of requests"),
        (("limit", "set", "concurrent", "5", *TEAM, "--burst", "5"), "--burst is not for limits of concurrent"),
        (("limit", "set", "concurrent", "5/minute", *TEAM), "AMOUNT must be a whole number, such as concurrent 10"),
        (("limit", "set", "quota", "5/day", *TEAM), "'quota' is not one of"),
        (("limit", "list", "--team", "t"), "--team needs --org"),
        (("limit", "remove", "requests/day"), "say whose"),
        (("quota", "set", "tokens", "5", *TEAM), "of AMOUNT: it must be an amount for a day, week or month, such as"),
        (("quota", "set", "tokens", "5/minute", *TEAM), "it must be an amount for a day, week or month, such as"),
        (("quota", "set", "tokens", "1.5/day", *TEAM), "it must be a whole number of tokens for a day"),
        (("quota", "set", "usd", "1.0000001/day", *TEAM), "it must be USD such as 250 or 0.15, with at most six"),
        (("quota", "set", "usd", "1e3/day", *TEAM), "it must be USD such as 250 or 0.15"),
        (("quota", "set", "microusd", "5/day", *TEAM), "'microusd' is not one of"),
        (("quota", "set", "tokens", "5/day", *TEAM, "--no-alerts", "--alert", "5"), "--alert and --no-alerts exclude"),
        (("quota", "set", "tokens", "5/day"), "say whose"),
        (("quota", "show"), "say whose"),
        (("quota", "top-ups"), "say whose"),
        (("quota", "top-up", "tokens", "5/day", *TEAM), "--reason"),
        (("quota", "remove", "tokens", *TEAM), "a quota is named like tokens/day, tokens/week, tokens/month"),
        (("price", "set", MODEL, "--prompt", "0,15", "--completion", "1"), "it must be USD such as 250 or 0.15"),
        (("price", "set", MODEL, "--prompt", "1"), "--completion"),
        (("price", "set", MODEL, "--prompt", "1", "--completion", "1", "--from", "soon"), "it must be a time from "),
        (("key", "set-networks", "k"), "name each network with --network, or say --everywhere"),
        (("key", "set-networks", "k", "--network", "::1", "--everywhere"), "name each network with --network, or say"),
    ],
)  # fmt: skip
def test_a_wrong_option_is_a_usage_error_and_touches_no_database(
    cli: Cli, arguments: tuple[str, ...], expected: str, tmp_path: Path
) -> None:
    done = cli(*arguments)

    assert (done.code, done.out) == (2, "")
    assert expected in " ".join(done.err.replace("│", " ").split())
    assert not (tmp_path / "home").exists()


PASTED: list[tuple[str, ...]] = [
    ("limit", "set", "requests", "{}", *TEAM),
    ("limit", "set", "concurrent", "{}", *TEAM),
    ("limit", "set", "{}", "5/day", *TEAM),
    ("limit", "set", "requests", "5/day", *TEAM, "--model", "{}"),
    ("limit", "remove", "{}", *TEAM),
    ("quota", "set", "usd", "{}", *TEAM),
    ("quota", "top-up", "tokens", "5/week", *TEAM, "--reason", "{}"),
    ("quota", "top-up", "tokens", "5/week", *TEAM, "--reason", "r", "--period", "{}"),
    ("quota", "remove", "{}", *TEAM),
    ("price", "set", "{}", "--prompt", "1", "--completion", "1"),
    ("price", "set", MODEL, "--prompt", "{}", "--completion", "1"),
    ("price", "set", MODEL, "--prompt", "1", "--completion", "1", "--from", "{}"),
    ("org", "set-time-zone", "acme", "{}"),
    ("key", "create", *TEAM, "--name", "k", "--network", "{}"),
    ("key", "set-networks", "key_1", "--network", "{}"),
]


def test_what_looks_like_a_credential_is_never_repeated(hub: Cli) -> None:
    hub("quota", "set", "tokens", "5/week", *TEAM)
    raw, public_id = issue(API_KEY)

    for arguments in PASTED:
        done = hub(*(each.format(raw) for each in arguments))
        assert done.code != 0, arguments
        assert public_id not in done.out + done.err, arguments
        assert "Traceback" not in done.err, arguments
