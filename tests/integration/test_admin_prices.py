"""Prices, on real databases: added, never changed, and never of what was charged already."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from admin_kit import ACTOR, MODEL, NOW_S, Office, said

from gateway.domain.limits.meters import MOST_WEIGHT
from gateway.domain.limits.policy import Price, price_at
from gateway.errors import Conflict, InvalidRequest, NotFound
from gateway.services.admin_pages import PageRequest
from gateway.services.admin_rules import MAX_TIME_MS
from gateway.services.stores import Storage

NOW_MS = int(NOW_S * 1000)
USD = {"prompt": 150_000, "cached": 75_000, "completion": 600_000}
OTHER = "other"


@pytest.fixture
async def office(storage: Storage) -> Office:
    made = Office(storage)
    await made.add_model()
    await made.add_model(OTHER)
    return made


async def _state(office: Office) -> tuple[object, ...]:
    return await office.audit(), await office.version(), office.feed.num_announced


async def _all(office: Office, **of: Any) -> list[Price]:
    return list((await office.admin.prices.page(PageRequest(), **of)).data)


async def test_a_price_holds_until_the_next_one(office: Office) -> None:
    add = office.admin.prices.add
    first = await add(ACTOR, model=MODEL, **USD)
    later = await add(ACTOR, model=MODEL, prompt=2, completion=3, valid_from_ms=NOW_MS + 5000)
    between = await add(ACTOR, model=MODEL, prompt=4, completion=0, cached=0, valid_from_ms=NOW_MS + 1000)
    other = await add(ACTOR, model=OTHER, prompt=0, completion=0)

    assert first == Price(model=MODEL, valid_from_ms=NOW_MS, **USD)
    assert later.cached == 2
    assert await _all(office) == [first, between, later, other]
    assert await _all(office, model=OTHER) == [other]
    prices = tuple(await _all(office))
    for after_ms, expected in ((-1, None), (0, first), (999, first), (1000, between), (4999, between), (5000, later)):
        assert price_at(prices, MODEL, NOW_MS + after_ms) == expected

    drafts = [entry.draft for entry in await office.audit()]
    assert [(each.action, each.object_id) for each in drafts] == [
        ("price.add", model) for model in (MODEL, MODEL, MODEL, OTHER)
    ]
    assert drafts[0].before == drafts[3].before == ""
    assert drafts[1].before == drafts[2].before == drafts[0].after
    assert said(drafts[0].after) == {"model": MODEL, "valid_from_ms": NOW_MS, **USD}


async def test_a_price_that_holds_already_adds_nothing(office: Office) -> None:
    first = await office.admin.prices.add(ACTOR, model=MODEL, **USD)
    before = await _state(office)
    office.clock.now += 60

    for valid_from_ms in (None, NOW_MS, NOW_MS + 10, NOW_MS + 10**9):
        assert await office.admin.prices.add(ACTOR, model=MODEL, valid_from_ms=valid_from_ms, **USD) == first
    assert await _state(office) == before


async def test_only_a_model_s_first_price_may_begin_in_the_past(office: Office) -> None:
    first = await office.admin.prices.add(ACTOR, model=MODEL, valid_from_ms=NOW_MS - 10**9, **USD)
    before = await _state(office)

    for past_ms in (NOW_MS - 1, NOW_MS - 10**9 - 1, 0):
        with pytest.raises(Conflict, match="what was charged stays charged") as refused:
            await office.admin.prices.add(ACTOR, model=MODEL, prompt=1, completion=1, valid_from_ms=past_ms)
        assert refused.value.param == "valid_from"
    assert await _state(office) == before
    assert await _all(office) == [first]
    assert await office.admin.prices.add(ACTOR, model=MODEL, prompt=1, completion=1, valid_from_ms=NOW_MS) != first


async def test_the_price_that_holds_now_may_be_told_with_any_moment_before(office: Office) -> None:
    """As by a file that was written when the model had no price yet, for one that has got it by hand meanwhile."""
    await office.admin.prices.add(ACTOR, model=MODEL, valid_from_ms=NOW_MS - 10**9, prompt=1, completion=1)
    now = await office.admin.prices.add(ACTOR, model=MODEL, valid_from_ms=NOW_MS, **USD)
    before = await _state(office)

    for past_ms in (0, NOW_MS - 10**9 - 1, NOW_MS - 1):
        assert await office.admin.prices.add(ACTOR, model=MODEL, valid_from_ms=past_ms, **USD) == now
    assert await _state(office) == before


async def test_there_is_one_price_of_a_moment(office: Office) -> None:
    done = await asyncio.gather(
        *(
            office.admin.prices.add(ACTOR, model=MODEL, prompt=n, completion=0, valid_from_ms=NOW_MS + 1)
            for n in range(1, 6)
        ),
        return_exceptions=True,
    )

    assert sum(isinstance(each, Conflict) for each in done) == 4
    assert len(await _all(office)) == len(await office.audit()) == 1


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"prompt": -1}, f"'prompt' must be between 0 and {MOST_WEIGHT} micro-USD for a million tokens."),
        ({"prompt": MOST_WEIGHT + 1}, f"'prompt' must be between 0 and {MOST_WEIGHT} micro-USD for a million tokens."),
        ({"cached": -1}, f"'cached' must be between 0 and {MOST_WEIGHT} micro-USD for a million tokens."),
        ({"completion": 10**30}, f"'completion' must be between 0 and {MOST_WEIGHT} micro-USD for a million tokens."),
        ({"cached": 150_001}, "'cached' must not be more than other prompt tokens cost."),
        ({"valid_from_ms": -1}, "'valid_from' must be between the years 1970 and 9999."),
        ({"valid_from_ms": MAX_TIME_MS + 1}, "'valid_from' must be between the years 1970 and 9999."),
        ({"model": "none"}, "There is no model 'none' in the catalogue; "),
    ],
)  # fmt: skip
async def test_what_cannot_be_a_price_is_refused(office: Office, fields: dict[str, Any], message: str) -> None:
    before = await _state(office)

    with pytest.raises(InvalidRequest) as refused:
        await office.admin.prices.add(ACTOR, **({"model": MODEL, **USD} | fields))

    assert refused.value.message.startswith(message)
    assert f"'{refused.value.param}'" in message or refused.value.param == "model"
    assert await _state(office) == before


async def test_pages_are_by_model_and_time(office: Office) -> None:
    for n in range(1, 6):
        for model in (OTHER, MODEL):
            await office.admin.prices.add(ACTOR, model=model, prompt=n, completion=0, valid_from_ms=NOW_MS + n * 10**9)

    seen: list[Price] = []
    after: str | None = ""
    while after is not None:
        page = await office.admin.prices.page(PageRequest(3, after))
        seen.extend(page.data)
        after = page.next
    assert [(each.model, each.prompt) for each in seen] == [(model, n) for model in (MODEL, OTHER) for n in range(1, 6)]
    with pytest.raises(NotFound):
        await office.admin.prices.page(PageRequest(), model="none")
    for cursor in ("x", ":x", "-1:x", "1" * 16 + ":x", "١:x"):
        with pytest.raises(InvalidRequest):
            await office.admin.prices.page(PageRequest(3, cursor))
