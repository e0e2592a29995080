"""Quotas as administrators see them, on real databases: what the ledger has, in the organization's own periods."""

from __future__ import annotations

import asyncio
from datetime import datetime

import msgspec
import pytest
from admin_kit import ACTOR, MODEL, NOW_S, Office, ledger_row, said

from gateway.domain.ids import OrganizationId
from gateway.domain.ledger import Charge
from gateway.domain.limits.meters import MOST_QUOTA
from gateway.domain.limits.policy import Concurrency, Limit, QuotaRule, meter_key
from gateway.errors import InvalidRequest, NotFound
from gateway.services.admin_keys import KeyTerms
from gateway.services.admin_pages import PageRequest
from gateway.services.admin_quotas import QuotaStatus
from gateway.services.stores import Storage
from gateway.services.tenants import OrganizationChange

NOW_MS = int(NOW_S * 1000)  # 2027-01-15T08:00:00.250Z, a Friday
DAY_MS = 86_400_000
MONTHLY = QuotaRule(unit="tokens", period="month", amount=1000)
NAME = "quota-tokens/month"
REASON = "quarterly reports"


def _ms(text: str) -> int:
    return int(datetime.fromisoformat(text).timestamp() * 1000)


class Scene:
    """An organization in Kolkata with a team with a key, and a model."""

    def __init__(self, office: Office, storage: Storage) -> None:
        self.office = office
        self.storage = storage
        self.admin = office.admin
        self.num_rows = 0

    async def make(self) -> None:
        await self.office.add_model()
        tenants = self.admin.tenants
        organization = await tenants.create_organization(ACTOR, name="acme", time_zone="Asia/Kolkata")
        team = await tenants.create_team(ACTOR, organization_id=organization.id, name="red")
        key = (await self.admin.keys.create(ACTOR, team_id=team.id, terms=KeyTerms(name="k"))).key
        self.organization, self.team, self.key = organization.id, team.id, key.id

    async def set(self, rule: QuotaRule | Concurrency, scope_id: str = "", model: str | None = None) -> Limit:
        scope_id = scope_id or self.team
        return await self.admin.limits.set(ACTOR, scope_id=scope_id, rule=rule, model=model)

    async def charge(self, limit: Limit, period_id: str, units: int) -> None:
        self.num_rows += 1
        row = ledger_row(self.num_rows, team_id=self.team, key_id=self.key, closed_at_ms=NOW_MS)
        charges = (Charge(meter_key(limit, period_id), NOW_MS + DAY_MS, units),)
        of = OrganizationId(self.organization)
        async with self.storage.writing() as work:
            await work.ledger.post([msgspec.structs.replace(row, organization_id=of, charges=charges)])

    async def only(self) -> QuotaStatus:
        (status,) = await self.admin.quotas.status(self.team)
        return status

    async def state(self) -> tuple[object, ...]:
        return await self.office.audit(), await self.office.version(), self.office.feed.num_announced


@pytest.fixture
async def scene(storage: Storage) -> Scene:
    made = Scene(Office(storage), storage)
    await made.make()
    return made


async def test_a_status_is_what_the_ledger_has_for_the_present_period(scene: Scene, storage: Storage) -> None:
    limit = await scene.set(MONTHLY)
    for period_id, units in (("2027-01", 300), ("2027-01", 499), ("2026-12", 10_000), ("2027-02", 77)):
        await scene.charge(limit, period_id, units)

    status = await scene.only()
    assert (status.limit, status.rule) == (limit, MONTHLY)
    assert (status.committed, status.topped_up, status.total, status.percent) == (799, 0, 1000, 79)
    assert status.period.id == "2027-01"
    assert status.period.start_ms == _ms("2027-01-01T00:00:00+05:30")
    assert status.period.end_ms == _ms("2027-02-01T00:00:00+05:30")

    async with storage.writing() as work:
        assert await work.ledger.roll_up(2) == 2
    assert await scene.only() == status

    scene.office.clock.now = _ms("2027-02-01T00:00:00+05:30") / 1000
    later = await scene.only()
    assert (later.period.id, later.committed) == ("2027-02", 77)


