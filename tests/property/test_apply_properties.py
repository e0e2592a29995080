"""Whatever files are applied one after the other: each holds exactly, once and for all, and was told beforehand."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from pathlib import Path
from typing import Any

from admin_kit import ACTOR, Office
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.commands.apply import difference_line
from gateway.commands.tenant_file import wanted_of
from gateway.services.wanted import Applied, Wanted, WantedLimit
from gateway.storage.database import Database

MODELS = ("m1", "m2")

_amounts = st.integers(1, 9)
_kinds = st.one_of(
    st.fixed_dictionaries({"kind": st.sampled_from(["concurrent", "context", "output"]), "amount": _amounts}),
    st.fixed_dictionaries(
        {"kind": st.just("requests"), "rate": st.builds("{}/{}".format, _amounts, st.sampled_from(["minute", "day"]))},
        optional={"burst": _amounts},
    ),
    st.fixed_dictionaries(
        {
            "kind": st.just("quota"),
            "unit": st.sampled_from(["tokens", "microusd"]),
            "period": st.sampled_from(["day", "month"]),
            "amount": _amounts,
        },
        optional={"hard": st.booleans(), "alerts": st.lists(st.integers(1, 5), max_size=2)},
    ),
)
_limits = st.lists(
    st.tuples(
        _kinds, st.fixed_dictionaries({}, optional={"model": st.sampled_from(MODELS), "shadow": st.booleans()})
    ).map(lambda parts: parts[0] | parts[1]),
    max_size=4,
    unique_by=lambda limit: (
        limit["kind"], limit.get("rate", "/").partition("/")[2], limit.get("unit"), limit.get("period"),
        limit.get("model"),
    ),
)  # fmt: skip
_keys = st.dictionaries(
    st.sampled_from("kl"),
    st.fixed_dictionaries(
        {},
        optional={
            "limits": _limits,
            "deadline_ms": st.one_of(_amounts, st.just("none")),
            "networks": st.sampled_from(["all", ["10.0.0.0/8"], ["192.0.2.7", "10.0.0.0/8"]]),
            "models": st.sampled_from(["all", ["m1"], ["m1", "m1"]]),
            "default_class": st.sampled_from(["batch", "standard"]),
        },
    ),
    max_size=2,
)
_tenant = {"weight": _amounts, "disabled": st.booleans(), "limits": _limits}
_teams = st.dictionaries(
    st.sampled_from("tu"), st.fixed_dictionaries({}, optional={**_tenant, "keys": _keys}), max_size=2
)
_zones = st.sampled_from(["UTC", "Europe/Berlin"])
_organizations = st.dictionaries(
    st.sampled_from(["o", "p q"]),
    st.fixed_dictionaries({}, optional={**_tenant, "time_zone": _zones, "teams": _teams}),
    max_size=2,
)
FILES = st.fixed_dictionaries(
    {},
    optional={
        "organizations": _organizations,
        "models": st.dictionaries(
            st.sampled_from(MODELS), st.fixed_dictionaries({"disabled": st.booleans()}), max_size=2
        ),
        "aliases": st.dictionaries(
            st.sampled_from("ab"),
            st.fixed_dictionaries(
                {"model": st.sampled_from(MODELS)},
                optional={"request_class": st.sampled_from(["batch", "none"]), "system_default": st.sampled_from("x ")},
            ),
            max_size=2,
        ),
    },
)


@settings(max_examples=30, deadline=None)
@given(files=st.lists(FILES, min_size=1, max_size=4))
def test_every_file_holds_as_it_was_told_and_a_second_time_changes_nothing(
    migrated_sqlite: Path, files: list[dict[str, Any]]
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        shutil.copyfile(migrated_sqlite, Path(folder) / "evenhand.db")
        asyncio.run(_apply_all(f"sqlite:///{folder}/evenhand.db", files))


async def _apply_all(url: str, files: list[dict[str, Any]]) -> None:
    database = Database.open(url, Path("unused"))
    try:
        office = Office(database)
        for model in MODELS:
            await office.add_model(model)
        for tables in files:
            wanted, mistakes = wanted_of(tables)
            assert mistakes == []
            await _apply(office, wanted)
    finally:
        await database.close()


async def _apply(office: Office, wanted: Wanted) -> None:
    application = office.admin.application
    state = await office.audit(), await office.version()
    trial = await application.apply(ACTOR, wanted, is_trial=True)
    assert (await office.audit(), await office.version()) == state
    done = await application.apply(ACTOR, wanted)
    assert _lines(done) == _lines(trial)
    assert len(done.keys) == len(trial.keys)
    assert (await office.version() > state[1]) is bool(done.differences)
    await _check_limits(office, wanted)

    state = await office.audit(), await office.version()
    for is_trial in (True, False):
        again = await application.apply(ACTOR, wanted, is_trial=is_trial)
        assert (again.differences, again.keys, again.left_alone) == ((), (), done.left_alone)
    assert (await office.audit(), await office.version()) == state


def _lines(applied: Applied) -> list[str]:
    return [difference_line(each) for each in applied.differences]


async def _check_limits(office: Office, wanted: Wanted) -> None:
    """Everybody in the file has its limits and no others."""
    async with office.storage.reading() as work:
        for organization in wanted.organizations:
            owner = await work.organizations.by_name(organization.name)
            assert owner is not None
            scopes: list[tuple[str, tuple[WantedLimit, ...]]] = [(owner.id, organization.limits)]
            for team in organization.teams:
                found = await work.teams.by_name(owner.id, team.name)
                assert found is not None
                keys = {each.name: each for each in await work.keys.page(after="", limit=100, team_id=found.id)}
                scopes.append((found.id, team.limits))
                scopes += [(keys[each.name].id, each.limits) for each in team.keys]
            for scope_id, limits in scopes:
                there = {(each.rule, each.model, each.is_shadow) for each in await work.limits.of([scope_id])}
                assert there == {(each.rule, each.model, each.is_shadow) for each in limits}
