"""Recorder and poster over a ledger in memory: what is settled gets into it, whatever happens meanwhile."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import msgspec
import pytest
from client_kit import until
from metering_kit import (
    MONEY_QUOTA,
    NOTHING_YET,
    NOW_MS,
    TOKEN_QUOTA,
    Clock,
    Finals,
    MemoryStorage,
    Told,
    opening,
    record,
)

from gateway.domain.ids import RequestId
from gateway.domain.ledger import Charge, LedgerRow, Opening
from gateway.domain.usage import TokenUsage
from gateway.errors import Unavailable
from gateway.journal.folder import JournalFolder
from gateway.journal.records import Closed, Opened, Progress
from gateway.journal.tail import JournalTail
from gateway.journal.writer import JournalFull, JournalWriter
from gateway.services import bookkeeping, metering, posting
from gateway.services.bookkeeping import Bookkeeping
from gateway.services.metering import MeteringRecorder, Recorders, row_of
from gateway.services.ports import Running
from gateway.services.posting import Poster

ME, DEAD = "0a", "de"


@pytest.fixture
def folder(tmp_path: Path) -> JournalFolder:
    return JournalFolder(tmp_path)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything that is done now and then is done all the time."""
    for module, name in (
        (metering, "SYNC_EVERY_S"),
        (posting, "POST_EVERY_S"),
        (posting, "ROLL_UP_EVERY_S"),
        (posting, "FIRST_PAUSE_S"),
        (posting, "LAST_PAUSE_S"),
    ):
        monkeypatch.setattr(module, name, 0.001)


class FullJournal:
    """A journal on a disk that fills up and has room again."""

    def __init__(self, journal: JournalWriter) -> None:
        self.is_full = False
        self._journal = journal

    @property
    def is_dirty(self) -> bool:
        return self._journal.is_dirty

    def append(self, each: Opened | Progress | Closed) -> None:
        if self.is_full:
            raise JournalFull("no space")
        self._journal.append(each)

    def mend(self) -> bool:
        return self._journal.mend()

    def sync(self) -> None:
        self._journal.sync()


def read_rows(folder: JournalFolder, writer_id: str = ME) -> list[LedgerRow]:
    return JournalTail(folder, writer_id, is_finished=False).read().rows


def test_a_row_says_all_that_the_record_says() -> None:
    opened = opening("r", num_parts=2)
    row = row_of(record(opened, outcome="client_gone"))

    assert row == LedgerRow(
        request_id=opened.request_id,
        opened_at_ms=NOW_MS,
        closed_at_ms=NOW_MS + 500,
        organization_id=opened.organization_id,
        team_id=opened.team_id,
        key_id=opened.key_id,
        model="scripted",
        requested_model="alias",
        endpoint="chat",
        stream=True,
        request_class="interactive",
        outcome="client_gone",
        finish_reason="stop",
        error_code=None,
        prompt_tokens=20,
        cached_tokens=16,
        completion_tokens=8,
        queue_us=1,
        prefill_us=2,
        decode_us=3,
        preempted_us=4,
        parked_us=6,
        engine_us=5,
        ttft_us=250_000,
        total_us=500_000,
        cost_microusd=19,  # 4 x 0.5 + 16 x 0.05 + 8 x 2, rounded up once
        charges=(
            Charge(TOKEN_QUOTA.key, TOKEN_QUOTA.ends_at_ms, 28),
            Charge(MONEY_QUOTA.key, MONEY_QUOTA.ends_at_ms, 19),
        ),
    )


def test_a_request_without_price_and_quotas_costs_nothing_and_is_charged_for_none() -> None:
    row = row_of(record(msgspec.structs.replace(opening("r"), price=None, quotas=())))

    assert (row.cost_microusd, row.charges, row.completion_tokens) == (0, (), 8)


def test_a_request_is_on_disk_when_it_is_opened_and_when_it_is_settled(folder: JournalFolder) -> None:
    journal = JournalWriter(folder, ME)
    recorder = MeteringRecorder(journal, Clock())
    opened = opening("r")
    recorder.opened(opened, NOTHING_YET)
    assert JournalTail(folder, ME, is_finished=False).read().records == [Opened(opened)]
    assert recorder.is_open("r")
    recorder.settled(record(opened))
    assert read_rows(folder) == [row_of(record(opened))]
    assert not recorder.is_open("r")
    journal.close(remove=True)