async def test_a_changed_amount_keeps_what_was_used(scene: Scene) -> None:
    await scene.charge(await scene.set(MONTHLY), "2027-01", 600)
    await scene.set(msgspec.structs.replace(MONTHLY, amount=500, is_hard=False))
    assert (await scene.only()).percent == 120

    await scene.admin.limits.remove(ACTOR, scope_id=scene.team, name=NAME)
    assert await scene.admin.quotas.status(scene.team) == []
    await scene.set(msgspec.structs.replace(MONTHLY, amount=1200))
    assert ((await scene.only()).percent, (await scene.only()).committed) == (50, 600)


async def test_of_a_key_there_are_its_own_and_those_of_what_it_belongs_to(scene: Scene) -> None:
    dollars = QuotaRule(unit="microusd", period="day", amount=5_000_000)
    for scope_id in (scene.key, scene.organization, scene.team):
        await scene.set(MONTHLY, scope_id)
        await scene.set(dollars, scope_id, MODEL)
        await scene.set(Concurrency(amount=3), scope_id)

    async def told(scope_id: str) -> list[tuple[str, str, str | None]]:
        quotas = await scene.admin.quotas.status(scope_id)
        return [(each.limit.scope_id, each.limit.name, each.limit.model) for each in quotas]

    of_organization, of_team, of_key = (
        [(scope_id, "quota-microusd/day", MODEL), (scope_id, NAME, None)]
        for scope_id in (scene.organization, scene.team, scene.key)
    )
    assert await told(scene.organization) == of_organization
    assert await told(scene.team) == of_organization + of_team
    assert await told(scene.key) == of_organization + of_team + of_key


async def test_of_nothing_all_is_used(scene: Scene) -> None:
    await scene.set(msgspec.structs.replace(MONTHLY, amount=0))
    assert (await scene.only()).percent == 100

    await scene.admin.quotas.top_up(ACTOR, scope_id=scene.team, name=NAME, amount=10, reason=REASON)
    assert (await scene.only()).percent == 0


async def test_alerts_reached_are_those_of_the_period(scene: Scene, storage: Storage) -> None:
    limit = await scene.set(MONTHLY)
    organization_id = OrganizationId(scene.organization)
    async with storage.writing() as work:
        for period_id, percent in (("2027-01", 100), ("2027-01", 80), ("2026-12", 90)):
            key = meter_key(limit, period_id)
            await work.limits.alert(key, percent, organization_id=organization_id, at_ms=NOW_MS - percent)

    assert [(each.percent, each.at_ms) for each in (await scene.only()).alerts] == [
        (80, NOW_MS - 80),
        (100, NOW_MS - 100),
    ]


async def test_another_time_zone_has_other_periods(scene: Scene) -> None:
    await scene.set(QuotaRule(unit="tokens", period="day", amount=5))
    scene.office.clock.now = _ms("2027-01-15T20:00:00+00:00") / 1000
    assert (await scene.only()).period.id == "2027-01-16"

    wanted = OrganizationChange(time_zone="America/New_York")
    await scene.admin.tenants.change_organization(ACTOR, scene.organization, wanted)

    status = await scene.only()
    assert (status.period.id, status.period.end_ms) == ("2027-01-15", _ms("2027-01-16T00:00:00-05:00"))


