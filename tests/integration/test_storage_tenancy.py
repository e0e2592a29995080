"""Organizations, teams, keys, tokens and the catalogue, the same on SQLite and PostgreSQL."""

from __future__ import annotations

import asyncio

import msgspec
import pytest
from sqlalchemy.exc import StatementError
from storage_kit import (
    NOW_MS,
    admin_token,
    charge,
    draft,
    key,
    ledger_row,
    limit,
    model,
    organization,
    price,
    secret,
    team,
    top_up,
    with_team,
)

from gateway.domain.catalog import Alias
from gateway.domain.ids import OrganizationId, TeamId
from gateway.domain.tenancy import KeyHolder, RollEntry
from gateway.errors import Conflict
from gateway.storage.database import Database

HOSTILE = [
    "'; DROP TABLE keys; --",
    'a"b`c[d]e',
    "%s :name $1 ? {x} \\",
    "é世界🙂\N{RIGHT-TO-LEFT OVERRIDE}",
    "line\nbreak\ttab",
    "null",
    "x" * 100_000,
]


async def test_an_organization_comes_back_as_it_was_kept(storage: Database) -> None:
    kept = organization(weight=7, time_zone="America/Argentina/Buenos_Aires", disabled_at_ms=NOW_MS + 1)
    async with storage.writing() as work:
        await work.organizations.add(kept)

    async with storage.reading() as work:
        assert await work.organizations.get(kept.id) == kept
        assert await work.organizations.by_name(kept.name) == kept
        assert await work.organizations.get(OrganizationId("org_none")) is None
        assert await work.organizations.by_name("none") is None


async def test_an_organization_is_replaced_as_a_whole(storage: Database) -> None:
    changed = organization(name="renamed", weight=2, time_zone="Europe/Berlin", disabled_at_ms=5)
    async with storage.writing() as work:
        await work.organizations.add(organization(1))
        await work.organizations.add(organization(2))
        await work.organizations.replace(changed)

    async with storage.reading() as work:
        assert await work.organizations.page(after="", limit=9) == [changed, organization(2)]


async def test_a_taken_name_is_a_conflict_and_the_transaction_goes_on(storage: Database) -> None:
    async with storage.writing() as work:
        await work.organizations.add(organization(1))
        with pytest.raises(Conflict, match="an organization named 'organization 1' already"):
            await work.organizations.add(organization(2, name="organization 1"))
        await work.organizations.add(organization(3))
        with pytest.raises(Conflict):
            await work.organizations.replace(organization(3, name="organization 1"))
        await work.teams.add(team(1))
        with pytest.raises(Conflict, match="a team named 'team 1' already"):
            await work.teams.add(team(2, name="team 1"))
        await work.teams.add(team(3, organization_id=OrganizationId("org_0003"), name="team 1"))

    async with storage.reading() as work:
        assert [each.id for each in await work.organizations.page(after="", limit=9)] == ["org_0001", "org_0003"]
        assert [each.id for each in await work.teams.page(after="", limit=9)] == ["team_0001", "team_0003"]


async def test_pages_are_in_order_of_id_without_gaps(storage: Database) -> None:
    async with storage.writing() as work:
        for n in (2, 1):
            await work.organizations.add(organization(n))
        for n in (5, 3, 1, 4, 2):
            await work.teams.add(team(n, organization_id=OrganizationId(f"org_{1 + n % 2:04}")))
        for n in (4, 2, 3, 1):
            await work.keys.add(key(n, team_id=TeamId(f"team_{1 + n % 2:04}")))
            await work.admin_tokens.add(admin_token(n))

    async with storage.reading() as work:
        pages = [await work.teams.page(after=after, limit=2) for after in ("", "team_0002", "team_0004", "team_0005")]
        assert [[each.id[-1] for each in page] for page in pages] == [["1", "2"], ["3", "4"], ["5"], []]
        odd = await work.teams.page(after="team_0001", limit=9, organization_id=OrganizationId("org_0002"))
        assert [each.id[-1] for each in odd] == ["3", "5"]
        assert [each.id[-1] for each in await work.keys.page(after="key_0001", limit=2)] == ["2", "3"]
        assert [each.id[-1] for each in await work.keys.page(after="", limit=9, team_id=TeamId("team_0001"))] == [
            "2",
            "4",
        ]
        assert [each.id[-1] for each in await work.admin_tokens.page(after="adm_0002", limit=9)] == ["3", "4"]


