"""What models' tokens cost, and from when on. A price is never changed or removed: the next one takes over.

Requests are charged by the price at their admission, and what was charged stays charged. So a price that begins in the
past would say of requests what is not so, and is refused once a model has a price. A model's first price may: until it
is set nothing was charged, and nothing of that changes.
"""

from __future__ import annotations

from collections.abc import Sequence

from gateway.domain.limits.meters import MOST_WEIGHT
from gateway.domain.limits.policy import Price, price_at
from gateway.errors import Conflict, InvalidRequest
from gateway.services.admin_catalog import check_model, require_model
from gateway.services.admin_changes import Change, Changes
from gateway.services.admin_pages import Page, PageRequest, bad_cursor, fetch_page
from gateway.services.admin_rules import MAX_TIME_MS
from gateway.services.audit import Actor
from gateway.services.stores import Storage


class Prices:
    """The use cases; they raise `InvalidRequest`, `NotFound` or `Conflict`."""

    def __init__(self, storage: Storage, changes: Changes) -> None:
        self._storage = storage
        self._changes = changes

    async def add(
        self,
        actor: Actor,
        *,
        model: str,
        prompt: int,
        completion: int,
        cached: int | None = None,
        valid_from_ms: int | None = None,
    ) -> Price:
        """A model's price from a moment on. One that holds then already, or now if that is past, adds nothing and is
        returned.

        Args:
            prompt, completion, cached: micro-USD for a million tokens; None is what other prompt tokens cost.
            valid_from_ms: None is now.

        Raises:
            InvalidRequest: it cannot be a price, or the model is not in the catalogue.
            Conflict: it would begin in the past of a model that has a price, or at the moment that another one does.
        """
        async with self._changes.begin(actor) as change:
            wanted = Price(
                model=model,
                valid_from_ms=change.now_ms if valid_from_ms is None else valid_from_ms,
                prompt=prompt,
                cached=prompt if cached is None else cached,
                completion=completion,
            )
            has_price = any(each.model == model for each in await change.work.catalog.prices())
            return await add_price(change, wanted, may_be_past=not has_price)

    async def page(self, page: PageRequest, *, model: str | None = None) -> Page[Price]:
        """All, or those of one model, which must be there; by model, then time."""
        after = _place_of(page.after)
        async with self._storage.reading() as work:
            if model is not None:
                await require_model(work, model)
            prices = await work.catalog.prices()
        wanted = sorted((each for each in prices if model in (None, each.model)), key=_place)
        behind = [each for each in wanted if _place(each) > after]

        async def fetch(limit: int) -> Sequence[Price]:
            return behind[:limit]

        return await fetch_page(page, fetch, lambda each: f"{each.valid_from_ms}:{each.model}")


async def add_price(change: Change, wanted: Price, *, may_be_past: bool) -> Price:
    """Part of a larger change. Raises what `Prices.add` raises.

    Args:
        may_be_past: the model had no price before the change.
    """
    check_price(wanted)
    await check_model(change.work, wanted.model)
    prices = tuple(await change.work.catalog.prices())
    there = price_at(prices, wanted.model, wanted.valid_from_ms)
    if there is not None and there.weights == wanted.weights:
        return there
    if wanted.valid_from_ms < change.now_ms and not may_be_past:
        current = price_at(prices, wanted.model, change.now_ms)
        if current is not None and current.weights == wanted.weights:
            return current  # of what is past nothing can be said any more, and from now on it is so
        raise Conflict(
            "The model has a price, so 'valid_from' must not lie in the past: what was charged stays charged.",
            param="valid_from",
        )
    await change.work.catalog.add_price(wanted)
    change.record("price.add", wanted.model, before=there, after=wanted)
    return wanted


def check_price(price: Price) -> None:
    """Raises `InvalidRequest`."""
    for param, value in (("prompt", price.prompt), ("cached", price.cached), ("completion", price.completion)):
        if not 0 <= value <= MOST_WEIGHT:
            raise InvalidRequest(
                f"'{param}' must be between 0 and {MOST_WEIGHT} micro-USD for a million tokens.", param=param
            )
    if price.cached > price.prompt:
        raise InvalidRequest("'cached' must not be more than other prompt tokens cost.", param="cached")
    if not 0 <= price.valid_from_ms <= MAX_TIME_MS:
        raise InvalidRequest("'valid_from' must be between the years 1970 and 9999.", param="valid_from")


def _place(price: Price) -> tuple[str, int]:
    return price.model, price.valid_from_ms


def _place_of(cursor: str) -> tuple[str, int]:
    if not cursor:
        return "", -1
    valid_from, colon, model = cursor.partition(":")
    if not colon or not (valid_from.isascii() and valid_from.isdigit()) or len(valid_from) > 15:
        raise bad_cursor()
    return model, int(valid_from)