async def test_a_top_up_is_of_one_period_of_one_quota(scene: Scene) -> None:
    await scene.set(MONTHLY)
    await scene.set(MONTHLY, model=MODEL)
    await scene.set(MONTHLY, scene.key)
    top_up = scene.admin.quotas.top_up
    num_before = len(await scene.office.audit())

    first = await top_up(ACTOR, scope_id=scene.team, name=NAME, amount=500, reason=REASON)
    scene.office.clock.now += 1
    second = await top_up(ACTOR, scope_id=scene.team, name=NAME, amount=7, reason=REASON, period_id="2027-01")
    scene.office.clock.now += 1
    third = await top_up(
        ACTOR, scope_id=scene.team, name=NAME, amount=9, reason=REASON, period_id="2027-02", model=MODEL
    )

    assert (first.period_id, first.scope, first.amount, first.reason) == ("2027-01", "team", 500, REASON)
    told = {(each.limit.scope_id, each.limit.model): each for each in await scene.admin.quotas.status(scene.key)}
    assert {place: each.topped_up for place, each in told.items()} == {
        (scene.team, None): 507,
        (scene.team, MODEL): 0,
        (scene.key, None): 0,
    }
    assert told[scene.team, None].total == 1507
    page = await scene.admin.quotas.top_ups(PageRequest(2), scene.team)
    assert list(page.data) == [first, second]
    assert page.next is not None
    assert list((await scene.admin.quotas.top_ups(PageRequest(2, page.next), scene.team)).data) == [third]
    assert (await scene.admin.quotas.top_ups(PageRequest(), scene.key)).data == []
    entries = [entry.draft for entry in (await scene.office.audit())[num_before:]]
    assert [(each.action, each.object_id, each.before) for each in entries] == [
        ("quota.top_up", each.id, "") for each in (first, second, third)
    ]
    assert said(entries[0].after)["reason"] == REASON

    scene.office.clock.now = _ms("2027-02-01T00:00:00+05:30") / 1000
    told = {(each.limit.scope_id, each.limit.model): each for each in await scene.admin.quotas.status(scene.team)}
    assert {place: each.topped_up for place, each in told.items()} == {(scene.team, None): 0, (scene.team, MODEL): 9}


@pytest.mark.parametrize(
    ("period", "now", "period_id", "message"),
    [
        ("month", "2027-01-31T18:30:00+00:00", "2027-01", "'period_id' must not be over: 2027-01 is."),
        ("day", "2027-01-15T18:30:00+00:00", "2027-01-15", "'period_id' must not be over: 2027-01-15 is."),
        ("week", "2027-01-17T18:30:00+00:00", "2027-W02", "'period_id' must not be over: 2027-W02 is."),
        ("month", "2027-01-15T00:00:00+00:00", "2028-03", "'period_id' must not begin more than a year from now."),
        (
            "month",
            "2027-01-15T00:00:00+00:00",
            "2027-01-15",
            "'period_id' must be a month of this quota: a month is named like 2026-11.",
        ),
        (
            "day",
            "2027-01-15T00:00:00+00:00",
            "tomorrow",
            "'period_id' must be a day of this quota: a day is named like 2026-11-30.",
        ),
        (
            "week",
            "2027-01-15T00:00:00+00:00",
            "2027-W2",
            "'period_id' must be a week of this quota: a week is named like 2026-W49.",
        ),
    ],
)
async def test_a_period_that_is_over_or_none_is_refused(
    scene: Scene, period: str, now: str, period_id: str, message: str
) -> None:
    limit = await scene.set(
        msgspec.convert({"type": "quota", "unit": "tokens", "period": period, "amount": 5}, QuotaRule)
    )
    scene.office.clock.now = _ms(now) / 1000
    before = await scene.state()

    async def top_up() -> None:
        await scene.admin.quotas.top_up(
            ACTOR, scope_id=scene.team, name=limit.name, amount=1, reason=REASON, period_id=period_id
        )

    with pytest.raises(InvalidRequest) as refused:
        await top_up()
    assert (refused.value.message, refused.value.param) == (message, "period_id")
    assert await scene.state() == before

    if "over" in message:  # a millisecond before it was not
        scene.office.clock.now -= 0.001
        await top_up()


