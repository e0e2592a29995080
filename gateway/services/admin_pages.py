"""Lists in pages: each page names where the next begins, so that it costs the same wherever one is in the list."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, TypeVar

import msgspec

from gateway.errors import InvalidRequest
from gateway.services.admin_rules import is_id

T = TypeVar("T")

MAX_PAGE = 200


class Page(msgspec.Struct, Generic[T], frozen=True):
    """A part of a list.

    Attributes:
        next: what to ask for to go on, None at the end.
    """

    data: Sequence[T]
    next: str | None


class PageRequest(msgspec.Struct, frozen=True):
    """Which part of a list: up to `limit` items behind the one that `after` stands for; empty is the first part."""

    limit: int = 50
    after: str = ""

    def after_id(self, prefix: str) -> str:
        """The cursor of lists in order of id. Raises `InvalidRequest`."""
        if self.after and not is_id(self.after, prefix):
            raise bad_cursor()
        return self.after


def bad_cursor() -> InvalidRequest:
    return InvalidRequest("'after' must be what 'next' of the page before said.", param="after")


async def fetch_page(
    page: PageRequest, fetch: Callable[[int], Awaitable[Sequence[T]]], cursor: Callable[[T], str]
) -> Page[T]:
    """Ask for one item more than the page has, to know whether there is another page."""
    items = await fetch(page.limit + 1)
    has_more = len(items) > page.limit
    items = items[: page.limit]
    return Page(items, cursor(items[-1]) if has_more else None)
