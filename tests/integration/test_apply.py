"""``evenhand apply`` on real databases: what becomes of an installation, and what scripts and people are told."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cli_kit import Cli, Done, rows_of
from identity_kit import SteppedClock

from gateway.commands.administer import opened
from gateway.commands.apply import MOST_LEFT
from gateway.domain.audit import AuditEntry
from gateway.domain.credential import API_KEY, parse
from gateway.domain.tenancy import KeyHolder
from gateway.services.audit import Actor
from gateway.services.holders import read_holder
from gateway.settings_sources import load_settings

EXAMPLE = Path(__file__).parents[2] / "deploy" / "tenants.toml"
MODEL = "smollm2-135m-instruct"
UNCHANGED = "Nothing has changed: everything is as the file says.\n"

BASE = """
[organizations.acme]
weight = 2
[[organizations.acme.limits]]
kind = "concurrent"
amount = 20
[organizations.acme.teams.alpha]
weight = 3
[[organizations.acme.teams.alpha.limits]]
kind = "requests"
rate = "100/minute"
[[organizations.acme.teams.alpha.limits]]
kind = "tokens"
rate = "1000/hour"
model = "smollm2-135m-instruct"
[organizations.acme.teams.alpha.keys.agents]
networks = ["10.0.0.0/8"]
deadline_ms = 500
[[organizations.acme.teams.alpha.keys.agents.limits]]
kind = "output"
amount = 64
"""


class Hub:
    """An installation that files are applied to."""

    def __init__(self, cli: Cli, folder: Path) -> None:
        self.cli = cli
        self.folder = folder
        self.file = folder / "tenants.toml"

    def apply(self, text: str, *options: str) -> Done:
        self.file.write_text(text)
        return self.cli("apply", str(self.file), *options)

    def applied(self, text: str) -> list[str]:
        """Lines about what has become different; there is no mistake, and no new key."""
        done = self.apply(text)
        assert (done.code, done.out) == (0, "")
        return [line for line in done.err.splitlines() if line[:2] in ("+ ", "~ ", "- ")]

    def mistakes(self, text: str) -> list[str]:
        """And nothing has been changed."""
        before = self.state()
        done = self.apply(text)
        assert (done.code, done.out) == (1, "")
        first, *lines = done.err.splitlines()
        count = "1 mistake" if len(lines) == 1 else f"{len(lines)} mistakes"
        assert first == f"evenhand: {self.file}: {count}; nothing was changed"
        assert self.state() == before
        return [line.removeprefix("evenhand: ") for line in lines]

    def state(self) -> tuple[list[AuditEntry], int]:
        """The audit, and the number of changes."""

        async def read() -> tuple[list[AuditEntry], int]:
            async with opened(load_settings().settings) as (database, _), database.reading() as work:
                return list(await work.audit.page(after=0, limit=1000)), await work.version()

        return asyncio.run(read())

    def holder(self, raw: str) -> KeyHolder:
        public_id = parse(raw, API_KEY)
        assert public_id is not None

        async def read() -> KeyHolder | None:
            async with opened(load_settings().settings) as (database, _), database.reading() as work:
                return await read_holder(work, public_id, 0)

        holder = asyncio.run(read())
        assert holder is not None
        return holder

    def enter_model(self, name: str = MODEL) -> None:
        async def enter() -> None:
            async with opened(load_settings().settings) as (_, administration):
                await administration.catalog.enter_models(Actor("system"), [name])

        asyncio.run(enter())


@pytest.fixture
def hub(cli: Cli, tmp_path: Path) -> Hub:
    made = Hub(cli, tmp_path)
    made.enter_model()
    return made


def keys_of(done: Done) -> dict[tuple[str, str, str], str]:
    """What was printed of new keys."""
    assert done.code == 0
    lines = [line.split("\t") for line in done.out.splitlines()]
    return {(organization, team, name): raw for organization, team, name, raw in lines}


def test_the_example_can_be_applied_and_applying_it_again_changes_nothing(hub: Hub) -> None:
    text = EXAMPLE.read_text()
    trial = hub.apply(text, "--dry-run")
    made = hub.apply(text)
    keys = keys_of(made)
    state = hub.state()

    assert set(keys) == {
        ("acme", "research", "notebooks"),
        ("acme", "research", "nightly evaluation"),
        ("acme", "support", "helpdesk"),
    }
    assert trial.code == 2
    assert [line for line in made.err.splitlines() if line.startswith("+ ")] == trial.out.splitlines()
    assert hub.apply(text) == Done(0, "", UNCHANGED)
    assert hub.apply(text, "--dry-run") == Done(0, "", "Nothing would change.\n")
    assert hub.state() == state
    assert hub.cli("audit", "verify").code == 0
    entries, _ = state
    assert len(entries) == 1 + len(trial.out.splitlines()) + 1  # the model before; a team is made, then disabled


def test_a_trial_changes_nothing_and_tells_what_the_file_would(hub: Hub) -> None:
    before = hub.state()
    trial = hub.apply(BASE, "--dry-run")

    assert hub.state() == before
    assert trial.code == 2
    assert trial.out.splitlines() == [
        "+ organization acme: weight 2",
        "+ limit concurrent of organization acme: 20",
        "+ team acme/alpha: weight 3",
        "+ limit requests/minute of team acme/alpha: 100/minute",
        f"+ limit tokens/hour of team acme/alpha for {MODEL}: 1000/hour",
        "+ key acme/alpha/agents: deadline_ms 500, networks 10.0.0.0/8",
        "+ limit output of key acme/alpha/agents: 64",
    ]
    assert trial.err == "7 would be made, 0 would be changed, 0 would be removed.\n"
    assert "eh_" not in trial.out + trial.err
    assert rows_of(hub.cli("org", "list")) == []


def test_a_new_key_is_printed_once_alone_on_stdout_and_works(hub: Hub) -> None:
    done = hub.apply(BASE)
    (line,) = done.out.splitlines()
    organization, team, name, raw = line.split("\t")
    holder = hub.holder(raw)

    assert (organization, team, name) == ("acme", "alpha", "agents")
    assert (holder.organization.name, holder.team.name, holder.key.name) == ("acme", "alpha", "agents")
    assert (holder.key.networks, holder.key.deadline_ms) == (("10.0.0.0/8",), 500)
    assert [(each.scope, each.name, each.model) for each in holder.limits] == [
        ("organization", "concurrent", None),
        ("team", "requests/minute", None),
        ("team", "tokens/hour", MODEL),
        ("key", "output", None),
    ]
    assert raw.split("_")[2] not in done.err
    entries, _ = hub.state()
    assert not any(raw.split("_")[2] in f"{entry}" for entry in entries)
    assert {entry.draft.actor.partition(":")[0] for entry in entries[1:]} == {"cli"}


def test_what_is_different_is_told_from_and_to(hub: Hub) -> None:
    hub.apply(BASE)
    changed = (
        BASE.replace("weight = 2", 'weight = 5\ntime_zone = "Asia/Kolkata"')
        .replace("weight = 3", "disabled = true")
        .replace('"100/minute"', '"100/minute"\nburst = 7\nshadow = true')
        .replace('["10.0.0.0/8"]\ndeadline_ms = 500', '"all"\nmodels = ["a", "b"]\ndefault_class = "batch"')
        .replace("amount = 64", "amount = 65")
    )
    trial = hub.apply(changed, "--dry-run")
    lines = [
        "~ organization acme: weight 2 → 5, time_zone unset → Asia/Kolkata",
        "~ team acme/alpha: disabled unset → yes",
        "~ limit requests/minute of team acme/alpha: 100/minute → 100/minute, burst 7, shadow",
        "~ key acme/alpha/agents: default_class unset → batch, models unset → a,b, networks 10.0.0.0/8 → unset",
        "~ limit output of key acme/alpha/agents: 64 → 65",
    ]

    assert (trial.code, trial.out.splitlines()) == (2, lines)
    assert hub.applied(changed) == lines
    assert hub.apply(changed) == Done(0, "", UNCHANGED)


def test_limits_that_the_file_does_not_have_are_removed_where_it_says_anything(hub: Hub) -> None:
    hub.apply(BASE)
    hub.cli("limit", "set", "requests", "5/minute", "--org", "acme")
    hub.cli("quota", "set", "tokens", "5/day", "--org", "acme", "--team", "alpha")
    hub.cli("org", "create", "other")
    hub.cli("limit", "set", "requests", "5/minute", "--org", "other")
    hub.cli("team", "create", "--org", "acme", "beta")
    hub.cli("limit", "set", "concurrent", "5", "--org", "acme", "--team", "beta")

    assert hub.applied(BASE) == [
        "- limit requests/minute of organization acme: 5/minute",
        "- limit quota-tokens/day of team acme/alpha: 5/day, hard",
    ]
    left = {(row["organization"], row["team"], row["name"]) for row in rows_of(hub.cli("limit", "list"))}
    assert ("other", "-", "requests/minute") in left
    assert ("acme", "beta", "concurrent") in left


def test_an_organization_that_is_only_named_on_the_way_is_in_the_file_too(hub: Hub) -> None:
    hub.apply(BASE)

    assert hub.applied("[organizations.acme.teams.alpha.keys.agents]") == [
        "- limit concurrent of organization acme: 20",
        "- limit requests/minute of team acme/alpha: 100/minute",
        f"- limit tokens/hour of team acme/alpha for {MODEL}: 1000/hour",
        "- limit output of key acme/alpha/agents: 64",
    ]


def test_a_limit_for_all_models_and_one_for_a_model_are_two(hub: Hub) -> None:
    def limit(amount: int, model: str = "") -> str:
        return f'[[organizations.acme.limits]]\nkind = "concurrent"\namount = {amount}\n{model}\n'

    for_model = f'model = "{MODEL}"'
    hub.apply(limit(1) + limit(2, for_model))

    assert hub.applied(limit(1) + limit(3, for_model)) == [
        f"~ limit concurrent of organization acme for {MODEL}: 2 → 3"
    ]
    assert hub.applied(limit(3, for_model)) == ["- limit concurrent of organization acme: 1"]


def test_of_a_quota_the_alerts_are_told_too(hub: Hub) -> None:
    def quota(more: str) -> str:
        rule = 'kind = "quota"\nunit = "usd"\nperiod = "month"\namount = "2.50"\n'
        return f"[[organizations.acme.limits]]\n{rule}{more}"

    hub.apply(quota(""))

    assert hub.applied(quota("alerts = [50, 90]")) == [
        "~ limit quota-microusd/month of organization acme: alerts unset → 50%,90%"
    ]
    assert hub.applied(quota("alerts = []")) == [
        "~ limit quota-microusd/month of organization acme: alerts 50%,90% → none"
    ]
    (line,) = hub.applied(quota("hard = false"))
    assert line.endswith(": 2.50 USD/month, hard → 2.50 USD/month, soft, alerts none → unset")


def test_settings_that_are_left_out_stay_and_those_that_are_unset_go(hub: Hub) -> None:
    full = """
    [organizations.acme]
    weight = 7
    time_zone = "Europe/Berlin"
    disabled = true
    [organizations.acme.teams.alpha]
    weight = 8
    disabled = true
    [organizations.acme.teams.alpha.keys.k]
    default_class = "standard"
    models = ["m"]
    endpoints = ["chat"]
    networks = ["10.0.0.0/8"]
    max_queue_depth = 9
    deadline_ms = 10
    expires_at = 2036-01-01T00:00:00Z
    [aliases.a]
    model = "smollm2-135m-instruct"
    system_default = "Be kind."
    request_class = "batch"
    """
    hub.apply(full)
    bare = "[organizations.acme.teams.alpha.keys.k]\n[aliases.a]\nmodel = 'smollm2-135m-instruct'\n"
    assert hub.apply(bare) == Done(0, "", UNCHANGED)

    unset = """
    [organizations.acme]
    disabled = false
    [organizations.acme.teams.alpha]
    disabled = false
    [organizations.acme.teams.alpha.keys.k]
    models = "all"
    endpoints = "all"
    networks = "all"
    max_queue_depth = "none"
    deadline_ms = "none"
    expires_at = "never"
    [aliases.a]
    model = "smollm2-135m-instruct"
    system_default = ""
    request_class = "none"
    """
    *lines, of_key = hub.applied(unset)
    assert lines == [
        '~ alias a: system_default "Be kind." → unset, request_class batch → unset',
        "~ organization acme: disabled yes → unset",
        "~ team acme/alpha: disabled yes → unset",
    ]
    assert of_key.removeprefix("~ key acme/alpha/k: ").split(", ") == [
        "models m → unset",
        "endpoints chat → unset",
        "max_queue_depth 9 → unset",
        "deadline_ms 10 → unset",
        "networks 10.0.0.0/8 → unset",
        "expires 2036-01-01T00:00:00.000Z → unset",
    ]
    assert hub.apply(unset) == Done(0, "", UNCHANGED)


def test_who_is_not_in_the_file_is_left_alone_and_named(hub: Hub) -> None:
    hub.apply(BASE)
    hub.cli("org", "create", "other")
    hub.cli("team", "create", "--org", "other", "unseen")
    hub.cli("team", "create", "--org", "acme", "beta")
    hub.cli("key", "create", "--org", "acme", "--team", "beta", "--name", "unseen")
    hub.cli("key", "create", "--org", "acme", "--team", "alpha", "--name", "by hand")
    hub.cli("alias", "create", "nick", "--model", MODEL)
    lists = [("org", "list"), ("team", "list"), ("key", "list"), ("alias", "list"), ("limit", "list")]
    before = [hub.cli(*words) for words in lists]

    for options, last in (((), UNCHANGED), (("--dry-run",), "Nothing would change.\n")):
        done = hub.apply(BASE, *options)
        assert (done.code, done.out) == (0, "")
        assert done.err == (
            "evenhand: note: alias nick is not in the file, and left alone\n"
            "evenhand: note: key acme/alpha/by hand is not in the file, and left alone\n"
            "evenhand: note: organization other is not in the file, and left alone\n"
            "evenhand: note: team acme/beta is not in the file, and left alone\n" + last
        )
    assert [hub.cli(*words) for words in lists] == before


def test_very_many_who_are_left_alone_are_counted(hub: Hub) -> None:
    text = "".join(f"[organizations.acme.teams.alpha.keys.k{number:02}]\n" for number in range(MOST_LEFT + 5))
    hub.apply(text)
    done = hub.apply("[organizations.acme.teams.alpha]")

    notes = [line for line in done.err.splitlines() if "note:" in line]
    assert len(notes) == MOST_LEFT + 1
    assert notes[-1] == "evenhand: note: 5 more of kind key are not in the file, and left alone"


# Keys


def test_a_key_that_was_revoked_is_not_there_any_more(hub: Hub) -> None:
    first = keys_of(hub.apply(BASE))["acme", "alpha", "agents"]
    hub.cli("key", "revoke", first)

    assert hub.apply(BASE, "--dry-run").out.splitlines() == [
        "+ key acme/alpha/agents: deadline_ms 500, networks 10.0.0.0/8",
        "+ limit output of key acme/alpha/agents: 64",
    ]
    second = keys_of(hub.apply(BASE))["acme", "alpha", "agents"]
    assert second != first
    assert hub.holder(first).key.revoked_at_ms is not None
    assert [each.name for each in hub.holder(second).limits][-1] == "output"
    assert hub.apply(BASE) == Done(0, "", UNCHANGED)


def test_of_two_keys_with_one_name_none_can_be_meant(hub: Hub) -> None:
    hub.apply(BASE)
    hub.cli("key", "create", "--org", "acme", "--team", "alpha", "--name", "agents")
    ids = sorted(row["id"] for row in rows_of(hub.cli("key", "list")))

    (mistake,) = hub.mistakes(BASE)
    place, _, words = mistake.partition(": ")
    assert place == "organizations.acme.teams.alpha.keys.agents"
    assert words.startswith("The team has 2 keys of this name, so that none can be meant: key_")
    assert all(each in words for each in ids)


def test_keys_of_a_disabled_team_are_made_too(hub: Hub) -> None:
    text = "[organizations.acme]\ndisabled = true\n[organizations.acme.teams.alpha]\ndisabled = true\n"
    hub.apply(text)
    hub.applied(text)
    keys = keys_of(hub.apply(text + "[organizations.acme.teams.alpha.keys.k]\n[organizations.acme.teams.beta.keys.k]"))

    assert {team for _, team, _ in keys} == {"alpha", "beta"}
    holder = hub.holder(keys["acme", "alpha", "k"])
    assert holder.team.disabled_at_ms is not None
    assert holder.organization.disabled_at_ms is not None


def test_an_expiry_that_has_passed_is_no_mistake_unless_it_is_new(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "[organizations.acme.teams.alpha.keys.k]\nexpires_at = 2036-01-01T00:00:00Z\n"
    hub.apply(text)
    clock = SteppedClock(2_200_000_000.0)  # 2039
    monkeypatch.setattr("gateway.clock.SystemClock", lambda: clock)

    assert hub.apply(text) == Done(0, "", UNCHANGED)
    place = "organizations.acme.teams.alpha.keys.k.expires_at"
    assert hub.mistakes(text.replace("2036", "2037")) == [f"{place}: must be in the future, and before the year 10000."]


def test_keys_that_cannot_be_shown_are_named_for_revoking(hub: Hub) -> None:
    hub.file.write_text(BASE)
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "gateway.cli", "apply", str(hub.file)],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            env=dict(os.environ),
            check=False,
        )
    (row,) = rows_of(hub.cli("key", "list"))

    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == (
        "evenhand: keys were made and could not be shown (No space left on device); revoke them: " + row["id"]
    )


def test_keys_are_shown_though_nothing_else_can_be_told(hub: Hub) -> None:
    """As when what is said on stderr goes to a full disk, or to a pipe that nobody reads any more."""
    hub.applied("[organizations.acme.teams.alpha]")  # what is logged of a first start is behind us
    hub.file.write_text(BASE)
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "gateway.cli", "apply", str(hub.file)],
            stdout=subprocess.PIPE,
            stderr=full,
            text=True,
            env=dict(os.environ),
            check=False,
        )

    (line,) = done.stdout.splitlines()
    *owner, raw = line.split("\t")
    assert owner == ["acme", "alpha", "agents"]
    assert hub.holder(raw).key.name == "agents"


# Catalogue and prices


def test_models_are_disabled_and_enabled(hub: Hub) -> None:
    text = f'[models."{MODEL}"]\ndisabled = true\n'

    assert hub.applied(text) == [f"~ model {MODEL}: disabled unset → yes"]
    assert hub.apply(text) == Done(0, "", UNCHANGED)
    assert hub.applied(text.replace("true", "false")) == [f"~ model {MODEL}: disabled yes → unset"]


def price(year: int, prompt: str = "1", model: str = MODEL) -> str:
    return (
        f'[[prices]]\nmodel = "{model}"\nvalid_from = {year}-01-01T00:00:00Z\nprompt = "{prompt}"\ncompletion = "2"\n'
    )


def test_a_history_of_prices_can_be_set_once_and_is_then_only_added_to(hub: Hub) -> None:
    history = price(2021) + price(2020, "0.5") + price(2035, "3")
    line = f"+ price of {MODEL} from {{}}-01-01T00:00:00.000Z: prompt {{}} USD, cached {{}} USD, completion 2.00 USD"

    assert hub.applied(history) == [
        line.format(2020, "0.50", "0.50"),
        line.format(2021, "1.00", "1.00"),
        line.format(2035, "3.00", "3.00"),
    ]
    assert hub.apply(history) == Done(0, "", UNCHANGED)
    assert hub.applied(history + price(2036, "4")) == [line.format(2036, "4.00", "4.00")]
    (mistake,) = hub.mistakes(history + price(2022, "9"))
    assert mistake.startswith("prices[3].valid_from: The model has a price, so 'valid_from' must not lie in the past")
    assert hub.mistakes(history.replace('"3"', '"4"')) != []
    assert hub.apply(price(2035, "3")) == Done(0, "", UNCHANGED)


# Mistakes


def test_one_mistake_changes_nothing_and_all_are_told(hub: Hub) -> None:
    hub.apply(BASE)
    wrong = (
        BASE.replace("weight = 2", "weight = 9")
        .replace("amount = 20", "amount = -1")
        .replace(f'"{MODEL}"', '"gpt-9"')
        .replace("networks", "network")
        + "[organizations.new.teams.t.keys.k]\n"
        + price(2020, model="gpt-8")
        + '[aliases.a]\nmodel = "gpt-7"\n'
        + f'[aliases."{MODEL}"]\nmodel = "{MODEL}"\n'
        + '[models."gpt-6"]\ndisabled = true\n'
    )
    no_model = "in the catalogue; a model is known once it has been served (evenhand model list)."

    assert hub.mistakes(wrong) == [
        "organizations.acme.limits[0].amount: is -1, not 0 to 100000000.",
        "organizations.acme.teams.alpha.keys.agents.network: is not known here; did you mean networks?",
        "models.gpt-6: There is no model of this name in the catalogue.",
        f"aliases.a.model: There is no model 'gpt-7' {no_model}",
        f"aliases.{MODEL}: There is a model of this name, which wins over an alias.",
        f"prices[0].model: There is no model 'gpt-8' {no_model}",
        f"organizations.acme.teams.alpha.limits[1].model: There is no model 'gpt-9' {no_model}",
    ]


def test_a_trial_tells_mistakes_too(hub: Hub) -> None:
    done = hub.apply(BASE.replace("weight = 2", "weight = 0"), "--dry-run")

    assert (done.code, done.out) == (1, "")
    assert done.err.splitlines() == [
        f"evenhand: {hub.file}: 1 mistake; nothing was changed",
        "evenhand: organizations.acme.weight: must be between 1 and 1000000.",
    ]


def test_a_quota_that_was_topped_up_cannot_become_more_than_can_be_counted(hub: Hub) -> None:
    text = '[[organizations.acme.limits]]\nkind = "quota"\nunit = "tokens"\nperiod = "month"\namount = {}\n'
    hub.apply(text.format(5))
    assert hub.cli("quota", "top-up", "tokens", "100/month", "--org", "acme", "--reason", "more").code == 0

    (mistake,) = hub.mistakes(text.format(10**15))
    assert mistake.startswith("organizations.acme.limits[0].amount: must be at most ")


def test_what_looks_like_a_credential_is_not_repeated(hub: Hub) -> None:
    raw = keys_of(hub.apply(BASE))["acme", "alpha", "agents"]
    lines = hub.mistakes(f'[organizations."{raw}"]\nweight = 1\n[aliases."{raw}"]\nmodel = "{raw}"\n')

    assert len(lines) >= 3
    assert not any(raw.split("_")[1] in line for line in lines)


def test_lines_stay_lines_whatever_the_file_says(hub: Hub) -> None:
    done = hub.apply('[aliases.a]\nmodel = "x\\n\\u202Eevenhand: all is well"\n')

    assert len(done.err.splitlines()) == 2
    assert "\\n\\u202eevenhand" in done.err


@pytest.mark.parametrize("content", [None, b"[organizations", b"\xff"])
def test_a_file_that_cannot_be_read_is_told(hub: Hub, content: bytes | None) -> None:
    if content is not None:
        hub.file.write_bytes(content)
    done = hub.cli("apply", str(hub.file), "--dry-run")

    assert (done.code, done.out) == (1, "")
    assert done.err.startswith(f"evenhand: {hub.file}: ")
    assert done.err.count("\n") == 1


# Beside others


def start(hub: Hub, file: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "gateway.cli", "apply", str(file)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=dict(os.environ),
    )


def test_several_at_once_make_everything_once(hub: Hub) -> None:
    hub.file.write_text(BASE)
    running = [start(hub, hub.file) for _ in range(3)]
    said = [process.communicate(timeout=60) for process in running]

    assert [process.returncode for process in running] == [0, 0, 0]
    assert sorted(len(out.splitlines()) for out, _ in said) == [0, 0, 1]
    assert sorted(err == UNCHANGED for _, err in said) == [False, True, True]
    assert len(rows_of(hub.cli("key", "list"))) == 1
    assert hub.cli("audit", "verify").code == 0


def test_of_two_different_files_at_once_each_holds_as_a_whole(hub: Hub) -> None:
    """Whichever is the last: no mixture."""
    files = []
    for number in (1, 2):
        text = re.sub(r"(weight|amount|deadline_ms) = \d+", rf"\1 = {number}", BASE)
        file = hub.folder / f"tenants{number}.toml"
        file.write_text(text)
        files.append(file)
    for _ in range(3):
        running = [start(hub, file) for file in files]
        for process in running:
            process.communicate(timeout=60)
            assert process.returncode == 0
        codes = [hub.cli("apply", str(file), "--dry-run").code for file in files]
        assert sorted(codes) == [0, 2]
    assert hub.cli("audit", "verify").code == 0


def test_a_database_that_is_away_is_told_as_by_other_commands(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, free_port: Callable[[], int]
) -> None:
    monkeypatch.setenv("EVENHAND_DATABASE__URL", f"postgresql://postgres@127.0.0.1:{free_port()}/gone")
    done = hub.apply(BASE.replace("weight = 2", "weight = 0"))

    assert (done.code, done.out) == (1, "")
    assert "does not answer" in done.err


def test_a_second_run_over_many_keys_reads_little(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    """A query for each team, and none for each key or limit."""
    from gateway.storage.transaction import Transaction

    def text(num_teams: int, num_keys: int) -> str:
        lines = []
        for team in range(num_teams):
            for key in range(num_keys):
                name = f"organizations.acme.teams.t{team}.keys.k{key}"
                lines.append(f'[{name}]\n[[{name}.limits]]\nkind = "concurrent"\namount = 2\n')
        return "".join(lines)

    num: list[int] = []
    real: Any = Transaction.rows

    async def counted(self: Transaction, statement: Any, **options: Any) -> Any:
        num.append(1)
        return await real(self, statement, **options)

    def queries(num_teams: int, num_keys: int) -> int:
        content = text(num_teams, num_keys)
        hub.apply(content)
        num.clear()
        monkeypatch.setattr(Transaction, "rows", counted)
        assert "Nothing has changed" in hub.apply(content).err
        monkeypatch.setattr(Transaction, "rows", real)
        return len(num)

    few = queries(2, 2)
    assert queries(2, 20) == few
    assert queries(6, 20) <= few + 4
