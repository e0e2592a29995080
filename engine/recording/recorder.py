"""Writes a recording of a core: `RecordingCore` stands between the server and an `EngineCore` that it has made.

Every line reaches the file by a write of its own, a plan's before it is computed, so a process that dies loses none.
Nothing is fsynced: a machine that dies loses some. A file that cannot be written any more ends the recording and never
the engine.
"""

from __future__ import annotations

import itertools
import logging
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec

from engine.config import EngineConfig
from engine.core import EngineCore, draw_seed
from engine.errors import ConfigError, RequestRejected
from engine.messages import Abort, ChargeExternal, Output, RaiseCap, SetWeight, Stats, Submit
from engine.recording.format import Header, Line, Message, PackedPlan, PackedResult, Planned, Stepped, Told, error_text
from engine.runner.port import PendingStep, Runner
from engine.sched.cost import CostModel
from engine.sched.plan import StepPlan, StepResult
from engine.standing import Standing

logger = logging.getLogger(__name__)


class RecordingFile:
    """Lines, each written at once. It holds prompts, so it is for its owner's eyes (mode 0600).

    A recording that is there already is kept as ``PATH.1``, the next one as ``PATH.2``: an engine that is started again
    after a crash does not write over what led to it.
    """

    def __init__(self, path: Path) -> None:
        """Raises `ConfigError` if the file cannot be written."""
        self._path = path
        self._encoder = msgspec.json.Encoder()
        try:
            _keep_earlier(path)
            self._descriptor: int | None = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            if stat.S_ISREG(os.fstat(self._descriptor).st_mode):
                os.fchmod(self._descriptor, 0o600)
        except OSError as e:
            raise ConfigError(f"engine.record: cannot write '{path}': {e.strerror}") from e

    def write(self, line: Header | Line) -> None:
        if self._descriptor is None:
            return
        rest = self._encoder.encode(line) + b"\n"
        try:
            while rest:
                rest = rest[os.write(self._descriptor, rest) :]
        except OSError as e:
            logger.error("the recording '%s' ends here: %s", self._path, e.strerror)  # noqa: TRY400 - a full disk
            self.close()

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


class RecordingCore:
    """A `server.Core`: an `EngineCore`, with every call that changes something written down.

    Args:
        runner: not closed by `close`.
        path: where the recording goes; as in `RecordingFile`.
        cost: what the policy of the configuration is told that steps cost.
    """

    def __init__(
        self,
        config: EngineConfig,
        runner: Runner,
        *,
        path: Path,
        max_model_len: int,
        eos_token_ids: tuple[int, ...],
        clock: Callable[[], int],
        cost: CostModel,
        draw_seed: Callable[[], int] = draw_seed,
    ) -> None:
        """Raises `ConfigError` if the file cannot be written."""
        self._engine_id = config.engine_id
        self._tape = _Tape(RecordingFile(path), clock, draw_seed)
        self._core = EngineCore(
            config,
            _RecordingRunner(runner, self._tape),
            max_model_len=max_model_len,
            eos_token_ids=eos_token_ids,
            clock=self._tape.read_clock,
            cost=cost,
            draw_seed=self._tape.draw_seed,
        )
        self.kv_capacity_tokens = self._core.kv_capacity_tokens
        self._tape.file.write(
            Header.of(config, runner, max_model_len=max_model_len, eos_token_ids=eos_token_ids, cost=cost)
        )

    def close(self) -> None:
        """Nothing more is written."""
        self._tape.file.close()

    def submit(self, message: Submit) -> None:
        with self._telling(message):
            self._core.submit(message)

    def abort(self, request_id: str) -> None:
        with self._telling(Abort(self._engine_id, request_id)):
            self._core.abort(request_id)

    def raise_cap(self, request_id: str, output_cap: int) -> None:
        with self._telling(RaiseCap(self._engine_id, request_id, output_cap)):
            self._core.raise_cap(request_id, output_cap)

    def set_weight(self, node_id: str, weight: int) -> None:
        with self._telling(SetWeight(self._engine_id, node_id, weight)):
            self._core.set_weight(node_id, weight)

    def charge_external(self, node_id: str, cost_us: int) -> None:
        with self._telling(ChargeExternal(self._engine_id, node_id, cost_us)):
            self._core.charge_external(node_id, cost_us)

    def step(self) -> list[Output]:
        self._tape.rewind()
        error = ""
        try:
            return self._core.step()
        except Exception as e:
            error = error_text(e)  # whatever it is, it stands in the recording when the server logs it
            raise
        finally:
            self._tape.file.write(Stepped(clock=self._tape.take_clock(), result=self._tape.result, error=error))

    @contextmanager
    def _telling(self, message: Message) -> Iterator[None]:
        self._tape.rewind()
        error = ""
        try:
            yield
        except RequestRejected:
            raise
        except Exception as e:
            error = error_text(e)  # as in `step`
            self._write_told(message, error)
            raise
        self._write_told(message, error)

    def _write_told(self, message: Message, error: str) -> None:
        tape = self._tape
        tape.file.write(Told(message=message, clock=tape.take_clock(), seed=tape.seed, error=error))

    # --- questions, which change nothing ------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        return self._core.has_work

    def stats(self) -> Stats:
        return self._core.stats()

    def standing(self, *request_ids: str) -> Standing:
        return self._core.standing(*request_ids)

    def check_integrity(self) -> None:
        self._core.check_integrity()


class _Tape:
    """What the core has read since the last line, and drawn and been given in this call."""

    def __init__(self, file: RecordingFile, clock: Callable[[], int], draw_seed: Callable[[], int]) -> None:
        self.file = file
        self.result: PackedResult | None = None
        self.seed: int | None = None
        self._clock = clock
        self._draw_seed = draw_seed
        self._times: list[int] = []

    def rewind(self) -> None:
        """A call begins; what questions have read before it does not count."""
        self._times.clear()
        self.seed = self.result = None

    def read_clock(self) -> int:
        now_us = self._clock()
        self._times.append(now_us)
        return now_us

    def draw_seed(self) -> int:
        self.seed = seed = self._draw_seed()
        return seed

    def take_clock(self) -> tuple[int, ...]:
        times = tuple(self._times)
        self._times.clear()
        return times


class _RecordingRunner:
    """A `Runner` in front of another."""

    def __init__(self, runner: Runner, tape: _Tape) -> None:
        self._runner = runner
        self._tape = tape

    @property
    def vocab_size(self) -> int:
        return self._runner.vocab_size

    @property
    def num_blocks(self) -> int:
        return self._runner.num_blocks

    def submit(self, plan: StepPlan) -> PendingStep:
        self._tape.file.write(Planned(plan=PackedPlan.of(plan), clock=self._tape.take_clock()))
        return _RecordingStep(self._runner.submit(plan), self._tape)

    def close(self) -> None:
        self._runner.close()


@dataclass(frozen=True, slots=True)
class _RecordingStep:
    pending: PendingStep
    tape: _Tape

    def wait(self) -> StepResult:
        result = self.pending.wait()
        self.tape.result = PackedResult.of(result)
        return result


def _keep_earlier(path: Path) -> None:
    """A device or a pipe is written to as it is, and an empty file holds nothing."""
    if not path.is_file() or not path.stat().st_size:
        return
    path.rename(next(kept for n in itertools.count(1) if not (kept := path.with_name(f"{path.name}.{n}")).exists()))
