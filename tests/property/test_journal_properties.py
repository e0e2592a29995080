"""A crash at any byte: every request that was opened has exactly one row in the end, the right one."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path

from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from metering_kit import Clock, Crash, Final, Finals, MemoryStorage, opening, record

from gateway.domain.usage import TokenUsage
from gateway.journal.folder import JournalFolder
from gateway.journal.records import MAGIC, Closed, Opened, Progress, Record, RecordEncoder
from gateway.journal.tail import JournalTail
from gateway.journal.writer import JournalWriter
from gateway.services.metering import row_of
from gateway.services.recovery import Recovery

DEAD = "dead"

# An event is a request's number: its first one opens it, the second closes it, more are progress in between.
events = st.lists(st.integers(0, 7), max_size=24)


def records_of(numbers: list[int]) -> list[Record]:
    seen: dict[int, int] = {}
    records: list[Record] = []
    for number in numbers:
        opened = opening(f"r{number}")
        turn = seen[number] = seen.get(number, 0) + 1
        if turn == 1:
            records.append(Opened(opened))
        elif turn == 2:
            records.append(Progress({opened.request_id: 3}))
        elif turn == 3:
            records.append(Closed(row_of(record(opened))))
    return records


def written(folder: JournalFolder, records: list[Record], segment_bytes: int) -> None:
    writer = JournalWriter(folder, DEAD, segment_bytes=segment_bytes)
    for each in records:
        writer.append(each)
    writer.close(remove=False)


def cut(folder: JournalFolder, records: list[Record], at: int) -> list[Record]:
    """Cut the last file at some byte; the records that are whole before it."""
    last = folder.segments(DEAD)[-1].path
    size = last.stat().st_size
    at = size - at % (size + 1)
    with last.open("r+b") as file:
        file.truncate(at)
    ends, size = [], len(MAGIC)
    num_before = sum(len(_all(folder, segment.number)) for segment in folder.segments(DEAD)[:-1])
    encoder = RecordEncoder()
    for each in records[num_before:]:
        size += len(encoder.encode(each))
        ends.append(size)
    return records[: num_before + sum(end <= at for end in ends)]


def _all(folder: JournalFolder, number: int) -> list[Record]:
    tail = JournalTail(folder, DEAD, is_finished=True, keeps_files=True)
    found: list[Record] = []
    is_last = False
    while not is_last:
        batch = tail.read()
        if batch.number == number:
            found += batch.records
        tail.commit(batch)
        is_last = batch.is_last
    return found


def recovery(folder: JournalFolder, storage: MemoryStorage, finals: Finals, name: str) -> Recovery:
    return Recovery(folder, storage, finals, Clock(), writer_id=name, is_open=lambda _: False)


@settings(max_examples=examples(300), deadline=None)
@given(
    numbers=events,
    segment_bytes=st.sampled_from([1, 2000, 1 << 20]),
    at=st.integers(0, 10_000),
    crashes=st.lists(st.tuples(st.booleans(), st.integers(1, 3)), max_size=3),
    already_posted=st.booleans(),
    known=st.sets(st.integers(0, 7)),
)
def test_a_crash_at_any_byte_leaves_each_opened_request_exactly_one_row(
    numbers: list[int],
    segment_bytes: int,
    at: int,
    crashes: list[tuple[bool, int]],
    already_posted: bool,
    known: set[int],
) -> None:
    with tempfile.TemporaryDirectory() as home:
        folder, storage = JournalFolder(Path(home)), MemoryStorage()
        records = records_of(numbers)
        written(folder, records, segment_bytes)
        whole = cut(folder, records, at)
        closed = {each.row.request_id: each.row for each in whole if isinstance(each, Closed)}
        opened = {each.opening.request_id: each.opening for each in whole if isinstance(each, Opened)}
        told = {name: n for each in whole if isinstance(each, Progress) for name, n in each.completion_tokens.items()}
        if already_posted:
            storage.rows.update(closed)
        finals = Finals({DEAD: [Final(f"r{number}", completion_tokens=5) for number in sorted(known)]})

        for is_before, which in crashes:
            storage.crash_before = storage.num_commits + which if is_before else None
            storage.crash_after = None if is_before else storage.num_commits + which
            one = recovery(folder, storage, finals, "a")
            try:
                asyncio.run(one.look())
            except Crash:
                pass
            finally:
                one.release()  # as the kernel does
        storage.crash_before = storage.crash_after = None

        assert asyncio.run(recovery(folder, storage, finals, "b").look()) == 0
        assert storage.rows.keys() == opened.keys()
        for name, row in storage.rows.items():
            if name in closed:
                assert row == closed[name]
            else:
                assert row.outcome == "lost"
                assert row.prompt_tokens == opened[name].prompt_tokens
                assert row.completion_tokens == (5 if int(name[1:]) in known else told.get(name, 0))
            usage = TokenUsage(row.prompt_tokens, row.completion_tokens, row.cached_tokens)
            assert (row.cost_microusd, row.charges) == (opened[name].cost_microusd(usage), opened[name].charges(usage))
            assert [charge.units for charge in row.charges] == [usage.total_tokens, row.cost_microusd]
        assert storage.num_conflicts == 0
        assert list(folder.path.iterdir()) == []
        assert finals.kept[DEAD] == []
