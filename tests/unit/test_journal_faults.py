"""Journals whose files are removed, moved or cut while they are written, and folders with things that are not ours."""

from __future__ import annotations

import asyncio
import os
import shutil
import threading
from pathlib import Path

import pytest
from client_kit import until
from metering_kit import NOTHING_YET, Clock, Finals, MemoryStorage, Told, opening, record

from gateway.errors import Unavailable
from gateway.journal import writer as writer_module
from gateway.journal.folder import JournalFolder
from gateway.journal.records import Closed, Opened
from gateway.journal.tail import JournalTail
from gateway.journal.writer import JournalFull, JournalWriter
from gateway.services import metering, posting
from gateway.services.metering import MeteringRecorder, row_of
from gateway.services.posting import Poster
from gateway.services.recovery import Recovery

ME, DEAD = "0a", "de"


@pytest.fixture
def folder(tmp_path: Path) -> JournalFolder:
    return JournalFolder(tmp_path)


def settle(recorder: MeteringRecorder, *names: str) -> None:
    for name in names:
        recorder.opened(opening(name), NOTHING_YET)
        recorder.settled(record(opening(name)))


def recovered(folder: JournalFolder, storage: MemoryStorage, name: str = "0b") -> Recovery:
    return Recovery(folder, storage, Finals(), Clock(), writer_id=name, is_open=lambda _: False)


@pytest.mark.parametrize("is_moved", [False, True])
async def test_a_folder_that_is_removed_under_a_running_process_costs_no_row(
    folder: JournalFolder, caplog: pytest.LogCaptureFixture, is_moved: bool
) -> None:
    writer, storage = JournalWriter(folder, ME), MemoryStorage()
    recorder, poster = MeteringRecorder(writer, Clock()), Poster(writer, storage)
    settle(recorder, "posted")
    await poster._post_some()
    settle(recorder, "waiting")
    if is_moved:
        folder.path.rename(folder.path.with_name("elsewhere"))
    else:
        shutil.rmtree(folder.path)
    settle(recorder, "after")
    for _ in range(3):
        await recorder.flush()
    assert folder.is_alive(ME)
    assert caplog.text.count("files of the journal were removed") == 1
    settle(recorder, "later")
    assert await poster.drain(1)
    assert set(storage.rows) == {"posted", "waiting", "after", "later"}
    assert storage.num_conflicts == 0
    writer.close(remove=True)
    assert list(folder.path.iterdir()) == []


async def test_files_that_wait_for_their_last_sync_are_rescued_too(folder: JournalFolder) -> None:
    writer, storage = JournalWriter(folder, ME, segment_bytes=1), MemoryStorage()
    recorder = MeteringRecorder(writer, Clock())
    settle(recorder, "a", "b", "c")
    shutil.rmtree(folder.path)
    await recorder.flush()
    assert await Poster(writer, storage).drain(1)
    assert set(storage.rows) == {"a", "b", "c"}
    writer.close(remove=True)


async def test_requests_that_run_while_the_folder_is_removed_are_settled_after_a_crash(folder: JournalFolder) -> None:
    writer, storage = JournalWriter(folder, ME), MemoryStorage()
    recorder, clock = MeteringRecorder(writer, clock := Clock()), clock
    recorder.opened(opening("running"), Told(7))
    await recorder.flush()
    writer.seal()
    await recorder.flush()  # nothing of the first file is open any more
    shutil.rmtree(folder.path)
    await recorder.flush()
    clock.now_s += 5
    recorder._write_progress()
    writer.close(remove=False)  # as a crash does
    assert await recovered(folder, storage).look() == 0
    assert {name: (row.outcome, row.completion_tokens) for name, row in storage.rows.items()} == {
        "running": ("lost", 7)
    }


async def test_a_lock_that_is_removed_is_taken_again(folder: JournalFolder) -> None:
    writer, storage = JournalWriter(folder, ME), MemoryStorage()
    recorder = MeteringRecorder(writer, Clock())
    recorder.opened(opening("running"), NOTHING_YET)
    folder.lock_path(ME).unlink()
    await recorder.flush()
    assert folder.is_alive(ME)
    await recovered(folder, storage).look()
    assert storage.rows == {}
    writer.close(remove=True)
    assert list(folder.path.iterdir()) == []


