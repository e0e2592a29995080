"""What administrators look up: the audit, the ledger, and usage by the hour."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Sequence

from gateway.domain.audit import AuditEntry
from gateway.domain.ledger import HourlyUsage, LedgerRow
from gateway.errors import InvalidRequest
from gateway.services.admin_pages import Page, PageRequest, bad_cursor, fetch_page
from gateway.services.admin_rules import MAX_TIME_MS
from gateway.services.stores import Storage
from gateway.services.tenants import require_team

_REQUEST_ID = re.compile(r"req_[0-9a-f]{32}")


class Reports:
    """The use cases; they raise `InvalidRequest` for a bad cursor or range, and `NotFound` for an unknown team."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage

    async def audit(self, page: PageRequest) -> Page[AuditEntry]:
        """From the oldest on."""
        after = _sequence(page.after)
        async with self._storage.reading() as work:
            return await fetch_page(
                page,
                lambda limit: work.audit.page(after=after, limit=limit),
                lambda each: str(each.sequence),
            )

    async def ledger(self, page: PageRequest, *, team_id: str | None = None) -> Page[LedgerRow]:
        if page.after and not _REQUEST_ID.fullmatch(page.after):
            raise bad_cursor()
        async with self._storage.reading() as work:
            owner = None if team_id is None else (await require_team(work, team_id)).id
            return await fetch_page(
                page,
                lambda limit: work.ledger.page(after=page.after, limit=limit, team_id=owner),
                lambda each: each.request_id,
            )

    async def usage(
        self, page: PageRequest, *, from_ms: int, until_ms: int, team_id: str | None = None
    ) -> Page[HourlyUsage]:
        """Of hours that begin in ``[from_ms, until_ms)``, since the epoch."""
        if not 0 <= from_ms < until_ms <= MAX_TIME_MS:
            raise InvalidRequest("'from' must lie before 'until', and both between 2020 and 9999.", param="from")
        begin_ms = max(from_ms, _hour_ms(page.after)) if page.after else from_ms
        async with self._storage.reading() as work:
            owner = None if team_id is None else (await require_team(work, team_id)).id

            async def fetch(limit: int) -> Sequence[HourlyUsage]:
                return await work.ledger.hourly(from_ms=begin_ms, until_ms=until_ms, team_id=owner, limit=limit)

            return await fetch_page(page, lambda limit: _behind(page.after, fetch, limit), _place)


def _sequence(cursor: str) -> int:
    if cursor and not re.fullmatch("[0-9]{1,16}", cursor):
        raise bad_cursor()
    return int(cursor or 0)


def _place(usage: HourlyUsage) -> str:
    return f"{usage.hour_ms}/{usage.key_id}/{usage.model}"


def _hour_ms(cursor: str) -> int:
    hour, _, rest = cursor.partition("/")
    if not rest or not re.fullmatch("[0-9]{1,15}", hour):
        raise bad_cursor()
    return int(hour)


async def _behind(
    cursor: str, fetch: Callable[[int], Awaitable[Sequence[HourlyUsage]]], limit: int
) -> Sequence[HourlyUsage]:
    """The sums behind the cursor's. `fetch` reads from the begin of its hour on: that hour is read again, as far as
    needed."""
    num_read = limit
    while True:
        read = await fetch(num_read)
        places = [_place(each) for each in read]
        first = places.index(cursor) + 1 if cursor in places else len(read) if cursor else 0
        if len(read) - first >= limit or len(read) < num_read:
            return read[first : first + limit]
        num_read *= 2