async def test_ids_and_names_are_compared_byte_by_byte(storage: Database) -> None:
    names = ["B", "a", "a-b", "a_b", "ab", "é"]
    async with storage.writing() as work:
        for name in reversed(names):
            assert await work.catalog.enter_model(model(name))

    async with storage.reading() as work:
        assert [each.name for each in await work.catalog.models()] == sorted(names)
        assert await work.organizations.by_name("A") is None


async def test_a_key_comes_back_with_those_it_belongs_to(storage: Database) -> None:
    await with_team(storage)
    bare = key(1)
    full = key(
        2,
        default_class="batch",
        models=("m1", "gpt-5"),
        endpoints=("chat",),
        max_queue_depth=3,
        deadline_ms=4_000_000_000,
        networks=("10.0.0.0/8", "2001:db8::/32"),
        expires_at_ms=NOW_MS + 1,
        revoked_at_ms=NOW_MS + 2,
    )
    nothing = key(3, models=(), endpoints=(), networks=())
    async with storage.writing() as work:
        for each in (bare, full, nothing):
            await work.keys.add(each)

    async with storage.reading() as work:
        for each in (bare, full, nothing):
            assert await work.keys.get(each.id) == each
            assert await work.keys.holder(each.secret.public_id) == KeyHolder(each, team(), organization())
        assert await work.keys.holder("nobody") is None


async def test_a_key_and_a_token_are_replaced_as_a_whole(storage: Database) -> None:
    await with_team(storage)
    changed_key = key(name="other", secret=secret(9), models=("m",), networks=("::1/128",), revoked_at_ms=1)
    changed_token = admin_token(name="other", role="viewer", revoked_at_ms=1)
    async with storage.writing() as work:
        await work.keys.add(key())
        await work.admin_tokens.add(admin_token())
        await work.keys.replace(changed_key)
        await work.admin_tokens.replace(changed_token)

    async with storage.reading() as work:
        assert await work.keys.get(changed_key.id) == changed_key
        assert await work.admin_tokens.get(changed_token.id) == changed_token
        assert await work.admin_tokens.by_public_id(changed_token.secret.public_id) == changed_token
        assert await work.admin_tokens.by_public_id("nobody") is None


async def test_the_roll_has_every_team_with_its_organization_as_they_are_now(storage: Database) -> None:
    async with storage.writing() as work:
        for number in (1, 2):
            await work.organizations.add(organization(number, weight=number))
        await work.organizations.add(organization(3))  # without teams
        for number in range(1201):
            await work.teams.add(team(number, organization_id=organization(1 + number % 2).id, weight=1 + number))
        await work.teams.replace(team(7, organization_id=organization(2).id, name="renamed", weight=99))

    async with storage.reading() as work:
        roll = {entry.team_id: entry for entry in await work.teams.roll()}
    assert len(roll) == 1201
    assert roll[team(7).id] == RollEntry(team(7).id, "renamed", 99, organization(2).id, organization(2).name, 2)
    assert roll[team(1200).id].team_weight == 1201
    assert roll[team(1200).id].organization == organization(1).name


async def test_models_and_aliases(storage: Database) -> None:
    alias = Alias(name="gpt-5", model="m1", system_default="Be brief.", request_class="batch", created_at_ms=1)
    changed = Alias(name="gpt-5", model="m2", created_at_ms=1)
    async with storage.writing() as work:
        assert await work.catalog.enter_model(model("m1"))
        assert not await work.catalog.enter_model(model("m1", created_at_ms=0))
        assert await work.catalog.enter_model(model("m2"))
        await work.catalog.add_alias(alias)
        with pytest.raises(Conflict, match="an alias named 'gpt-5' already"):
            await work.catalog.add_alias(changed)
    async with storage.writing() as work:
        assert await work.catalog.aliases() == [alias]
        await work.catalog.replace_alias(changed)
        await work.catalog.replace_model(model("m2", disabled_at_ms=3))
        assert await work.catalog.models() == [model("m1"), model("m2", disabled_at_ms=3)]
        assert await work.catalog.aliases() == [changed]
        await work.catalog.remove_alias("gpt-5")
        assert await work.catalog.aliases() == []


async def test_nothing_is_kept_of_a_block_that_fails(storage: Database) -> None:
    async def fail() -> None:
        async with storage.writing() as work:
            await work.organizations.add(organization())
            await work.count_change()
            await work.audit.append(draft())
            raise KeyError("a bug")

    with pytest.raises(KeyError):
        await fail()

    async with storage.reading() as work:
        assert await work.organizations.page(after="", limit=9) == []
        assert await work.version() == 0
        assert await work.audit.page(after=0, limit=9) == []


