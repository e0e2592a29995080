"""What must hold between the ledger rows' charges and what is kept as committed of quotas.

The sums are made by the database, which spills to disk what does not fit in its memory: added up here they would need
memory for each key there ever was, and each key, team and organization has a new one every day.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import (
    BigInteger,
    ColumnElement,
    FromClause,
    Select,
    and_,
    case,
    cast,
    collate,
    func,
    literal,
    null,
    or_,
    select,
    union_all,
)

from gateway.storage.tables import ledger, quota_usage
from gateway.storage.transaction import Row, Transaction

_DIGITS = 16
"""No charge and no time has more; larger ones could not be added up."""
_SUMS = ("charged", "committed", "num_wrong")


def has_no_list(transaction: Transaction) -> ColumnElement[bool]:
    """Of a ledger row: its charges are neither null nor a list."""
    column = ledger.c.charges
    if transaction.is_postgresql:
        return func.coalesce(func.json_typeof(column), "array") != "array"
    return func.coalesce(_sqlite_type(column), "array") != "array"


async def mismatches(transaction: Transaction) -> AsyncIterator[str]:
    """A sentence each. The charges are gone through once, and again only if some cannot be: then to say whose."""
    num_wrong = 0
    async for row in transaction.stream(_differences(transaction)):
        num_wrong += row["num_wrong"]
        for what in _wrong(row):
            yield f"quota {row['key']} of {row['organization_id']}: {what}"
    if not num_wrong:
        return
    charged = _charged(transaction).subquery()
    async for row in transaction.stream(select(charged.c.request_id, charged.c.units).where(_is_wrong(charged))):
        what = "a charge cannot be read" if row["units"] is None else "a charge is negative"
        yield f"ledger row {row['request_id']}: {what}"


def _differences(transaction: Transaction) -> Select[Any]:
    """One row for each key that is not the same on both sides or has what cannot be; null is a side without it."""
    charged, nothing = _charged(transaction).subquery(), cast(null(), BigInteger)
    everything = union_all(
        select(
            charged.c.key,
            charged.c.organization_id,
            charged.c.units.label("charged"),
            charged.c.ends_at_ms.label("charged_until_ms"),
            nothing.label("committed"),
            nothing.label("committed_until_ms"),
            case((_is_wrong(charged), 1), else_=0).label("num_wrong"),
        ),
        select(
            quota_usage.c.key,
            quota_usage.c.organization_id,
            nothing,
            nothing,
            quota_usage.c.committed,
            quota_usage.c.ends_at_ms,
            literal(0),
        ),
    ).subquery()
    group = everything.c.key, everything.c.organization_id
    sums = [cast(func.sum(everything.c[name]), BigInteger).label(name) for name in _SUMS]
    ends = [func.max(everything.c[name]).label(name) for name in ("charged_until_ms", "committed_until_ms")]
    is_wrong = (
        sums[0].element.is_distinct_from(sums[1].element),
        ends[0].element.is_distinct_from(ends[1].element),
        sums[1].element < 0,
        sums[2].element > 0,
    )
    return select(*group, *sums, *ends).group_by(*group).having(or_(*is_wrong)).order_by(*group)


def _is_wrong(charged: FromClause) -> ColumnElement[bool]:
    return or_(charged.c.units.is_(None), charged.c.units < 0)


def _wrong(row: Row) -> list[str]:
    charged, committed = row["charged"], row["committed"]
    if committed is None and charged is None:
        return []
    if committed is None:
        return [f"nothing is kept as committed, ledger rows were charged {charged} for it"]
    if charged is None:
        return [f"{committed} is committed, no ledger row was charged for it"]
    wrong = []
    if committed < 0:
        wrong.append(f"{committed} is committed, which is negative")
    if charged != committed:
        wrong.append(f"{committed} is committed, ledger rows were charged {charged} for it")
    if row["charged_until_ms"] != row["committed_until_ms"]:
        ends = [_iso(row[name]) for name in ("committed_until_ms", "charged_until_ms")]
        wrong.append("its period ends at {}, by the ledger rows at {}".format(*ends))
    return wrong


def _charged(transaction: Transaction) -> Select[Any]:
    """A row for each charge of each ledger row; units and end are null if it cannot be read.

    Both databases fail on a value that is not what a function takes, and neither promises to look at a condition before
    it, except within CASE.
    """
    column = ledger.c.charges
    key: ColumnElement[Any]
    if transaction.is_postgresql:
        a_list = case((func.json_typeof(column) == "array", column))
        each = func.json_array_elements(a_list).table_valued("value", name="charge", joins_implicitly=True)
        # In the order of the columns of `quota_usage`: else the two could not be compared.
        key = collate(each.c.value.op("->>")(0), "C")
        ends_at_ms, units = (_postgresql_number(each.c.value, place) for place in (1, 2))
    else:
        a_list = case((_sqlite_type(column) == "array", column))
        each = func.json_each(a_list).table_valued("value", "type", name="charge", joins_implicitly=True)
        value = case((each.c.type == "array", each.c.value), else_="[]")
        key = case((func.json_type(value, "$[0]") == "text", func.json_extract(value, "$[0]")))
        ends_at_ms, units = (_sqlite_number(value, f"$[{place}]") for place in (1, 2))
    parts = key.label("key"), ends_at_ms.label("ends_at_ms"), units.label("units")
    read = select(ledger.c.request_id, ledger.c.organization_id, *parts).select_from(ledger, each)
    # The offset keeps both databases from working each part out anew wherever it is mentioned.
    part = read.offset(0).subquery().c
    is_whole = and_(*(part[each.name].is_not(None) for each in parts))
    whole = (case((is_whole, part[name])).label(name) for name in ("ends_at_ms", "units"))
    return select(part.request_id, part.organization_id, part.key, *whole)


def _postgresql_number(value: ColumnElement[Any], place: int) -> ColumnElement[Any]:
    """A regular expression would take longer than everything else together."""
    a_text = value.op("->>")(place)
    is_number = func.json_typeof(value.op("->")(place)) == "number"
    is_one = and_(is_number, func.translate(a_text, "0123456789", "").in_(("", "-")), func.length(a_text) <= _DIGITS)
    return case((is_one, cast(a_text, BigInteger)))


def _sqlite_type(column: ColumnElement[Any]) -> ColumnElement[Any]:
    """Of the JSON in a column; 'none' if it is none, null for null."""
    return case((column.is_(None), null()), (func.json_valid(column) == 1, func.json_type(column)), else_="none")


def _sqlite_number(value: ColumnElement[Any], place: str) -> ColumnElement[Any]:
    number = func.json_extract(value, place)
    is_one = case((func.json_type(value, place) == "integer", func.abs(number) < 10**_DIGITS), else_=False)
    return case((is_one, number))


def _iso(time_ms: int) -> str:
    """Times that no calendar has are told as they are."""
    try:
        return datetime.fromtimestamp(time_ms / 1000, UTC).isoformat(timespec="seconds")
    except (ValueError, OverflowError, OSError):
        return str(time_ms)
