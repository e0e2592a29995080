"""Limits, top-ups, alerts and prices, the same on SQLite and PostgreSQL."""

from __future__ import annotations

import asyncio

import pytest
from sqlalchemy import insert
from storage_kit import NOW_MS, limit, price, top_up

from gateway.domain.ids import OrganizationId
from gateway.domain.limits.meters import MOST_QUOTA
from gateway.domain.limits.policy import (
    Concurrency,
    ContextSize,
    Limit,
    OutputSize,
    QuotaRule,
    RequestRate,
    Rule,
    TokenRate,
)
from gateway.errors import Conflict
from gateway.storage.database import Database
from gateway.storage.tables import limits

RULES: list[Rule] = [
    RequestRate(amount=100, period="minute"),
    RequestRate(amount=5, period="second", burst=50),
    TokenRate(amount=1000, period="hour"),
    TokenRate(
        amount=1000,
        period="day",
        burst=2000,
        max_debt=0,
        prompt_percent=50,
        cached_percent=0,
        output_percent=400,
        is_strict=True,
    ),
    Concurrency(amount=0),
    ContextSize(amount=8192),
    OutputSize(amount=512),
    QuotaRule(unit="tokens", period="month", amount=MOST_QUOTA),
    QuotaRule(unit="microusd", period="day", amount=1, is_hard=False, alerts=()),
    QuotaRule(unit="tokens", period="week", amount=1, alerts=(50, 80, 100, 120)),
]
ORGANIZATION = OrganizationId("org_0001")


async def enter(storage: Database, *kept: Limit) -> None:
    async with storage.writing() as work:
        for each in kept:
            await work.limits.set(each)


async def test_every_kind_of_rule_comes_back_as_it_was_set(storage: Database) -> None:
    kept = [limit(rule=rule, is_shadow=n % 2 == 0, changed_at_ms=NOW_MS + n) for n, rule in enumerate(RULES)]
    assert len({each.name for each in kept}) == len(RULES)
    await enter(storage, *kept)

    async with storage.reading() as work:
        assert await work.limits.of([ORGANIZATION]) == sorted(kept, key=lambda each: each.name)
        for each in kept:
            assert await work.limits.get(each.scope_id, None, each.name) == each


async def test_a_limit_takes_the_place_of_the_one_with_its_scope_model_and_name_alone(storage: Database) -> None:
    first = limit(rule=RequestRate(amount=1, period="minute"))
    others = [
        limit(rule=RequestRate(amount=2, period="hour")),
        limit(rule=first.rule, model="m1"),
        limit(2, rule=first.rule),
        limit(rule=TokenRate(amount=3, period="minute")),
    ]
    changed = limit(rule=RequestRate(amount=9, period="minute", burst=3), is_shadow=True, changed_at_ms=NOW_MS + 7)
    await enter(storage, first, *others)
    await enter(storage, changed)

    async with storage.reading() as work:
        assert set(await work.limits.of(["org_0002", ORGANIZATION])) == {changed, *others}


async def test_a_limit_is_removed_by_scope_model_and_name(storage: Database) -> None:
    whole, of_model = limit(), limit(model="m1")
    await enter(storage, whole, of_model)
    async with storage.writing() as work:
        assert not await work.limits.remove("org_0002", None, whole.name)
        assert not await work.limits.remove(ORGANIZATION, "m2", whole.name)
        assert not await work.limits.remove(ORGANIZATION, None, "requests/hour")
        assert await work.limits.remove(ORGANIZATION, None, whole.name)
        assert not await work.limits.remove(ORGANIZATION, None, whole.name)

    async with storage.reading() as work:
        assert await work.limits.get(ORGANIZATION, None, whole.name) is None
        assert await work.limits.get(ORGANIZATION, "m1", whole.name) == of_model
        assert await work.limits.of([ORGANIZATION]) == [of_model]


async def test_limits_come_in_the_order_of_the_scopes_asked_for_then_by_name_then_by_model(storage: Database) -> None:
    one, two = RequestRate(amount=1, period="minute"), TokenRate(amount=1, period="minute")
    kept = [
        limit(scope="team", scope_id="team_b", rule=one),
        limit(scope="team", scope_id="team_b", model="Z", rule=one),
        limit(scope="team", scope_id="team_b", model="a", rule=one),
        limit(scope="team", scope_id="team_b", rule=two),
        limit(scope="key", scope_id="key_a", rule=one),
    ]
    await enter(storage, *reversed(kept), limit(7))

    async with storage.reading() as work:
        assert await work.limits.of(["org_none", "team_b", "key_a", "team_b"]) == kept
        assert await work.limits.of(["key_a", "team_b"]) == [kept[4], *kept[:4]]
        assert await work.limits.of([]) == []


