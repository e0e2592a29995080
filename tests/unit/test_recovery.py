"""The recovery over a ledger in memory: what dead processes have left is settled once, with what the engines say."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest
from metering_kit import (
    MONEY_QUOTA,
    TIMINGS,
    TOKEN_QUOTA,
    Clock,
    Crash,
    Final,
    Finals,
    MemoryStorage,
    opening,
    record,
)

from engine.client import CollectedFinals
from engine.messages import FinalCounts, Timings
from gateway.backends.local_finals import LocalFinals
from gateway.domain.usage import EngineTimings
from gateway.journal.folder import JournalFolder
from gateway.journal.records import Closed, Opened, Progress
from gateway.journal.writer import JournalWriter
from gateway.services.metering import row_of
from gateway.services.recovery import Recovery

ME, DEAD = "0a", "de"


@pytest.fixture
def folder(tmp_path: Path) -> JournalFolder:
    return JournalFolder(tmp_path)


def left_by_a_dead_process(folder: JournalFolder, *records: Opened | Progress | Closed) -> None:
    writer = JournalWriter(folder, DEAD)
    for each in records:
        writer.append(each)
    writer.close(remove=False)


def recovery(folder: JournalFolder, storage: MemoryStorage, finals: Finals, clock: Clock | None = None) -> Recovery:
    return Recovery(
        folder, storage, finals, clock or Clock(), writer_id=ME, is_open=lambda name: name == "mine-running"
    )


async def test_a_lost_request_is_charged_what_the_engine_says(folder: JournalFolder) -> None:
    opened = opening("r")
    left_by_a_dead_process(folder, Opened(opened), Progress({opened.request_id: 3}))
    storage = MemoryStorage()
    finals = Finals({DEAD: [Final("r", completion_tokens=11, cached_tokens=16, finish_reason="length")]})

    assert await recovery(folder, storage, finals).look() == 0
    (row,) = storage.rows.values()
    assert (row.outcome, row.finish_reason, row.error_code) == ("lost", "length", None)
    assert (row.prompt_tokens, row.cached_tokens, row.completion_tokens) == (20, 16, 11)
    assert row.cost_microusd == 25  # 4 x 0.5 + 16 x 0.05 + 11 x 2, rounded up once
    assert [(charge.key, charge.units) for charge in row.charges] == [(TOKEN_QUOTA.key, 31), (MONEY_QUOTA.key, 25)]
    assert row.timings == TIMINGS
    assert (row.ttft_us, row.total_us) == (None, None)
    assert finals.kept[DEAD] == []
    assert list(folder.path.iterdir()) == []


async def test_parts_are_added_up_and_their_times_are_of_the_longest(folder: JournalFolder) -> None:
    left_by_a_dead_process(folder, Opened(opening("r", num_parts=3)))
    storage = MemoryStorage()
    timings = EngineTimings(queue_us=TIMINGS.passed_us - 1, engine_us=7)
    parts = [
        Final("r-0", completion_tokens=4, finish_reason="stop"),
        Final("r-2", completion_tokens=5, finish_reason="stop", timings=timings),
        Final("r", completion_tokens=100),
    ]
    await recovery(folder, storage, Finals({DEAD: parts})).look()
    row = storage.rows["r"]
    assert (row.completion_tokens, row.finish_reason) == (9, "stop")
    assert row.timings == msgspec.structs.replace(TIMINGS, engine_us=TIMINGS.engine_us + 7)


async def test_engines_that_have_not_told_everything_are_waited_for(folder: JournalFolder) -> None:
    left_by_a_dead_process(folder, Opened(opening("early")), Opened(opening("late")))
    storage, clock = MemoryStorage(), Clock()
    finals = Finals({DEAD: [Final("early", completion_tokens=1)]}, is_complete=False)
    one = recovery(folder, storage, finals, clock)
    assert await one.look() == 1
    assert set(storage.rows) == {"early"}
    clock.now_s += 5
    finals.kept[DEAD].append(Final("late", completion_tokens=2))
    assert await one.look() == 1
    assert set(storage.rows) == {"early", "late"}
    finals.is_complete = True
    assert await one.look() == 0
    assert storage.rows["late"].completion_tokens == 2
    assert finals.kept[DEAD] == []


async def test_engines_that_never_answer_are_waited_for_only_so_long(folder: JournalFolder) -> None:
    left_by_a_dead_process(folder, Opened(opening("r")), Progress({opening("r").request_id: 3}))
    storage, clock = MemoryStorage(), Clock()
    one = recovery(folder, storage, Finals(is_complete=False), clock)
    clock.now_s += 100
    assert await one.look() == 1
    clock.now_s += 29
    assert await one.look() == 1
    assert storage.rows == {}
    clock.now_s += 2
    assert await one.look() == 0
    assert storage.rows["r"].completion_tokens == 3


async def test_a_row_that_the_dead_process_has_posted_stays_as_it_is(folder: JournalFolder) -> None:
    left_by_a_dead_process(folder, Opened(opening("r")))  # its closing was in a file that is gone
    storage = MemoryStorage()
    row = storage.rows["r"] = row_of(record(opening("r")))
    await recovery(folder, storage, Finals({DEAD: [Final("r")]})).look()
    assert storage.rows == {"r": row}
    assert storage.num_posts == 0


async def test_two_recoveries_at_once_settle_everything_once(folder: JournalFolder) -> None:
    left_by_a_dead_process(
        folder, *(Opened(opening(f"r{i}")) for i in range(20)), Closed(row_of(record(opening("r0"))))
    )
    storage = MemoryStorage()
    first, second = recovery(folder, storage, Finals()), recovery(folder, storage, Finals())
    await asyncio.gather(first.look(), second.look())
    assert len(storage.rows) == 20
    assert storage.num_conflicts == 0
    assert list(folder.path.iterdir()) == []


async def test_a_recovery_that_stops_half_way_leaves_the_rest_to_another(folder: JournalFolder) -> None:
    left_by_a_dead_process(folder, Closed(row_of(record(opening("closed")))), Opened(opening("open")))
    storage, finals = MemoryStorage(), Finals(is_complete=False)
    storage.crash_after = 1
    first = recovery(folder, storage, finals)
    with pytest.raises(Crash):
        await first.look()
    assert set(storage.rows) == {"closed"}
    second = recovery(folder, storage, Finals())
    assert await second.look() == 0
    assert "open" not in storage.rows
    first.release()
    assert await second.look() == 0
    assert set(storage.rows) == {"closed", "open"}


async def test_a_living_process_is_left_alone(folder: JournalFolder) -> None:
    writer = JournalWriter(folder, DEAD)
    writer.append(Opened(opening("r")))
    storage = MemoryStorage()
    assert await recovery(folder, storage, Finals()).look() == 0
    assert storage.rows == {}
    writer.close(remove=False)


async def test_the_journal_waits_while_the_database_is_down(
    folder: JournalFolder, caplog: pytest.LogCaptureFixture
) -> None:
    left_by_a_dead_process(folder, Opened(opening("r")), Closed(row_of(record(opening("r")))))
    storage = MemoryStorage()
    storage.is_down = True
    one = recovery(folder, storage, Finals())
    assert await one.look() == 1
    assert "the database does not answer" in caplog.text
    storage.is_down = False
    assert await one.look() == 0
    assert set(storage.rows) == {"r"}


async def test_own_counts_are_forgotten_once_their_requests_are_settled(folder: JournalFolder) -> None:
    mine = [Final("settled"), Final("settled-1"), Final("mine-running"), Final("mine-running-0")]
    finals, clock = Finals({ME: mine}), Clock()
    one = recovery(folder, MemoryStorage(), finals, clock)
    await one.look()
    assert len(finals.kept[ME]) == 4
    clock.now_s += 10
    await one.look()
    assert [final.request_id for final in finals.kept[ME]] == ["mine-running", "mine-running-0"]


async def test_what_an_engine_says_is_taken_over_in_full() -> None:
    asked: list[tuple[object, str]] = []

    class Client:
        async def collect_finals(self, acknowledge: object = (), *, client_id: str = "") -> CollectedFinals:
            asked.append((acknowledge, client_id))
            counts = [
                FinalCounts(
                    request_id=finish,
                    num_prompt_tokens=5,
                    num_cached_tokens=4,
                    num_computed_tokens=3,
                    num_output_tokens=2,
                    finish=finish,
                    timings=Timings(queue_us=1, prefill_us=2, decode_us=3, preempted_us=4, engine_us=5, parked_us=6),
                )
                for finish in ("length", "abort")
            ]
            return CollectedFinals(counts, True)

    page = await LocalFinals(Client()).collect(DEAD, ["x"])
    assert asked == [(["x"], DEAD)]
    assert page.is_complete
    assert [final.finish_reason for final in page.finals] == ["length", ""]
    final = page.finals[0]
    assert (final.cached_tokens, final.completion_tokens) == (4, 2)
    assert msgspec.structs.astuple(final.timings) == (1, 2, 3, 4, 5, 6)