async def test_a_request_can_be_found_until_it_is_in_the_ledger(folder: JournalFolder, quick: None) -> None:
    writer, storage = JournalWriter(folder, ME), MemoryStorage()
    recorder = MeteringRecorder(writer, Clock())
    poster = Poster(writer, storage, recorder.posted)
    opened = opening("r")
    assert recorder.find(opened.request_id) is None
    recorder.opened(opened, NOTHING_YET)
    assert recorder.find(opened.request_id) == opened
    recorder.settled(record(opened))
    assert recorder.find(opened.request_id) == row_of(record(opened))
    storage.is_down = True
    assert not await poster.drain(0.01)
    assert recorder.find(opened.request_id) == row_of(record(opened))
    storage.is_down = False
    assert await poster.drain(1)
    assert recorder.find(opened.request_id) is None
    assert storage.rows == {"r": row_of(record(opened))}
    writer.close(remove=True)


def test_settled_requests_are_not_kept_without_bound(folder: JournalFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metering, "MOST_UNPOSTED", 3)
    writer = JournalWriter(folder, ME)
    recorder = MeteringRecorder(writer, Clock())
    for i in range(5):
        recorder.settled(record(opening(f"r{i}")))
    assert [i for i in range(5) if recorder.find(RequestId(f"r{i}"))] == [2, 3, 4]
    writer.close(remove=True)


def test_a_full_disk_refuses_new_requests_and_keeps_settled_ones_in_order(
    folder: JournalFolder, caplog: pytest.LogCaptureFixture
) -> None:
    writer = JournalWriter(folder, ME)
    journal = FullJournal(writer)
    recorder = MeteringRecorder(journal, Clock())  # type: ignore[arg-type]
    running = [opening(f"r{i}") for i in range(3)]
    for each in running:
        recorder.opened(each, NOTHING_YET)
    journal.is_full = True
    with pytest.raises(Unavailable):
        recorder.opened(opening("refused"), NOTHING_YET)
    assert not recorder.is_open("refused")
    recorder.settled(record(running[0]))
    recorder.settled(record(running[1]))
    assert recorder.num_unwritten == 2
    assert "2 settled requests wait" in caplog.text
    journal.is_full = False
    recorder.settled(record(running[2]))
    assert [row.request_id for row in read_rows(folder)] == ["r0", "r1", "r2"]
    writer.close(remove=True)


async def test_what_the_disk_did_not_take_is_written_when_there_is_room(folder: JournalFolder, quick: None) -> None:
    writer = JournalWriter(folder, ME)
    journal = FullJournal(writer)
    recorder = MeteringRecorder(journal, Clock())  # type: ignore[arg-type]
    recorder.opened(opening("r"), NOTHING_YET)
    journal.is_full = True
    recorder.settled(record(opening("r")))
    task = asyncio.create_task(recorder.run())
    journal.is_full = False
    await until(lambda: not recorder.num_unwritten and not writer.is_dirty, "it is written and synced")
    task.cancel()
    await asyncio.wait([task])
    assert [row.request_id for row in read_rows(folder)] == ["r"]
    writer.close(remove=True)


async def test_what_long_requests_were_told_is_on_disk_about_once_a_second(folder: JournalFolder, quick: None) -> None:
    writer = JournalWriter(folder, ME)
    clock = Clock()
    recorder = MeteringRecorder(writer, clock)
    running = Told(5)
    recorder.opened(opening("r"), running)
    recorder.opened(opening("silent"), Told(0))
    task = asyncio.create_task(recorder.run())

    def told() -> list[int]:
        records = JournalTail(folder, ME, is_finished=False).read().records
        return [n for each in records if isinstance(each, Progress) for n in each.completion_tokens.values()]

    clock.now_s += 1.5
    await until(lambda: told() == [5], "progress is on disk")
    running.usage = TokenUsage(completion_tokens=9)
    clock.now_s += 1.5
    await until(lambda: told() == [5, 9], "newer progress is on disk")
    task.cancel()
    await asyncio.wait([task])
    writer.close(remove=True)


def test_a_request_that_metering_refuses_is_not_told_to_other_recorders(folder: JournalFolder) -> None:
    told: list[str] = []

    class Other:
        def opened(self, opened: Opening, running: Running) -> None:
            told.append(f"opened {opened.request_id}")

        def settled(self, settled: object) -> None:
            told.append("settled")

    writer = JournalWriter(folder, ME)
    journal = FullJournal(writer)
    both = Recorders(MeteringRecorder(journal, Clock()), Other())  # type: ignore[arg-type]
    both.opened(opening("a"), NOTHING_YET)
    both.settled(record(opening("a")))
    journal.is_full = True
    with pytest.raises(Unavailable):
        both.opened(opening("b"), NOTHING_YET)
    assert told == ["opened a", "settled"]
    writer.close(remove=True)


