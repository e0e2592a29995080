"""When the journal is made to survive a loss of power: soon after every append, and never for nothing."""

from __future__ import annotations

import asyncio
import os
import stat
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from client_kit import until
from metering_kit import NOTHING_YET, Clock, opening

from gateway.journal import writer as writer_module
from gateway.journal.folder import JournalFolder
from gateway.journal.writer import JournalWriter
from gateway.services import metering
from gateway.services.metering import MeteringRecorder

ME = "0a"
WITHIN_S = 0.3


class Disk:
    """Stands in for `os.fsync`.

    Attributes:
        syncs: the number of the segment that each call was for, or "folder".
        at_s: when the last one was, by `time.monotonic`.
        num_broken: calls from now on that fail.
    """

    def __init__(self, folder: JournalFolder) -> None:
        self._folder = folder
        self.syncs: list[int | str] = []
        self.at_s = 0.0
        self.num_broken = 0

    def fsync(self, descriptor: int) -> None:
        if self.num_broken:
            self.num_broken -= 1
            raise OSError(5, "broken")
        of = os.fstat(descriptor)
        segments = {segment.path.stat().st_ino: segment.number for segment in self._folder.segments(ME)}
        self.syncs.append("folder" if stat.S_ISDIR(of.st_mode) else segments[of.st_ino])
        self.at_s = time.monotonic()


class Rounds(Clock):
    """A clock that counts how often it is looked at, which the recorder does in each of its rounds."""

    num = 0

    def monotonic(self) -> float:
        self.num += 1
        return super().monotonic()

    async def pass_by(self, num: int) -> None:
        end = self.num + num
        await until(lambda: self.num >= end, "the recorder goes on")


@pytest.fixture
def folder(tmp_path: Path) -> JournalFolder:
    return JournalFolder(tmp_path)


@pytest.fixture
def disk(folder: JournalFolder, monkeypatch: pytest.MonkeyPatch) -> Disk:
    disk = Disk(folder)
    monkeypatch.setattr(writer_module.os, "fsync", disk.fsync)
    return disk


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metering, "SYNC_EVERY_S", 0.001)


@asynccontextmanager
async def running(writer: JournalWriter, clock: Clock) -> AsyncIterator[MeteringRecorder]:
    recorder = MeteringRecorder(writer, clock)
    task = asyncio.create_task(recorder.run())
    try:
        yield recorder
    finally:
        task.cancel()
        await asyncio.wait([task])
        writer.close(remove=True)


async def test_an_append_is_synced_soon(folder: JournalFolder, disk: Disk) -> None:
    """Each begins right after the sync before, so each waits for as long as one ever does; the quickest of them counts,
    since anything may hold up a process."""
    took_s = []
    async with running(JournalWriter(folder, ME), Clock()) as recorder:
        for i in range(4):
            disk.syncs.clear()
            began_s = time.monotonic()
            recorder.opened(opening(f"r{i}"), NOTHING_YET)
            await until(lambda: bool(disk.syncs), "it is synced")
            assert disk.syncs == [1]
            took_s.append(disk.at_s - began_s)
    assert min(took_s) < WITHIN_S


async def test_nothing_is_synced_while_nothing_is_appended(folder: JournalFolder, disk: Disk, quick: None) -> None:
    clock = Rounds()
    async with running(JournalWriter(folder, ME), clock) as recorder:
        disk.syncs.clear()
        await clock.pass_by(50)
        assert disk.syncs == []
        recorder.opened(opening("r"), NOTHING_YET)
        await until(lambda: bool(disk.syncs), "it is synced")
        await clock.pass_by(50)
        assert disk.syncs == [1]


async def test_what_is_appended_together_is_synced_at_once(folder: JournalFolder, disk: Disk, quick: None) -> None:
    clock = Rounds()
    async with running(JournalWriter(folder, ME), clock) as recorder:
        disk.syncs.clear()
        for i in range(500):
            recorder.opened(opening(f"r{i}"), NOTHING_YET)
        assert disk.syncs == [], "no request waits for the disk"
        await until(lambda: bool(disk.syncs), "they are synced")
        await clock.pass_by(50)
        assert disk.syncs == [1]


async def test_every_file_that_was_filled_is_synced_once(folder: JournalFolder, disk: Disk, quick: None) -> None:
    """With its name; whatever went on before, the last one comes last."""
    clock = Rounds()
    async with running(JournalWriter(folder, ME, segment_bytes=1), clock) as recorder:
        assert disk.syncs == ["folder"]
        for i in range(3):
            recorder.opened(opening(f"r{i}"), NOTHING_YET)
        assert disk.syncs == ["folder"] * 4
        await until(lambda: 4 in disk.syncs, "the last file is synced")
        await clock.pass_by(50)
        assert disk.syncs[4:] == [1, 2, 3, 4]
        recorder.opened(opening("later"), NOTHING_YET)
        await until(lambda: 5 in disk.syncs, "the next file is synced")
        assert disk.syncs[8:] == ["folder", 4, 5]


async def test_what_could_not_be_synced_is_synced_later(
    folder: JournalFolder, disk: Disk, quick: None, caplog: pytest.LogCaptureFixture
) -> None:
    async with running(JournalWriter(folder, ME), Clock()) as recorder:
        disk.syncs.clear()
        disk.num_broken = 2
        recorder.opened(opening("r"), NOTHING_YET)
        await until(lambda: bool(disk.syncs), "it is synced")
    assert disk.syncs == [1]
    assert caplog.text.count("the journal could not be synced (error 5)") == 2