async def test_a_reader_sees_all_the_time_what_it_saw_first(storage: Database) -> None:
    async with storage.reading() as reader:
        assert await reader.version() == 0
        async with storage.writing() as work:
            await work.organizations.add(organization())
            assert await work.count_change() == 1
        assert await reader.version() == 0
        assert await reader.organizations.page(after="", limit=9) == []

    async with storage.reading() as reader:
        assert await reader.version() == 1


async def test_every_change_is_counted_once(storage: Database) -> None:
    async def change() -> int:
        async with storage.writing() as work:
            return await work.count_change()

    counted = await asyncio.gather(*(change() for _ in range(20)))

    assert sorted(counted) == list(range(1, 21))
    async with storage.reading() as work:
        assert await work.version() == 20


async def test_two_changes_of_one_object_at_once_lose_neither(storage: Database) -> None:
    await with_team(storage)

    async def change(**fields: object) -> None:
        async with storage.writing() as work:
            read = await work.teams.get(team().id)
            assert read is not None
            await work.version()
            await work.teams.replace(msgspec.structs.replace(read, **fields))

    for n in range(1, 11):
        await asyncio.gather(change(weight=n), change(disabled_at_ms=n))
        async with storage.reading() as work:
            assert await work.teams.get(team().id) == team(weight=n, disabled_at_ms=n)


@pytest.mark.parametrize("text", HOSTILE)
async def test_text_is_only_text(storage: Database, text: str) -> None:
    kept_organization = organization(name=text, id=OrganizationId(text))
    kept_team = team(name=text, id=TeamId(text), organization_id=OrganizationId(text))
    kept_key = key(name=text, team_id=TeamId(text), models=(text, ""))
    kept_alias = Alias(name=text, model=text, system_default=text, created_at_ms=1)
    kept_limit = limit(scope_id=text, model=text)
    kept_top_up = top_up(id=text, scope_id=text, model=text, name=text, period_id=text, reason=text)
    kept_price = price(model=text)
    kept_row = ledger_row(charges=(charge(text, 1),), organization_id=OrganizationId(text))
    kept_draft = draft(actor=text, source=text, request_id=text, action=text, object_id=text, before=text, after=text)
    async with storage.writing() as work:
        await work.organizations.add(kept_organization)
        await work.teams.add(kept_team)
        await work.keys.add(kept_key)
        await work.admin_tokens.add(admin_token(name=text))
        await work.catalog.enter_model(model(text))
        await work.catalog.add_alias(kept_alias)
        await work.catalog.add_price(kept_price)
        await work.limits.set(kept_limit)
        await work.limits.add_top_up(kept_top_up)
        assert await work.limits.alert(text, 80, organization_id=OrganizationId(text), at_ms=1)
        await work.ledger.post([kept_row])
        entry = await work.audit.append(kept_draft)

    async with storage.reading() as work:
        assert await work.organizations.by_name(text) == kept_organization
        assert await work.teams.by_name(OrganizationId(text), text) == kept_team
        assert await work.keys.get(kept_key.id) == kept_key
        assert await work.keys.holder(text) is None
        assert await work.admin_tokens.get(admin_token().id) == admin_token(name=text)
        assert await work.catalog.aliases() == [kept_alias]
        assert await work.catalog.prices() == [kept_price]
        assert await work.limits.get(text, text, kept_limit.name) == kept_limit
        assert await work.limits.of([text]) == [kept_limit]
        assert await work.limits.top_ups([text], since_ms=0) == [kept_top_up]
        assert await work.limits.alerts(OrganizationId(text), limit=9) == [(text, 80, 1)]
        assert await work.ledger.rows([kept_row.request_id]) == [kept_row]
        assert await work.ledger.committed(OrganizationId(text), since_ms=0) == {text: 1}
        assert [sentence async for sentence in work.ledger.mismatches()] == []
        assert await work.audit.page(after=0, limit=9) == [entry]
        assert await work.teams.page(after=text, limit=9) == []


async def test_a_nul_is_refused_by_both(storage: Database) -> None:
    with pytest.raises(StatementError, match="a NUL cannot be kept"):
        async with storage.writing() as work:
            await work.organizations.add(organization(name="a\0b"))
