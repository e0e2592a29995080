"""Limits that administrators set, on real databases: one of a name, for somebody who is there; a change keeps usage."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import pytest
from admin_kit import ACTOR, MODEL, NOW_S, Office, said

from gateway.domain.limits.meters import MOST_QUOTA, MOST_TOKENS, MOST_UNITS
from gateway.domain.limits.policy import (
    Concurrency,
    ContextSize,
    Limit,
    OutputSize,
    QuotaRule,
    RequestRate,
    Rule,
    TokenRate,
    meter_key,
)
from gateway.errors import Conflict, InvalidRequest, NotFound
from gateway.services.admin_keys import KeyTerms
from gateway.services.admin_pages import PageRequest
from gateway.services.stores import Storage
from gateway.services.tenants import TenantChange

NOW_MS = int(NOW_S * 1000)
RATE = RequestRate(amount=100, period="minute")
EVERY_RULE: tuple[Rule, ...] = (
    RATE,
    TokenRate(amount=5, period="hour", burst=7, max_debt=2, cached_percent=10, output_percent=300, is_strict=True),
    Concurrency(amount=3),
    ContextSize(amount=8192),
    OutputSize(amount=1024),
    QuotaRule(unit="tokens", period="month", amount=10**15),
    QuotaRule(unit="microusd", period="day", amount=1, is_hard=False, alerts=()),
)
IDS = ("organization", "team", "key")


class Scene:
    """An organization with a team with a key, and a model."""

    def __init__(self, office: Office) -> None:
        self.office = office
        self.admin = office.admin
        self.limits = office.admin.limits

    async def make(self) -> None:
        await self.office.add_model()
        tenants = self.admin.tenants
        organization = await tenants.create_organization(ACTOR, name="acme", time_zone="Asia/Kolkata")
        team = await tenants.create_team(ACTOR, organization_id=organization.id, name="red")
        key = (await self.admin.keys.create(ACTOR, team_id=team.id, terms=KeyTerms(name="k"))).key
        self.ids: dict[str, str] = {"organization": organization.id, "team": team.id, "key": key.id}

    async def state(self) -> tuple[object, ...]:
        return await self.office.audit(), await self.office.version(), self.office.feed.num_announced


@pytest.fixture
async def scene(storage: Storage) -> Scene:
    made = Scene(Office(storage))
    await made.make()
    return made


@pytest.mark.parametrize("scope", IDS)
async def test_every_rule_can_be_set_for_everybody_and_is_what_it_was(scene: Scene, scope: str) -> None:
    scope_id = scene.ids[scope]
    set_limits = [
        await scene.limits.set(ACTOR, scope_id=scope_id, rule=rule, model=model, is_shadow=model is not None)
        for rule, model in itertools.product(EVERY_RULE, (None, MODEL))
    ]

    page = await scene.limits.page(PageRequest(), scope_id=scope_id)
    assert sorted(set_limits, key=lambda each: (each.name, each.model or "")) == list(page.data)
    assert page.next is None
    for limit in set_limits:
        assert (limit.scope, limit.changed_at_ms) == (scope, NOW_MS)
        assert await scene.limits.get(scope_id=scope_id, name=limit.name, model=limit.model) == limit
        await scene.limits.remove(ACTOR, scope_id=scope_id, name=limit.name, model=limit.model)
    assert (await scene.limits.page(PageRequest())).data == []


async def test_another_amount_takes_the_place_and_keeps_the_meter(scene: Scene) -> None:
    quota = QuotaRule(unit="tokens", period="month", amount=1000)
    changed: list[tuple[Rule, Rule]] = [
        (RATE, RequestRate(amount=200, period="minute", burst=3)),
        (EVERY_RULE[1], TokenRate(amount=6, period="hour")),
        (Concurrency(amount=3), Concurrency(amount=4)),
        (quota, QuotaRule(unit="tokens", period="month", amount=2000, is_hard=False, alerts=(50,))),
    ]
    for before, after in changed:
        keys = set()
        for rule, is_shadow in ((before, False), (after, False), (after, True)):
            limit = await scene.limits.set(ACTOR, scope_id=scene.ids["team"], rule=rule, is_shadow=is_shadow)
            keys.add(meter_key(limit, "2027-01" if isinstance(rule, QuotaRule) else None))
        assert len(keys) == 1
        (key,) = keys
        assert not {"1000", "2000", "100", "200"} & set(key.replace("/", ":").split(":"))

    assert {each.rule for each in (await scene.limits.page(PageRequest())).data} == {after for _, after in changed}


async def test_another_period_or_model_is_another_limit(scene: Scene) -> None:
    team = scene.ids["team"]
    for period in ("minute", "day"):
        for model in (None, MODEL):
            rule = RequestRate(amount=1, period=period)  # type: ignore[arg-type]
            await scene.limits.set(ACTOR, scope_id=team, rule=rule, model=model)

    await scene.limits.remove(ACTOR, scope_id=team, name="requests/day", model=MODEL)

    left = [(each.name, each.model) for each in (await scene.limits.page(PageRequest())).data]
    assert left == [("requests/day", None), ("requests/minute", None), ("requests/minute", MODEL)]


async def test_the_audit_has_before_and_after(scene: Scene) -> None:
    team = scene.ids["team"]
    num_before = len(await scene.office.audit())
    await scene.limits.set(ACTOR, scope_id=team, rule=RATE, model=MODEL)
    await scene.limits.set(ACTOR, scope_id=team, rule=RequestRate(amount=5, period="minute"), model=MODEL)
    await scene.limits.remove(ACTOR, scope_id=team, name="requests/minute", model=MODEL)

    first, second, third = [entry.draft for entry in (await scene.office.audit())[num_before:]]
    assert [each.action for each in (first, second, third)] == ["limit.set", "limit.set", "limit.remove"]
    assert {each.object_id for each in (first, second, third)} == {f"requests/minute:{team}:{MODEL}"}
    assert (first.before, third.after) == ("", "")
    assert (second.before, third.before) == (first.after, second.after)
    told = said(second.after)
    assert told["rule"] == {"type": "requests", "amount": 5, "period": "minute", "burst": None}
    assert (told["scope"], told["scope_id"], told["model"], told["is_shadow"]) == ("team", team, MODEL, False)


@pytest.mark.parametrize("rule", EVERY_RULE)
async def test_what_is_so_already_writes_nothing(scene: Scene, rule: Rule) -> None:
    first = await scene.limits.set(ACTOR, scope_id=scene.ids["key"], rule=rule, model=MODEL, is_shadow=True)
    before = await scene.state()
    scene.office.clock.now += 60

    again = await scene.limits.set(ACTOR, scope_id=scene.ids["key"], rule=rule, model=MODEL, is_shadow=True)

    assert again == first
    assert await scene.state() == before


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (RequestRate(amount=-1, period="day"), f"'rule.rate' is -1, not 0 to {MOST_UNITS}."),
        (RequestRate(amount=MOST_UNITS + 1, period="day"), f"'rule.rate' is {MOST_UNITS + 1}, not 0 to {MOST_UNITS}."),
        (RequestRate(amount=1, period="day", burst=-1), f"'rule.burst' is -1, not 0 to {MOST_UNITS}."),
        (TokenRate(amount=10**30, period="day", burst=1), f"'rule.rate' is {10**30}, not 0 to {MOST_UNITS}."),
        (TokenRate(amount=1, period="day", burst=-2), f"'rule.burst' is -2, not 0 to {MOST_UNITS}."),
        (TokenRate(amount=1, period="day", max_debt=-1), f"'rule.max_debt' is -1, not 0 to {MOST_UNITS}."),
        (TokenRate(amount=1, period="day", prompt_percent=-1), "'rule.prompt_percent' is -1, not 0 to 10000."),
        (TokenRate(amount=1, period="day", cached_percent=10_001), "'rule.cached_percent' is 10001, not 0 to 10000."),
        (TokenRate(amount=1, period="day", output_percent=10_001), "'rule.output_percent' is 10001, not 0 to 10000."),
        (
            TokenRate(amount=1, period="day", prompt_percent=50),
            "'rule.cached_percent' is more than prompt_percent: a cached token cannot count more.",
        ),
        (Concurrency(amount=-1), f"'rule.amount' is -1, not 0 to {MOST_UNITS}."),
        (ContextSize(amount=0), f"'rule.amount' is 0, not 1 to {MOST_TOKENS}."),
        (OutputSize(amount=MOST_TOKENS + 1), f"'rule.amount' is {MOST_TOKENS + 1}, not 1 to {MOST_TOKENS}."),
        (
            QuotaRule(unit="tokens", period="day", amount=MOST_QUOTA + 1),
            f"'rule.amount' is {MOST_QUOTA + 1}, not 0 to {MOST_QUOTA}.",
        ),
        (
            QuotaRule(unit="tokens", period="day", amount=1, alerts=(0,)),
            "'rule.alerts' are percents from 1 to 1000, ascending, each once.",
        ),
    ],
)
async def test_a_rule_that_cannot_be_is_refused_by_its_field_and_leaves_nothing(
    scene: Scene, rule: Rule, message: str
) -> None:
    before = await scene.state()

    with pytest.raises(InvalidRequest) as refused:
        await scene.limits.set(ACTOR, scope_id=scene.ids["team"], rule=rule)

    assert refused.value.message == message
    assert refused.value.param == message.split("'")[1]
    assert await scene.state() == before


NOBODY = {
    "": "There is no organization, team or key with this id.",
    "adm_" + "0" * 32: "There is no organization, team or key with this id.",
    "org_" + "0" * 32: "There is no organization with this id.",
    "team_": "There is no team with this id.",
    "key_x\x00": "There is no key with this id.",
}


@pytest.mark.parametrize("scope_id", NOBODY)
async def test_nobody_has_no_limits(scene: Scene, scope_id: str) -> None:
    for refused in (
        scene.limits.set(ACTOR, scope_id=scope_id, rule=RATE),
        scene.limits.get(scope_id=scope_id, name=RATE.name),
        scene.limits.remove(ACTOR, scope_id=scope_id, name=RATE.name),
        scene.limits.page(PageRequest(), scope_id=scope_id),
    ):
        with pytest.raises(NotFound) as told:
            await refused
        assert told.value.message == NOBODY[scope_id]


async def test_only_a_model_of_the_catalogue_has_limits(scene: Scene) -> None:
    await scene.admin.catalog.create_alias(ACTOR, name="gpt/x", model=MODEL)
    before = await scene.state()

    for model in ("gpt/x", "", "x\x00", "\ud83d"):
        with pytest.raises(InvalidRequest, match="in the catalogue") as refused:
            await scene.limits.set(ACTOR, scope_id=scene.ids["team"], rule=RATE, model=model)
        assert refused.value.param == "model"
    assert await scene.state() == before


@pytest.mark.parametrize(
    ("name", "model", "message"),
    [
        ("requests/hour", None, "The team has no limit of this name for all models."),
        ("requests/minute", MODEL, "The team has no limit of this name for this model."),
        ("requests/minute", "", "The team has no limit of this name for this model."),
        ("requests/minute", "x\x00", "The team has no limit of this name for this model."),
        ("x\x00", None, "The team has no limit of this name for all models."),
        ("\ud83d", None, "The team has no limit of this name for all models."),
    ],
)
async def test_what_was_not_set_is_not_there(scene: Scene, name: str, model: str | None, message: str) -> None:
    await scene.limits.set(ACTOR, scope_id=scene.ids["team"], rule=RATE)
    before = await scene.state()

    for refused in (
        scene.limits.get(scope_id=scene.ids["team"], name=name, model=model),
        scene.limits.remove(ACTOR, scope_id=scene.ids["team"], name=name, model=model),
    ):
        with pytest.raises(NotFound) as told:
            await refused
        assert told.value.message == message
    assert await scene.state() == before


async def test_who_is_disabled_can_be_given_limits_and_a_revoked_key_only_loses_them(scene: Scene) -> None:
    for scope in IDS:
        await scene.limits.set(ACTOR, scope_id=scene.ids[scope], rule=RATE)
    tenants = scene.admin.tenants
    await tenants.change_organization(ACTOR, scene.ids["organization"], TenantChange(is_disabled=True))
    await scene.limits.set(ACTOR, scope_id=scene.ids["team"], rule=Concurrency(amount=1))
    await scene.admin.keys.revoke(ACTOR, scene.ids["key"])

    with pytest.raises(Conflict, match="revoked"):
        await scene.limits.set(ACTOR, scope_id=scene.ids["key"], rule=Concurrency(amount=1))
    await scene.limits.remove(ACTOR, scope_id=scene.ids["key"], name=RATE.name)


async def test_pages_are_in_order_without_gaps(scene: Scene) -> None:
    await scene.office.add_model("a:b:c")
    for scope_id, rule, model in itertools.product(scene.ids.values(), EVERY_RULE[:3], (None, MODEL, "a:b:c")):
        await scene.limits.set(ACTOR, scope_id=scope_id, rule=rule, model=model)

    async def walk(**of: Any) -> list[Limit]:
        seen: list[Limit] = []
        after: str | None = ""
        while after is not None:
            page = await scene.limits.page(PageRequest(4, after), **of)
            assert 1 <= len(page.data) <= 4
            seen.extend(page.data)
            after = page.next
        return seen

    everything = await walk()
    places = [(each.scope_id, each.name, each.model or "") for each in everything]
    assert len(places) == 27
    assert places == sorted(set(places))
    for scope, scope_id in scene.ids.items():
        mine = [each for each in everything if each.scope_id == scope_id]
        assert await walk(scope_id=scope_id) == mine
        assert await walk(scope=scope) == mine
    with pytest.raises(InvalidRequest) as refused:
        await scene.limits.page(PageRequest(), scope="team", scope_id=scene.ids["team"])
    assert refused.value.param == "scope"


@pytest.mark.parametrize("cursor", ["x", "org_1:a:", "team_" + "0" * 32, "team_" + "0" * 32 + ":a:\x00", "::"])
async def test_a_cursor_that_no_page_gave_is_refused(scene: Scene, cursor: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        await scene.limits.page(PageRequest(4, cursor))
    assert refused.value.param == "after"


async def test_of_several_writers_at_once_each_counts_and_one_is_last(scene: Scene) -> None:
    team = scene.ids["team"]
    num_before = len(await scene.office.audit())

    await asyncio.gather(
        *(scene.limits.set(ACTOR, scope_id=team, rule=RequestRate(amount=n, period="minute")) for n in range(6)),
        *(scene.limits.set(ACTOR, scope_id=team, rule=Concurrency(amount=7)) for _ in range(4)),
    )

    changes = [entry.draft for entry in (await scene.office.audit())[num_before:]]
    of_rate = [each for each in changes if each.object_id.startswith("requests/minute")]
    assert len(of_rate) == 6
    assert len(changes) == 7  # one of four equal ones
    assert of_rate[0].before == ""
    for earlier, later in itertools.pairwise(of_rate):
        assert later.before == earlier.after
    (left,) = [each for each in (await scene.limits.page(PageRequest())).data if isinstance(each.rule, RequestRate)]
    assert said(of_rate[-1].after)["rule"]["amount"] == left.rule.amount  # type: ignore[union-attr]
