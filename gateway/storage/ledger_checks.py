"""What must hold in the ledger, looked up by the database; only what does not hold comes out."""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import UTC, datetime
from typing import get_args

from sqlalchemy import ColumnElement, or_, select, union_all

from gateway.domain.principal import CLASSES
from gateway.domain.request import Endpoint
from gateway.domain.usage import Outcome
from gateway.storage import quota_checks
from gateway.storage.rollups import GROUP, SUMS, queued_rows_as_usage, rows_as_usage, total
from gateway.storage.tables import hourly_usage, ledger, rollup_queue
from gateway.storage.transaction import Transaction

_COUNTS = (
    "prompt_tokens",
    "cached_tokens",
    "completion_tokens",
    "queue_us",
    "prefill_us",
    "decode_us",
    "preempted_us",
    "parked_us",
    "engine_us",
    "ttft_us",
    "total_us",
    "cost_microusd",
)


async def mismatches(transaction: Transaction) -> AsyncIterator[str]:
    """See `services.stores.LedgerStore.mismatches`."""
    async for sentence in _wrong_rows(transaction):
        yield sentence
    async for sentence in _queued_without_row(transaction):
        yield sentence
    async for sentence in _wrong_sums(transaction):
        yield sentence
    async for sentence in quota_checks.mismatches(transaction):
        yield sentence


async def _wrong_rows(transaction: Transaction) -> AsyncIterator[str]:
    impossible: dict[str, ColumnElement[bool]] = {
        **{f"{name} is negative": ledger.c[name] < 0 for name in _COUNTS},
        "cached_tokens is more than prompt_tokens": ledger.c.cached_tokens > ledger.c.prompt_tokens,
        "it was closed before it was opened": ledger.c.closed_at_ms < ledger.c.opened_at_ms,
        "its outcome is none that there is": ledger.c.outcome.not_in(get_args(Outcome)),
        "its endpoint is none that there is": ledger.c.endpoint.not_in(get_args(Endpoint)),
        "its class is none that there is": ledger.c.request_class.not_in(CLASSES),
        "its charges are no list": quota_checks.has_no_list(transaction),
    }
    flags = [condition.label(what) for what, condition in impossible.items()]
    async for row in transaction.stream(select(ledger.c.request_id, *flags).where(or_(*impossible.values()))):
        for what in impossible:
            if row[what]:
                yield f"ledger row {row['request_id']}: {what}"


async def _queued_without_row(transaction: Transaction) -> AsyncIterator[str]:
    is_there = select(ledger.c.request_id).where(ledger.c.request_id == rollup_queue.c.request_id).exists()
    async for row in transaction.stream(select(rollup_queue.c.request_id).where(~is_there)):
        yield f"request {row['request_id']}: is to be added to the hourly sums, but has no ledger row"


async def _wrong_sums(transaction: Transaction) -> AsyncIterator[str]:
    """What is in the sums and the queue but not in the ledger counts up, what is in the ledger alone counts down."""
    rows = rows_as_usage().subquery()
    missing = select(*(rows.c[name] for name in GROUP), *((-rows.c[name]).label(name) for name in SUMS))
    all_of_it = union_all(select(hourly_usage), queued_rows_as_usage(), missing).subquery()
    sums = [total(all_of_it, name) for name in SUMS]
    group = [all_of_it.c[name] for name in GROUP]
    differences = select(*group, *sums).group_by(*group).having(or_(*(each.element != 0 for each in sums)))
    async for row in transaction.stream(differences.order_by(*group)):
        hour = datetime.fromtimestamp(row["hour_ms"] / 1000, UTC).isoformat(timespec="minutes")
        off = ", ".join(f"{row[name]:+d} {name}" for name in SUMS if row[name])
        key = f"team {row['team_id']}, key {row['key_id']}, model {row['model']}"
        yield f"hour {hour}, {key}: the hourly sums are off by {off}"
