"""``evenhand ledger``: whether everything that was used is accounted for."""

from __future__ import annotations

import asyncio
import sys

from gateway.errors import StorageDown
from gateway.journal.folder import JournalFolder
from gateway.services.verification import LedgerReport, verify_ledger
from gateway.settings import Settings
from gateway.storage.opening import open_database
from gateway.storage.schema import migrate


def verify(settings: Settings) -> int:
    """Print a report; the exit code: 0 if everything adds up, 1 if not or if that cannot be found out.

    Raises:
        UnusableDatabase: the address names no database, or one that this version cannot use.
    """
    try:
        report = asyncio.run(_report(settings))
    except StorageDown as e:
        print(f"evenhand: {e.message}", file=sys.stderr)  # noqa: T201
        return 1
    for line in _lines(report):
        print(line)  # noqa: T201
    return 1 if report.findings else 0


async def _report(settings: Settings) -> LedgerReport:
    database = open_database(settings)
    try:
        await migrate(database)
        return await verify_ledger(database, JournalFolder(settings.home))
    finally:
        await database.close()


def _lines(report: LedgerReport) -> list[str]:
    lines = [
        f"{report.num_rows} rows in the ledger",
        f"{report.num_closed} settled requests in the journals, {report.num_waiting} of them not posted yet",
        f"{report.num_running} requests are running",
    ]
    if report.num_to_settle:
        lines.append(
            f"{report.num_to_settle} requests of processes that died are open; "
            "a gateway with this home settles them within seconds"
        )
    return [*lines, *report.findings, f"{len(report.findings)} findings" if report.findings else "clean"]