async def test_settled_requests_get_into_the_ledger_and_the_sums(folder: JournalFolder, quick: None) -> None:
    writer, storage = JournalWriter(folder, ME), MemoryStorage()
    recorder, poster = MeteringRecorder(writer, Clock()), Poster(writer, storage)
    task = asyncio.create_task(poster.run())
    for i in range(3):
        recorder.opened(opening(f"r{i}"), NOTHING_YET)
        recorder.settled(record(opening(f"r{i}")))
    await until(lambda: len(storage.rows) == 3 and not storage.queue, "all is posted and summed up")
    task.cancel()
    await asyncio.wait([task])
    assert await poster.drain(1)
    writer.close(remove=True)


async def test_rows_wait_for_the_database_as_long_as_it_takes(
    folder: JournalFolder, quick: None, caplog: pytest.LogCaptureFixture
) -> None:
    writer, storage = JournalWriter(folder, ME), MemoryStorage()
    recorder, poster = MeteringRecorder(writer, Clock()), Poster(writer, storage)
    storage.is_down = True
    task = asyncio.create_task(poster.run())
    for i in range(600):
        recorder.opened(opening(f"r{i}"), NOTHING_YET)
        recorder.settled(record(opening(f"r{i}")))
    await until(lambda: caplog.text.count("the database does not answer") >= 3, "posting has been tried")
    storage.is_down = False
    await until(lambda: len(storage.rows) == 600, "all is posted")
    assert storage.num_posts == 2  # of 500 at most
    task.cancel()
    await asyncio.wait([task])
    writer.close(remove=True)


async def test_a_process_that_cannot_post_leaves_its_journal_to_the_next(tmp_path: Path, quick: None) -> None:
    storage, finals = MemoryStorage(), Finals()
    storage.is_down = True
    first = Bookkeeping(tmp_path, storage, finals, Clock(), writer_id=DEAD, drain_s=0.05)
    async with first.running():
        first.recorder.opened(opening("r"), NOTHING_YET)
        first.recorder.settled(record(opening("r")))
    storage.is_down = False
    second = Bookkeeping(tmp_path, storage, finals, Clock(), writer_id=ME)
    async with second.running():
        await until(lambda: "r" in storage.rows, "it is posted")
        await until(lambda: JournalFolder(tmp_path).writers() == [ME], "the dead process' journal is gone")
    assert list(JournalFolder(tmp_path).path.iterdir()) == []


async def test_the_end_of_a_process_posts_what_was_settled_last(tmp_path: Path) -> None:
    storage = MemoryStorage()
    books = Bookkeeping(tmp_path, storage, Finals(), Clock(), writer_id=ME)
    async with books.running():
        books.recorder.opened(opening("r"), NOTHING_YET)
        books.recorder.settled(record(opening("r")))
    assert storage.rows == {"r": row_of(record(opening("r")))}
    assert list(JournalFolder(tmp_path).path.iterdir()) == []


async def test_damage_in_the_own_journal_stops_nothing_that_comes_after(folder: JournalFolder) -> None:
    writer, storage = JournalWriter(folder, ME), MemoryStorage()
    recorder, poster = MeteringRecorder(writer, Clock()), Poster(writer, storage)
    with folder.segments(ME)[0].path.open("ab") as file:
        file.write(b"\xff" * 20)
    await poster.drain(1)
    recorder.settled(record(opening("after")))
    assert not await poster.drain(1)
    assert set(storage.rows) == {"after"}
    writer.close(remove=False)


async def test_a_part_of_the_metering_that_fails_is_started_again(
    tmp_path: Path, quick: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(bookkeeping, "RETRY_S", 0.001)
    caplog.set_level(logging.INFO)
    storage = MemoryStorage()
    books = Bookkeeping(tmp_path, storage, Finals(), Clock(), writer_id=ME)

    class Broken:
        @property
        def usage(self) -> TokenUsage:
            raise KeyError("a bug")

    clock = books.recorder._clock
    assert isinstance(clock, Clock)
    async with books.running():
        books.recorder.opened(opening("r"), Broken())
        clock.now_s += 2
        await until(lambda: "started again" in caplog.text, "the task has failed")
        books.recorder.settled(record(opening("r")))
        await until(lambda: "r" in storage.rows, "it is posted")
