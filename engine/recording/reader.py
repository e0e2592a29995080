"""Reads a recording back, call by call, in memory of one call."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Self

import msgspec

from engine.errors import ConfigError
from engine.recording.format import VERSION, Header, Line, Planned, Stepped, Told
from engine.sched.plan import StepPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One call of the core.

    Attributes:
        line: where it begins in the file, counted from 1.
        clock: the times that it read, in order.
        plans: those it made, in order.
        end: the line that closes it; None if the recording ends within it.
    """

    line: int
    clock: tuple[int, ...]
    plans: tuple[StepPlan, ...]
    end: Told | Stepped | None


class _Version(msgspec.Struct):
    """The part of a header that every version has."""

    recording: int


class Recording:
    """An open recording. Reading it again takes opening it again; a context manager, which closes it.

    Attributes:
        is_torn: the last line is not whole, as a killed process leaves it. Known after the last call.
    """

    def __init__(self, path: Path) -> None:
        """Raises `ConfigError` if the file cannot be read, or is no recording that this version understands."""
        self.is_torn = False
        self._path = path
        self._decoder = msgspec.json.Decoder(Line)
        try:
            self._file: BinaryIO = path.open("rb")
        except OSError as e:
            raise ConfigError(f"cannot read the recording '{path}': {e.strerror}") from e
        try:
            self.header = self._read_header()
        except ConfigError:
            self._file.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def calls(self) -> Iterator[Call]:
        """Raises `ConfigError` for a line that is damaged."""
        number = 1
        clock: tuple[int, ...] = ()
        plans: list[StepPlan] = []
        for number, text in enumerate(self._lines(), start=2):
            first = number - len(plans)
            line, plan = self._decode(text, number)
            clock += line.clock
            if plan is not None:
                plans.append(plan)
            elif isinstance(line, Told) and plans:
                raise self._damaged(number, "a message within a step")
            else:
                assert not isinstance(line, Planned), "a plan stands in no other line"
                yield Call(line=first, clock=clock, plans=tuple(plans), end=line)
                clock, plans = (), []
        if plans:
            yield Call(line=number - len(plans) + 1, clock=clock, plans=tuple(plans), end=None)

    def _decode(self, text: bytes, number: int) -> tuple[Line, StepPlan | None]:
        try:
            line = self._decoder.decode(text)
            return line, line.plan.unpacked() if isinstance(line, Planned) else None
        except (ValueError, RecursionError) as e:
            raise self._damaged(number, str(e)) from e

    def _lines(self) -> Iterator[bytes]:
        """Those that are whole."""
        try:
            for text in self._file:
                if not text.endswith(b"\n"):
                    self.is_torn = True
                    return
                yield text
        except OSError as e:
            raise ConfigError(f"cannot read the recording '{self._path}': {e.strerror}") from e

    def _read_header(self) -> Header:
        text = next(self._lines(), b"")
        try:
            version = msgspec.json.decode(text, type=_Version).recording
        except (msgspec.DecodeError, RecursionError) as e:
            raise ConfigError(f"'{self._path}' is not the recording of an engine: it has no header") from e
        if version != VERSION:
            raise ConfigError(
                f"'{self._path}' is a recording of version {version}, which this evenhand cannot replay; it reads "
                f"version {VERSION}"
            )
        try:
            return msgspec.json.decode(text, type=Header)
        except (msgspec.DecodeError, RecursionError) as e:
            raise self._damaged(1, str(e)) from e

    def _damaged(self, number: int, why: str) -> ConfigError:
        return ConfigError(f"the recording '{self._path}' is damaged at line {number}: {why}")
