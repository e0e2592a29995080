"""What administrators change, on real databases: each change once, with one audit entry, or not at all."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from admin_kit import ACTOR, MODEL, NOW_S, Office, said
from identity_kit import PEPPERS

from gateway.domain.credential import API_KEY, parse
from gateway.domain.limits.policy import Concurrency, QuotaRule
from gateway.domain.tenancy import Organization, Team
from gateway.errors import Conflict, InvalidRequest, NotFound
from gateway.services.admin_catalog import AliasChange
from gateway.services.admin_keys import KeyChange, KeyTerms
from gateway.services.admin_pages import PageRequest
from gateway.services.audit import Actor
from gateway.services.demo import first_start
from gateway.services.stores import Storage
from gateway.services.tenants import OrganizationChange, TenantChange

NOW_MS = int(NOW_S * 1000)
QUOTA = QuotaRule(unit="tokens", period="week", amount=1000)


@pytest.fixture
def office(storage: Storage) -> Office:
    return Office(storage)


async def _tenants(office: Office) -> tuple[Organization, Team]:
    organization = await office.admin.tenants.create_organization(ACTOR, name="acme", weight=2)
    team = await office.admin.tenants.create_team(ACTOR, organization_id=organization.id, name="red", weight=3)
    return organization, team


class Scene:
    """Everything there can be, once."""

    def __init__(self, office: Office) -> None:
        self.office = office
        self.admin = office.admin

    async def make(self) -> None:
        await self.office.add_model()
        self.organization, self.team = await _tenants(self.office)
        self.key = (await self.admin.keys.create(ACTOR, team_id=self.team.id, terms=KeyTerms(name="k"))).key
        self.token = (await self.admin.tokens.create(ACTOR, name="t", role="viewer")).token
        await self.admin.catalog.create_alias(ACTOR, name="gpt/x", model=MODEL)
        await self.admin.limits.set(ACTOR, scope_id=self.team.id, rule=QUOTA, is_shadow=True)


Step = Callable[[Scene], Awaitable[Any]]

CHANGES: dict[str, tuple[Step, dict[str, Any], dict[str, Any]]] = {
    "organization.create": (
        lambda s: s.admin.tenants.create_organization(ACTOR, name="new", weight=7),
        {},
        {"name": "new", "weight": 7, "created_at_ms": NOW_MS, "disabled_at_ms": None},
    ),
    "organization.change": (
        lambda s: s.admin.tenants.change_organization(
            ACTOR, s.organization.id, OrganizationChange(name="b", weight=5, time_zone="Asia/Kolkata")
        ),
        {"name": "acme", "weight": 2, "time_zone": "UTC"},
        {"name": "b", "weight": 5, "time_zone": "Asia/Kolkata"},
    ),
    "organization.disable": (
        lambda s: s.admin.tenants.change_organization(ACTOR, s.organization.id, TenantChange(is_disabled=True)),
        {"disabled_at_ms": None},
        {"disabled_at_ms": NOW_MS},
    ),
    "team.create": (
        lambda s: s.admin.tenants.create_team(ACTOR, organization_id=s.organization.id, name="blue"),
        {},
        {"name": "blue", "weight": 1, "disabled_at_ms": None},
    ),
    "team.change": (
        lambda s: s.admin.tenants.change_team(ACTOR, s.team.id, TenantChange(weight=9)),
        {"weight": 3},
        {"weight": 9},
    ),
    "team.disable": (
        lambda s: s.admin.tenants.change_team(ACTOR, s.team.id, TenantChange(is_disabled=True)),
        {"disabled_at_ms": None},
        {"disabled_at_ms": NOW_MS},
    ),
    "key.create": (
        lambda s: s.admin.keys.create(ACTOR, team_id=s.team.id, terms=KeyTerms(name="n", models=["a", "a", "b/c"])),
        {},
        {"name": "n", "models": ["a", "b/c"], "endpoints": None, "default_class": "interactive"},
    ),
    "key.change": (
        lambda s: s.admin.keys.change(
            ACTOR,
            s.key.id,
            KeyChange(endpoints=["completions"], max_queue_depth=4, networks=["192.0.2.1"], expires_at_ms=NOW_MS + 1),
        ),
        {"endpoints": None, "max_queue_depth": None, "networks": None, "expires_at_ms": None},
        {
            "endpoints": ["completions"],
            "max_queue_depth": 4,
            "networks": ["192.0.2.1/32"],
            "expires_at_ms": NOW_MS + 1,
        },
    ),
    "key.revoke": (
        lambda s: s.admin.keys.revoke(ACTOR, s.key.id),
        {"revoked_at_ms": None},
        {"revoked_at_ms": NOW_MS},
    ),
    "admin_token.create": (
        lambda s: s.admin.tokens.create(ACTOR, name="n", role="admin"),
        {},
        {"name": "n", "role": "admin", "expires_at_ms": None},
    ),
    "admin_token.revoke": (
        lambda s: s.admin.tokens.revoke(ACTOR, s.token.id),
        {"revoked_at_ms": None},
        {"revoked_at_ms": NOW_MS},
    ),
    "model.disable": (
        lambda s: s.admin.catalog.set_model_disabled(ACTOR, MODEL, is_disabled=True),
        {"disabled_at_ms": None},
        {"disabled_at_ms": NOW_MS},
    ),
    "alias.create": (
        lambda s: s.admin.catalog.create_alias(ACTOR, name="y", model=MODEL, system_default="Be\nbrief."),
        {},
        {"name": "y", "model": MODEL, "system_default": "Be\nbrief."},
    ),
    "alias.change": (
        lambda s: s.admin.catalog.change_alias(ACTOR, "gpt/x", AliasChange(request_class="batch")),
        {"request_class": None},
        {"request_class": "batch"},
    ),
    "limit.set": (
        lambda s: s.admin.limits.set(ACTOR, scope_id=s.team.id, rule=Concurrency(amount=4)),
        {},
        {"scope": "team", "model": None, "rule": {"type": "concurrent", "amount": 4}, "is_shadow": False},
    ),
    "limit.remove": (
        lambda s: s.admin.limits.remove(ACTOR, scope_id=s.team.id, name=QUOTA.name),
        {"scope": "team", "model": None, "is_shadow": True},
        {},
    ),
    "quota.top_up": (
        lambda s: s.admin.quotas.top_up(ACTOR, scope_id=s.team.id, name=QUOTA.name, amount=5, reason="r"),
        {},
        {"name": "quota-tokens/week", "period_id": "2027-W02", "amount": 5, "reason": "r"},
    ),
    "price.add": (
        lambda s: s.admin.prices.add(ACTOR, model=MODEL, prompt=2, completion=3),
        {},
        {"model": MODEL, "prompt": 2, "cached": 2, "completion": 3, "valid_from_ms": NOW_MS},
    ),
    "alias.remove": (lambda s: s.admin.catalog.remove_alias(ACTOR, "gpt/x"), {"name": "gpt/x", "model": MODEL}, {}),
}


@pytest.mark.parametrize("action", CHANGES)
async def test_a_change_is_one_audit_entry_one_version_and_one_announcement(office: Office, action: str) -> None:
    scene = Scene(office)
    await scene.make()
    num_entries, version, num_announced = len(await office.audit()), await office.version(), office.feed.num_announced
    change, before, after = CHANGES[action]

    await change(scene)

    (entry,) = (await office.audit())[num_entries:]
    draft = entry.draft
    assert draft.action == action
    assert Actor(draft.actor, draft.source, draft.request_id) == ACTOR
    assert draft.at_ms == NOW_MS
    assert draft.object_id
    for text, expected in ((draft.before, before), (draft.after, after)):
        assert bool(text) == bool(expected)
        if text:
            told = json.loads(text)
            assert {name: told[name] for name in expected} == expected
    assert await office.version() == version + 1
    assert office.feed.num_announced == num_announced + 1


@pytest.mark.parametrize(
    "action", ["organization.change", "organization.disable", "team.disable", "key.revoke", "admin_token.revoke",
               "key.change", "model.disable", "alias.change", "limit.set", "price.add"]
)  # fmt: skip
async def test_what_is_so_already_writes_nothing(office: Office, action: str) -> None:
    scene = Scene(office)
    await scene.make()
    change, _, _ = CHANGES[action]
    first = await change(scene)
    before = (await office.audit(), await office.version(), office.feed.num_announced)
    office.clock.now += 60

    if action == "key.change":
        change = lambda s: s.admin.keys.change(ACTOR, s.key.id, KeyChange(max_queue_depth=4))  # noqa: E731

    assert await change(scene) == first
    assert (await office.audit(), await office.version(), office.feed.num_announced) == before


async def test_what_was_disabled_can_be_enabled(office: Office) -> None:
    organization, team = await _tenants(office)
    tenants = office.admin.tenants
    for is_disabled in (True, False):
        await tenants.change_organization(ACTOR, organization.id, TenantChange(is_disabled=is_disabled))
        await tenants.change_team(ACTOR, team.id, TenantChange(is_disabled=is_disabled))

    assert await tenants.organization(organization.id) == organization
    assert await tenants.team(team.id) == team
    actions = [entry.draft.action for entry in await office.audit()]
    assert actions[2:] == ["organization.disable", "team.disable", "organization.enable", "team.enable"]


async def test_a_refused_change_leaves_nothing(office: Office) -> None:
    scene = Scene(office)
    await scene.make()
    before = (await office.audit(), await office.version(), office.feed.num_announced)
    admin, tenants = office.admin, office.admin.tenants

    for error, refused in (
        (Conflict, tenants.create_organization(ACTOR, name="acme")),
        (Conflict, tenants.create_team(ACTOR, organization_id=scene.organization.id, name="red")),
        (InvalidRequest, tenants.create_organization(ACTOR, name="x", weight=0)),
        (InvalidRequest, tenants.change_team(ACTOR, scene.team.id, TenantChange(name=" x"))),
        (NotFound, tenants.change_team(ACTOR, "team_" + "0" * 32, TenantChange(name="x"))),
        (NotFound, admin.keys.revoke(ACTOR, scene.team.id)),
        (InvalidRequest, admin.keys.change(ACTOR, scene.key.id, KeyChange(expires_at_ms=NOW_MS))),
        (InvalidRequest, admin.catalog.create_alias(ACTOR, name="z", model="gpt/x")),
        (Conflict, admin.catalog.create_alias(ACTOR, name="gpt/x", model=MODEL)),
        (Conflict, admin.catalog.create_alias(ACTOR, name=MODEL, model=MODEL)),
        (NotFound, admin.catalog.set_model_disabled(ACTOR, "gpt/x", is_disabled=True)),
        (NotFound, admin.catalog.remove_alias(ACTOR, "none")),
        (InvalidRequest, tenants.create_organization(ACTOR, name="x", time_zone="Mars/Olympus")),
        (InvalidRequest, tenants.change_organization(ACTOR, scene.organization.id, OrganizationChange(time_zone=""))),
        (InvalidRequest, admin.keys.create(ACTOR, team_id=scene.team.id, terms=KeyTerms(name="n", networks=[]))),
        (InvalidRequest, admin.keys.change(ACTOR, scene.key.id, KeyChange(networks=["10.0.0.1/8"]))),
    ):
        with pytest.raises(error):
            await refused

    assert (await office.audit(), await office.version(), office.feed.num_announced) == before


async def test_who_is_disabled_gets_no_new_keys_or_teams_and_a_revoked_key_stays_as_it_is(office: Office) -> None:
    organization, team = await _tenants(office)
    key = (await office.admin.keys.create(ACTOR, team_id=team.id, terms=KeyTerms(name="k"))).key
    tenants = office.admin.tenants
    await office.admin.keys.revoke(ACTOR, key.id)

    with pytest.raises(Conflict, match="revoked"):
        await office.admin.keys.change(ACTOR, key.id, KeyChange(name="other"))
    await tenants.change_organization(ACTOR, organization.id, TenantChange(is_disabled=True))
    with pytest.raises(Conflict, match="organization is disabled"):
        await office.admin.keys.create(ACTOR, team_id=team.id, terms=KeyTerms(name="k"))
    with pytest.raises(Conflict, match="organization is disabled"):
        await tenants.create_team(ACTOR, organization_id=organization.id, name="blue")
    await tenants.change_organization(ACTOR, organization.id, TenantChange(is_disabled=False))
    await tenants.change_team(ACTOR, team.id, TenantChange(is_disabled=True))
    with pytest.raises(Conflict, match="team is disabled"):
        await office.admin.keys.create(ACTOR, team_id=team.id, terms=KeyTerms(name="k"))


async def test_two_changes_of_one_object_at_once_both_count(office: Office) -> None:
    organization, _ = await _tenants(office)
    change = office.admin.tenants.change_organization

    await asyncio.gather(
        *(change(ACTOR, organization.id, TenantChange(name=f"acme {n}")) for n in range(4)),
        *(change(ACTOR, organization.id, TenantChange(weight=10 + n)) for n in range(4)),
    )

    changes = [entry.draft for entry in (await office.audit())[2:]]
    assert len(changes) == 8
    for earlier, later in itertools.pairwise(changes):
        assert later.before == earlier.after
    assert said(changes[-1].after)["name"].startswith("acme ")
    assert said(changes[-1].after)["weight"] >= 10


async def test_a_new_key_can_be_found_by_its_public_id_and_matches(office: Office, storage: Storage) -> None:
    _, team = await _tenants(office)
    issued = await office.admin.keys.create(ACTOR, team_id=team.id, terms=KeyTerms(name="k"))

    public_id = parse(issued.raw, API_KEY)
    assert public_id is not None
    async with storage.reading() as work:
        holder = await work.keys.holder(public_id)
    assert holder is not None
    assert holder.key == issued.key
    assert PEPPERS.matches(issued.raw, holder.key.secret)
    assert issued.raw not in repr(issued)


async def test_the_demo_is_made_once_by_many_at_once(office: Office, storage: Storage) -> None:
    many = await asyncio.gather(*(first_start(storage, office.feed, PEPPERS, office.clock) for _ in range(5)))

    (keys,) = [made for made in many if made is not None]
    assert [key.team for key in keys] == ["alpha", "beta"]
    assert len({key.raw for key in keys}) == 2
    teams = (await office.admin.tenants.teams(PageRequest())).data
    assert [(each.name, each.weight) for each in teams] == [("alpha", 3), ("beta", 1)]
    organizations = await office.admin.tenants.organizations(PageRequest())
    assert [each.name for each in organizations.data] == ["demo"]
    assert len(await office.audit()) == 5
    assert {entry.draft.actor for entry in await office.audit()} == {"system"}
    assert await first_start(storage, office.feed, PEPPERS, office.clock) is None


async def test_there_is_no_demo_where_there_is_an_organization(office: Office, storage: Storage) -> None:
    await office.admin.tenants.create_organization(ACTOR, name="acme")

    assert await first_start(storage, office.feed, PEPPERS, office.clock) is None


async def test_pages_are_in_order_without_gaps(office: Office) -> None:
    tenants = office.admin.tenants
    made = []
    for n in range(5):
        office.clock.now += 1
        made.append(await tenants.create_organization(ACTOR, name=f"o{n}"))

    seen: list[Organization] = []
    after: str | None = ""
    sizes = []
    while after is not None:
        page = await tenants.organizations(PageRequest(2, after))
        seen.extend(page.data)
        sizes.append(len(page.data))
        after = page.next
    assert seen == made
    assert sizes == [2, 2, 1]
    assert (await tenants.organizations(PageRequest(5, ""))).next is None
