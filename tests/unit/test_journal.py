"""The journal's files: what is written is read again, and nothing that is needed is removed."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import msgspec
import pytest
from metering_kit import opening, record

from gateway.domain.usage import TokenUsage
from gateway.journal import writer as writer_module
from gateway.journal.folder import JournalFolder, new_writer_id
from gateway.journal.records import Closed, Opened, Progress, RecordEncoder
from gateway.journal.tail import MAX_ROWS, JournalTail
from gateway.journal.writer import JournalFull, JournalWriter
from gateway.services.metering import row_of

ME = "0a"


@pytest.fixture
def folder(tmp_path: Path) -> JournalFolder:
    return JournalFolder(tmp_path)


def closed(name: str) -> Closed:
    return Closed(row_of(record(opening(name))))


def read_all(tail: JournalTail) -> list[str]:
    """Names of the closed requests, everything committed."""
    names, is_last = [], False
    while not is_last:
        batch = tail.read()
        names += [row.request_id for row in batch.rows]
        tail.commit(batch)
        is_last = batch.is_last
    return names


def test_what_was_appended_is_read(folder: JournalFolder) -> None:
    writer = JournalWriter(folder, ME)
    tail = JournalTail(folder, ME, is_finished=False)
    first, second = opening("a"), opening("b", num_parts=3)
    records = [Opened(first), Opened(second), Progress({second.request_id: 7}), closed("a")]
    for each in records:
        writer.append(each)

    batch = tail.read()
    assert batch.records == records
    assert batch.is_last
    assert tail.open == {}
    tail.commit(batch)
    assert [(each.opening, each.completion_tokens) for each in tail.open.values()] == [(second, 7)]
    writer.append(closed("b"))
    assert read_all(tail) == ["b"]
    assert tail.open == {}
    writer.close(remove=True)
    assert list(folder.path.iterdir()) == []


class OlderOpened(msgspec.Struct, tag="opened"):
    opening: dict[str, object]


class OlderClosed(msgspec.Struct, tag="closed"):
    row: dict[str, object]


@pytest.mark.parametrize(
    "missing",
    [{"cost_microusd": 0, "charges": ()}, {"parked_us": 0, "cost_microusd": 0, "charges": ()}],
    ids=["that charged nothing", "that did not park"],
)
def test_a_row_of_an_older_version_is_read(folder: JournalFolder, missing: dict[str, object]) -> None:
    row = msgspec.structs.asdict(closed("a").row)
    assert all(row.pop(name) != value for name, value in missing.items())
    writer = JournalWriter(folder, ME)
    writer.append(OlderClosed(row))  # type: ignore[arg-type]
    writer.append(closed("b"))

    tail = JournalTail(folder, ME, is_finished=False)
    assert tail.read().rows == [msgspec.structs.replace(closed("a").row, **missing), closed("b").row]
    assert tail.damaged == set()
    writer.close(remove=True)


def test_an_opening_of_a_version_without_quotas_is_read_and_costs_nothing(folder: JournalFolder) -> None:
    opened = msgspec.structs.asdict(opening("a"))
    del opened["price"], opened["quotas"]
    writer = JournalWriter(folder, ME)
    writer.append(OlderOpened(opened))  # type: ignore[arg-type]
    writer.append(Opened(opening("b")))

    tail = JournalTail(folder, ME, is_finished=False)
    tail.commit(tail.read())
    a, b = (request.opening for request in tail.open.values())
    assert a == msgspec.structs.replace(opening("a"), price=None, quotas=())
    assert (a.cost_microusd(TokenUsage(20, 8)), a.charges(TokenUsage(20, 8))) == (0, ())
    assert b == opening("b")
    writer.close(remove=True)


def test_what_was_read_and_not_committed_is_read_again(folder: JournalFolder) -> None:
    writer = JournalWriter(folder, ME)
    writer.append(closed("a"))
    tail = JournalTail(folder, ME, is_finished=False)

    assert tail.read().rows == tail.read().rows == [closed("a").row]
    writer.close(remove=False)


def test_many_rows_come_in_bounded_batches(folder: JournalFolder) -> None:
    writer = JournalWriter(folder, ME)
    names = [f"r{i}" for i in range(2 * MAX_ROWS + 1)]
    for name in names:
        writer.append(closed(name))
    tail = JournalTail(folder, ME, is_finished=False)

    assert len(tail.read().rows) == MAX_ROWS
    assert not tail.read().is_last
    assert read_all(tail) == names
    writer.close(remove=False)


def test_nobody_else_can_read_the_files(folder: JournalFolder) -> None:
    writer = JournalWriter(folder, ME)
    assert stat.S_IMODE(folder.path.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.path.iterdir()} == {0o600}
    writer.close(remove=False)


def test_a_sealed_file_goes_once_its_rows_are_committed_and_its_openings_are_closed(folder: JournalFolder) -> None:
    writer = JournalWriter(folder, ME, segment_bytes=1)  # every record has a file
    tail = JournalTail(folder, ME, is_finished=False)
    writer.append(Opened(opening("long")))
    for name in ("a", "b"):
        writer.append(Opened(opening(name)))
        writer.append(closed(name))
    assert read_all(tail) == ["a", "b"]
    # One file says that "long" was opened; the last one is being written.
    assert [segment.number for segment in folder.segments(ME)] == [2, writer.number]
    writer.append(Progress({opening("long").request_id: 9}))
    writer.append(closed("c"))
    assert read_all(tail) == ["c"]
    assert [segment.number for segment in folder.segments(ME)] == [2, writer.number - 1, writer.number]
    writer.append(closed("long"))
    assert read_all(tail) == ["long"]
    assert [segment.number for segment in folder.segments(ME)] == [writer.number]
    writer.close(remove=True)


def test_rows_that_are_not_committed_keep_their_file(folder: JournalFolder) -> None:
    writer = JournalWriter(folder, ME, segment_bytes=1)
    tail = JournalTail(folder, ME, is_finished=False)
    for name in ("a", "b"):
        writer.append(closed(name))
    tail.read()
    tail.read()
    assert len(folder.segments(ME)) == 2
    writer.close(remove=False)


def test_damage_ends_the_reading_of_its_file_only_and_the_file_is_kept(
    folder: JournalFolder, caplog: pytest.LogCaptureFixture
) -> None:
    writer = JournalWriter(folder, ME)
    for name in ("a", "b", "c"):
        writer.append(closed(name))
    writer.seal()
    writer.append(closed("d"))
    writer.close(remove=False)
    first = folder.segments(ME)[0].path
    data = bytearray(first.read_bytes())
    data[len(data) // 2] ^= 1  # in the middle of "b"
    first.write_bytes(data)
    tail = JournalTail(folder, ME, is_finished=True)

    assert read_all(tail) == ["a", "d"]
    assert "is damaged from byte" in caplog.text
    tail.remove_all()
    assert folder.damaged() == [first.with_name(f"{first.name}.damaged")]
    assert folder.segments(ME) == []


def test_a_file_of_another_format_is_not_removed(folder: JournalFolder) -> None:
    JournalWriter(folder, ME).close(remove=False)
    path = folder.segments(ME)[0].path
    path.write_bytes(b"EVHJRNL9" + b"x" * 100)
    tail = JournalTail(folder, ME, is_finished=True)
    assert read_all(tail) == []
    tail.remove_all()
    assert folder.damaged()[0].read_bytes().startswith(b"EVHJRNL9")


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> dict[str, int | None]:
    """A disk with this much room; None is no end of it."""
    state: dict[str, int | None] = {"room": None}
    write = os.write

    def limited(descriptor: int, data: bytes) -> int:
        room = state["room"]
        if room is None:
            return write(descriptor, data)
        if room == 0:
            raise OSError(28, "No space left on device")
        num = write(descriptor, memoryview(data)[:room])
        state["room"] = room - num
        return num

    monkeypatch.setattr(writer_module.os, "write", limited)
    return state


def test_a_record_that_fits_only_in_part_leaves_nothing_behind(
    folder: JournalFolder, disk: dict[str, int | None]
) -> None:
    writer = JournalWriter(folder, ME)
    tail = JournalTail(folder, ME, is_finished=False)
    writer.append(closed("a"))
    disk["room"] = 100
    for _ in range(3):
        with pytest.raises(JournalFull):
            writer.append(closed("b"))
    disk["room"] = None
    writer.append(closed("c"))
    assert read_all(tail) == ["a", "c"]
    writer.close(remove=True)


def test_no_room_for_a_new_file_is_no_loss_either(folder: JournalFolder, disk: dict[str, int | None]) -> None:
    writer = JournalWriter(folder, ME, segment_bytes=1)
    writer.append(closed("a"))
    disk["room"] = 3  # not even its head
    with pytest.raises(JournalFull):
        writer.append(closed("b"))
    disk["room"] = None
    writer.append(closed("c"))
    assert read_all(JournalTail(folder, ME, is_finished=False)) == ["a", "c"]
    writer.close(remove=True)


def test_sync_takes_in_all_files_and_appends_may_go_on(folder: JournalFolder) -> None:
    writer = JournalWriter(folder, ME, segment_bytes=1)
    for name in ("a", "b", "c"):
        writer.append(closed(name))
    assert writer.is_dirty
    writer.sync()
    assert not writer.is_dirty
    writer.append(closed("d"))
    assert writer.is_dirty
    writer.close(remove=True)


def test_a_journal_can_be_taken_over_only_once_its_writer_is_gone(folder: JournalFolder) -> None:
    writer = JournalWriter(folder, ME)
    assert folder.writers() == [ME]
    assert folder.is_alive(ME)
    assert folder.take_over(ME) is None
    writer.close(remove=False)
    assert not folder.is_alive(ME)
    lock = folder.take_over(ME)
    assert lock is not None
    assert folder.take_over(ME) is None
    lock.release(remove=False)
    again = folder.take_over(ME)
    assert again is not None
    again.release(remove=True)
    assert folder.take_over("ffff") is None


def test_what_a_dead_writer_left_is_known_to_all_until_it_is_posted(folder: JournalFolder) -> None:
    writer = JournalWriter(folder, ME)
    assert not folder.has_unposted()
    writer.close(remove=False)
    assert folder.has_unposted()
    lock = folder.take_over(ME)
    assert lock is not None
    assert folder.is_alive(ME)
    assert folder.has_unposted(), "whoever takes care of it has not posted it yet"
    lock.note_posted()
    assert not folder.has_unposted()
    lock.release(remove=False)
    assert folder.has_unposted(), "nobody can tell what the one before has done"


def test_a_journal_whose_lock_was_removed_is_taken_over_too(folder: JournalFolder) -> None:
    JournalWriter(folder, ME).close(remove=False)
    folder.lock_path(ME).unlink()
    lock = folder.take_over(ME)
    assert lock is not None
    lock.release(remove=True)


def test_writers_are_told_apart(folder: JournalFolder) -> None:
    names = {new_writer_id() for _ in range(100)}
    assert len(names) == 100
    first, second = JournalWriter(folder, "0a"), JournalWriter(folder, "0a1")
    first.append(closed("a"))
    assert read_all(JournalTail(folder, "0a1", is_finished=False)) == []
    first.close(remove=True)
    assert folder.writers() == ["0a1"]
    second.close(remove=True)


def test_an_encoder_can_be_used_again_after_a_longer_record() -> None:
    encoder = RecordEncoder()
    alone = bytes(RecordEncoder().encode(closed("a")))
    encoder.encode(Progress({opening(str(i)).request_id: i for i in range(1000)}))
    assert bytes(encoder.encode(closed("a"))) == alone
