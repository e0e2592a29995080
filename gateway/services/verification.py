"""The use case "is everything accounted for": journals against ledger, ledger against sums, the audit's chain.

Changes nothing, and may run beside servers: what they are about to post is counted, not held against them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from gateway.domain.ledger import LedgerRow
from gateway.journal.folder import JournalFolder
from gateway.journal.tail import JournalTail
from gateway.services.audit import breaks
from gateway.services.stores import Storage


@dataclass(slots=True)
class LedgerReport:
    """What was looked at, and what is wrong.

    Attributes:
        num_rows: in the ledger.
        num_closed: requests that journals say are settled.
        num_waiting: those of them that a running process, or the recovery of a dead one, has still to post.
        num_running: requests that are open in running processes.
        num_to_settle: requests that dead processes have left open; a gateway on this home settles them as lost.
        findings: a sentence each.
    """

    num_rows: int = 0
    num_closed: int = 0
    num_waiting: int = 0
    num_running: int = 0
    num_to_settle: int = 0
    findings: list[str] = field(default_factory=list)


async def verify_ledger(storage: Storage, folder: JournalFolder) -> LedgerReport:
    """Raises `StorageDown`, and `OSError` if the journals cannot be read."""
    report = LedgerReport()
    await _check_journals(storage, folder, report)
    async with storage.reading() as work:
        report.num_rows = (await work.ledger.totals()).num_requests
        async for sentence in work.ledger.mismatches():
            report.findings.append(sentence)
    async for sentence in breaks(storage):
        report.findings.append(f"audit: {sentence}")
    return report


async def _check_journals(storage: Storage, folder: JournalFolder, report: LedgerReport) -> None:
    report.findings += [f"{path.name} is damaged; its readable part was posted" for path in folder.damaged()]
    for writer_id in folder.writers():
        # Before reading: who dies meanwhile has left its journal complete for the recovery.
        is_alive = folder.is_alive(writer_id)
        tail = JournalTail(folder, writer_id, is_finished=True, keeps_files=True)
        for rows in _closed(tail):
            report.num_closed += len(rows)
            await _check_rows(storage, rows, report)
        report.findings += [f"segment {number} of journal {writer_id} is damaged" for number in sorted(tail.damaged)]
        if is_alive:
            report.num_running += len(tail.open)
            continue
        async with storage.reading() as work:
            report.num_to_settle += len(tail.open) - len(await work.ledger.present(list(tail.open)))


def _closed(tail: JournalTail) -> Iterator[Sequence[LedgerRow]]:
    is_last = False
    while not is_last:
        batch = tail.read()
        tail.commit(batch)
        is_last = batch.is_last
        if batch.rows:
            yield batch.rows


async def _check_rows(storage: Storage, rows: Sequence[LedgerRow], report: LedgerReport) -> None:
    async with storage.reading() as work:
        known = {row.request_id: row for row in await work.ledger.rows([row.request_id for row in rows])}
    for row in rows:
        if row.request_id not in known:
            report.num_waiting += 1
        elif known[row.request_id] != row:
            report.findings.append(f"request {row.request_id} has other values in the ledger than in the journal")