async def test_while_the_folder_cannot_be_made_again_requests_are_refused(folder: JournalFolder) -> None:
    writer, storage = JournalWriter(folder, ME), MemoryStorage()
    recorder = MeteringRecorder(writer, Clock())
    recorder.opened(opening("running"), NOTHING_YET)
    settle(recorder, "before")
    shutil.rmtree(folder.path)
    folder.path.touch()
    await recorder.flush()
    assert not recorder.readiness().is_ready
    with pytest.raises(Unavailable):
        recorder.opened(opening("refused"), NOTHING_YET)
    recorder.settled(record(opening("running")))
    assert recorder.num_unwritten == 1
    folder.path.unlink()
    await recorder.flush()
    assert recorder.readiness().is_ready
    assert await Poster(writer, storage).drain(1)
    assert set(storage.rows) == {"running", "before"}
    writer.close(remove=True)


async def test_a_rescue_that_fails_on_the_way_leaves_nothing_behind(
    folder: JournalFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer, storage = JournalWriter(folder, ME, segment_bytes=1), MemoryStorage()
    settle(MeteringRecorder(writer, Clock()), "a", "b")
    shutil.rmtree(folder.path)
    sizes: list[int] = []
    write = os.write

    def second_fails(descriptor: int, data: bytes) -> int:
        sizes.append(len(data))
        if len(sizes) == 2:
            raise OSError(28, "No space left on device")
        return write(descriptor, data)

    with monkeypatch.context() as patch:
        patch.setattr(writer_module.os, "write", second_fails)
        with pytest.raises(JournalFull):
            writer.mend()
    assert folder.segments(ME) == []
    assert writer.mend()
    assert await Poster(writer, storage).drain(1)
    assert set(storage.rows) == {"a", "b"}
    writer.close(remove=True)


@pytest.mark.parametrize("left", [0, 5, 100])
@pytest.mark.parametrize("is_noticed_first", [True, False])
async def test_a_journal_that_is_cut_goes_on_in_a_new_file(
    folder: JournalFolder, caplog: pytest.LogCaptureFixture, left: int, is_noticed_first: bool
) -> None:
    writer, storage = JournalWriter(folder, ME), MemoryStorage()
    recorder, poster = MeteringRecorder(writer, Clock()), Poster(writer, storage)
    recorder.opened(opening("running"), NOTHING_YET)
    settle(recorder, "posted")
    await poster._post_some()
    os.truncate(folder.segments(ME)[0].path, left)
    if is_noticed_first:
        await recorder.flush()
    settle(recorder, "after")
    await recorder.flush()
    await recorder.flush()
    assert caplog.text.count("somebody else has changed the journal") == 1
    assert writer.number == 2
    await poster.drain(1)
    assert set(storage.rows) == {"posted", "after"}
    writer.close(remove=False)


def test_a_closed_journal_takes_nothing(folder: JournalFolder) -> None:
    writer = JournalWriter(folder, ME, segment_bytes=1)
    recorder = MeteringRecorder(writer, Clock())
    settle(recorder, "a")
    recorder.opened(opening("late"), NOTHING_YET)
    writer.close(remove=True)
    with pytest.raises(JournalFull):
        writer.append(Opened(opening("b")))
    with pytest.raises(JournalFull):
        writer.seal()
    recorder.settled(record(opening("late")))
    assert recorder.num_unwritten == 1
    writer.sync()
    assert not writer.mend()
    assert list(folder.path.iterdir()) == []


def test_closing_waits_for_a_sync_that_is_under_way(folder: JournalFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = JournalWriter(folder, ME)
    writer.append(Closed(row_of(record(opening("a")))))
    began, may_end, is_closed = threading.Event(), threading.Event(), threading.Event()
    fsync, errors = os.fsync, []

    def slow(descriptor: int) -> None:
        began.set()
        assert may_end.wait(10)
        fsync(descriptor)

    def sync() -> None:
        try:
            writer.sync()
        except OSError as e:
            errors.append(e)

    def close() -> None:
        writer.close(remove=False)
        is_closed.set()

    monkeypatch.setattr(writer_module.os, "fsync", slow)
    threads = [threading.Thread(target=sync), threading.Thread(target=sync), threading.Thread(target=close)]
    threads[0].start()
    assert began.wait(10)
    for thread in threads[1:]:
        thread.start()
    assert not is_closed.wait(0.05)
    may_end.set()
    for thread in threads:
        thread.join(10)
    assert is_closed.is_set()
    assert errors == []


@pytest.fixture
def room(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """The longest record that the disk takes."""
    state = {"bytes": 1 << 30}
    write = os.write

    def limited(descriptor: int, data: bytes) -> int:
        if len(data) > state["bytes"]:
            raise OSError(28, "No space left on device")
        return write(descriptor, data)

    monkeypatch.setattr(writer_module.os, "write", limited)
    return state


async def test_a_process_whose_journal_takes_nothing_is_not_ready_until_it_does(
    folder: JournalFolder, room: dict[str, int], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(metering, "SYNC_EVERY_S", 0.001)
    writer = JournalWriter(folder, ME)
    recorder = MeteringRecorder(writer, Clock())
    assert recorder.readiness() == (True, "")
    room["bytes"] = 0
    with pytest.raises(Unavailable):
        recorder.opened(opening("refused"), NOTHING_YET)
    assert recorder.readiness() == (False, "the journal takes no records: error 28")
    room["bytes"] = 500  # a small record fits, but soon no other
    await recorder.flush()
    assert not recorder.readiness().is_ready
    task = asyncio.create_task(recorder.run())
    room["bytes"] = 1 << 30
    await until(lambda: recorder.readiness().is_ready, "it is ready again")
    assert "the journal takes records again" in caplog.text
    task.cancel()
    await asyncio.wait([task])
    writer.close(remove=True)


async def test_rows_that_wait_make_a_process_not_ready(folder: JournalFolder, room: dict[str, int]) -> None:
    writer = JournalWriter(folder, ME)
    recorder = MeteringRecorder(writer, Clock())
    recorder.opened(opening("r"), NOTHING_YET)
    room["bytes"] = 0
    recorder.settled(record(opening("r")))
    assert not recorder.readiness().is_ready
    room["bytes"] = 1 << 30
    await recorder.flush()
    assert (recorder.readiness().is_ready, recorder.num_unwritten) == (True, 0)
    assert [row.request_id for row in JournalTail(folder, ME, is_finished=True).read().rows] == ["r"]
    writer.close(remove=True)


async def test_a_lock_that_cannot_be_opened_keeps_no_other_journal_from_being_recovered(
    folder: JournalFolder, caplog: pytest.LogCaptureFixture
) -> None:
    writer = JournalWriter(folder, DEAD)
    writer.append(Opened(opening("r")))
    writer.close(remove=False)
    (folder.path / "aaac.lock").mkdir()
    storage = MemoryStorage()
    one = recovered(folder, storage)
    for _ in range(3):
        assert await one.look() == 0
    assert set(storage.rows) == {"r"}
    assert caplog.text.count("journal aaac") == 1


async def test_a_journal_that_cannot_be_read_is_complained_of_once(
    folder: JournalFolder, caplog: pytest.LogCaptureFixture
) -> None:
    folder.create()
    (folder.path / "aa-000001.journal").mkdir()
    storage = MemoryStorage()
    one = recovered(folder, storage)
    for _ in range(3):
        assert await one.look() == 1
    one.release()
    assert caplog.text.count("the recovery of journal aa failed") == 1


async def test_a_damaged_file_that_is_gone_stops_nothing(folder: JournalFolder, quick: None) -> None:
    writer, storage = JournalWriter(folder, ME), MemoryStorage()
    recorder, poster = MeteringRecorder(writer, Clock()), Poster(writer, storage)
    path = folder.segments(ME)[0].path
    with path.open("ab") as file:
        file.write(b"\xff" * 20)
    await poster._post_some()  # finds it and leaves the file
    path.unlink()
    settle(recorder, "after")
    await poster.drain(1)
    assert set(storage.rows) == {"after"}
    writer.close(remove=False)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(posting, "POST_EVERY_S", 0.001)