@pytest.mark.parametrize(
    ("amount", "reason", "param"),
    [
        (0, REASON, "amount"),
        (-5, REASON, "amount"),
        (MOST_QUOTA + 1, REASON, "amount"),
        (1, "", "reason"),
        (1, " x", "reason"),
        (1, "x" * 201, "reason"),
        (1, "a\nb", "reason"),
        (1, "eh_TestTestTest_0123456789abcdefghijklmnopqrstuvwxyzABCDEFG4UO6VT", "reason"),
    ],
)
async def test_a_top_up_without_an_amount_or_a_reason_is_refused(
    scene: Scene, amount: int, reason: str, param: str
) -> None:
    await scene.set(MONTHLY)
    before = await scene.state()

    with pytest.raises(InvalidRequest) as refused:
        await scene.admin.quotas.top_up(ACTOR, scope_id=scene.team, name=NAME, amount=amount, reason=reason)

    assert refused.value.param == param
    assert refused.value.message.startswith(f"'{param}' must ")
    assert await scene.state() == before


@pytest.mark.parametrize(
    ("name", "model", "message"),
    [
        ("quota-tokens/day", None, "The team has no limit of this name for all models."),
        (NAME, MODEL, "The team has no limit of this name for this model."),
        ("concurrent", None, "The limit of this name is no quota."),
    ],
)
async def test_only_a_quota_that_exists_can_be_topped_up(
    scene: Scene, name: str, model: str | None, message: str
) -> None:
    await scene.set(MONTHLY)
    await scene.set(Concurrency(amount=3))
    before = await scene.state()

    with pytest.raises(NotFound) as told:
        await scene.admin.quotas.top_up(ACTOR, scope_id=scene.team, name=name, amount=1, reason=REASON, model=model)

    assert told.value.message == message
    assert await scene.state() == before


async def test_no_quota_becomes_more_than_can_be_counted(scene: Scene) -> None:
    await scene.set(msgspec.structs.replace(MONTHLY, amount=MOST_QUOTA - 10))
    top_up = scene.admin.quotas.top_up
    await top_up(ACTOR, scope_id=scene.team, name=NAME, amount=4, reason=REASON)
    await top_up(ACTOR, scope_id=scene.team, name=NAME, amount=10, reason=REASON, period_id="2027-02")

    with pytest.raises(InvalidRequest, match="'amount' must be at most 6: "):
        await top_up(ACTOR, scope_id=scene.team, name=NAME, amount=7, reason=REASON)
    await top_up(ACTOR, scope_id=scene.team, name=NAME, amount=6, reason=REASON)
    with pytest.raises(InvalidRequest, match=f"'rule.amount' must be at most {MOST_QUOTA - 10}: "):
        await scene.set(msgspec.structs.replace(MONTHLY, amount=MOST_QUOTA - 9))
    assert (await scene.only()).total == MOST_QUOTA


async def test_top_ups_at_once_all_count_and_together_not_too_much(scene: Scene) -> None:
    await scene.set(msgspec.structs.replace(MONTHLY, amount=MOST_QUOTA - 30))

    done = await asyncio.gather(
        *(scene.admin.quotas.top_up(ACTOR, scope_id=scene.team, name=NAME, amount=10, reason=REASON) for _ in range(5)),
        return_exceptions=True,
    )

    assert sum(isinstance(each, InvalidRequest) for each in done) == 2
    assert (await scene.only()).total == MOST_QUOTA


@pytest.mark.parametrize("scope_id", ["", "x", "org_" + "0" * 32, "team_\x00", "key_" + "0" * 32])
async def test_nobody_has_no_quotas(scene: Scene, scope_id: str) -> None:
    for refused in (
        scene.admin.quotas.status(scope_id),
        scene.admin.quotas.top_ups(PageRequest(), scope_id),
        scene.admin.quotas.top_up(ACTOR, scope_id=scope_id, name=NAME, amount=1, reason=REASON),
    ):
        with pytest.raises(NotFound):
            await refused
