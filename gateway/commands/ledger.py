"""``evenhand ledger``: whether everything that was used is accounted for."""

from __future__ import annotations

import asyncio
import sys

from gateway.commands.storage_down import explain
from gateway.errors import StorageDown
from gateway.journal.folder import JournalFolder
from gateway.services.verification import LedgerReport, verify_ledger
from gateway.settings import Settings
from gateway.storage.opening import open_database
from gateway.storage.schema import current, newest
from gateway.storage.urls import SqliteFile, read_url


class _NothingToVerify(Exception):
    """There are no tables that could be looked at; the message says what to do."""


def verify(settings: Settings) -> int:
    """Print a report and change nothing; the exit code: 0 if everything adds up, 1 if not or if that cannot be found
    out.

    Raises:
        UnusableDatabase: the address names no database, or one that this version cannot use.
    """
    try:
        report = asyncio.run(_report(settings))
    except StorageDown as e:
        return _refuse(explain(e, settings))
    except _NothingToVerify as e:
        return _refuse(str(e))
    except OSError as e:
        return _refuse(f"the journals cannot be read: {e.filename}: {e.strerror}")
    for line in _lines(report):
        print(line)  # noqa: T201
    return 1 if report.findings else 0


async def _report(settings: Settings) -> LedgerReport:
    url = settings.database.url
    place = read_url(None if url is None else url.get_secret_value(), settings.home)
    if isinstance(place, SqliteFile) and not place.path.exists():
        raise _NothingToVerify(f"there is no database yet at {place.path}")
    database = open_database(settings)
    try:
        if (revision := await current(database)) != newest():
            raise _NothingToVerify(
                f"the database is at revision {revision}, this version needs {newest()}: run evenhand migrate"
            )
        return await verify_ledger(database, JournalFolder(settings.home))
    finally:
        await database.close()


def _refuse(why: str) -> int:
    print(f"evenhand: {why}", file=sys.stderr)  # noqa: T201
    return 1


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