async def test_thousands_of_scopes_are_asked_for_at_once(storage: Database) -> None:
    kept = [limit(n) for n in range(1, 2501)]
    ups = [top_up(n, scope_id=f"org_{n:04}") for n in range(1, 2501)]
    async with storage.writing() as work:
        await work.limits._transaction.run(
            insert(limits),
            [
                {
                    "scope": each.scope,
                    "scope_id": each.scope_id,
                    "model": "",
                    "name": each.name,
                    "rule": {"type": "requests", "amount": n, "period": "minute", "burst": None},
                    "is_shadow": False,
                    "changed_at_ms": each.changed_at_ms,
                }
                for n, each in enumerate(kept, start=1)
            ],
        )
        for each in ups[:3] + ups[-3:]:
            await work.limits.add_top_up(each)
    scope_ids = [each.scope_id for each in kept]

    async with storage.reading() as work:
        assert await work.limits.of(scope_ids[::-1]) == kept[::-1]
        assert await work.limits.top_ups(scope_ids[::-1], since_ms=0) == ups[:3] + ups[-3:]


async def test_pages_of_limits_are_in_order_without_gaps(storage: Database) -> None:
    scopes = (("organization", "org_1"), ("team", "team_1"), ("team", "team_2"), ("key", "key_1"))
    kept = [
        limit(scope=scope, scope_id=scope_id, model=model, rule=rule)
        for scope, scope_id in scopes
        for model in (None, "B", "a")
        for rule in (RequestRate(amount=1, period="minute"), Concurrency(amount=2))
    ]
    await enter(storage, *kept)

    for scope in (None, "team", "key"):
        expected = [each for each in kept if scope in (None, each.scope)]
        expected.sort(key=lambda each: (each.scope_id, each.name, each.model or ""))
        seen: list[Limit] = []
        after = ("", "", "")
        async with storage.reading() as work:
            while page := await work.limits.page(after=after, limit=5, scope=scope):
                seen += page
                after = (seen[-1].scope_id, seen[-1].name, seen[-1].model or "")
        assert seen == expected


async def test_top_ups_are_of_the_scopes_and_the_time_asked_for(storage: Database) -> None:
    kept = [
        top_up(4, scope_id="org_0002"),
        top_up(3, model="m1", amount=MOST_QUOTA),
        top_up(2, scope="team", scope_id="team_0001"),
        top_up(1),
    ]
    async with storage.writing() as work:
        for each in kept:
            await work.limits.add_top_up(each)

    async with storage.reading() as work:
        assert await work.limits.top_ups(["team_0001", ORGANIZATION], since_ms=0) == kept[3:0:-1]
        assert await work.limits.top_ups([ORGANIZATION], since_ms=NOW_MS + 3) == [kept[1]]
        assert await work.limits.top_ups([ORGANIZATION], since_ms=NOW_MS + 4) == []
        assert await work.limits.top_ups([], since_ms=0) == []


async def test_an_alert_is_new_once_whoever_tells_it(storage: Database) -> None:
    async def tell(at_ms: int) -> bool:
        async with storage.writing() as work:
            return await work.limits.alert("quota", 80, organization_id=ORGANIZATION, at_ms=at_ms)

    assert sorted(await asyncio.gather(*(tell(NOW_MS) for _ in range(5)))) == [False] * 4 + [True]
    assert not await tell(NOW_MS + 1)
    async with storage.writing() as work:
        assert await work.limits.alert("quota", 100, organization_id=ORGANIZATION, at_ms=NOW_MS)
        assert await work.limits.alert("earlier", 80, organization_id=ORGANIZATION, at_ms=NOW_MS - 1)
        assert await work.limits.alert("later", 80, organization_id=ORGANIZATION, at_ms=NOW_MS + 1)
        assert await work.limits.alert("other", 80, organization_id=OrganizationId("org_0002"), at_ms=NOW_MS)

    async with storage.reading() as work:
        told = [
            ("later", 80, NOW_MS + 1),
            ("quota", 100, NOW_MS),
            ("quota", 80, NOW_MS),
            ("earlier", 80, NOW_MS - 1),
        ]
        assert await work.limits.alerts(ORGANIZATION, limit=9) == told
        assert await work.limits.alerts(ORGANIZATION, limit=2) == told[:2]


async def test_prices_come_in_order_of_model_and_time_and_one_moment_has_one(storage: Database) -> None:
    kept = [price(1), price(2, cached=0), price(1, model="m2")]
    async with storage.writing() as work:
        for each in reversed(kept):
            await work.catalog.add_price(each)
        with pytest.raises(Conflict, match="a price of 'm1' from that moment on already"):
            await work.catalog.add_price(price(2))

    async with storage.reading() as work:
        assert await work.catalog.prices() == kept
