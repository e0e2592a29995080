"""Tells a core again what a recording says an engine was told, and holds every plan against the recorded one.

Nothing is computed: steps bring the tokens that they brought, the clock shows what it showed. The plans must come out
byte for byte, up to where the recording ends; the first difference ends the replay.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from pathlib import Path

import msgspec

from engine.config import BLOCK_TOKENS, EngineConfig
from engine.core import EngineCore
from engine.errors import ConfigError
from engine.messages import Abort, ChargeExternal, Output, RaiseCap, SetWeight, Submit
from engine.recording.format import Header, Message, Stepped, Told, error_text
from engine.recording.reader import Call, Recording
from engine.sched.plan import StepPlan, StepResult
from engine.sim.plan_diff import Submissions, diff
from engine.sim.recorded_run import RecordedRun
from engine.sim.trace import Run

_encoder = msgspec.json.Encoder()


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    """What became of a replay.

    Attributes:
        num_steps: plans that came out as recorded.
        difference: where they did not, and how; empty if all did.
        notes: what else is to be known of the recording, a sentence each.
        run: all that was replayed, for `figures.py`.
    """

    header: Header
    num_steps: int
    difference: str
    notes: tuple[str, ...]
    run: Run


def replay(path: Path) -> Replayed:
    """Raises `ConfigError` if the file cannot be read, or is no recording that this version can replay."""
    with Recording(path) as recording:
        return _Replay(recording, path.name).run()


class _DivergedError(Exception):
    """The core does not do what is recorded; the message says what it does."""


class _EndedError(Exception):
    """The core wants to know what the recording does not say any more."""


class _Replay:
    """One replay in progress."""

    def __init__(self, recording: Recording, name: str) -> None:
        header = recording.header
        if header.block_tokens != BLOCK_TOKENS:
            raise ConfigError(f"'{name}' has blocks of {header.block_tokens} tokens, this evenhand {BLOCK_TOKENS}")
        self._recording = recording
        self._submissions = Submissions()
        self._run = RecordedRun(name, header, self._submissions)
        self._runner = _RecordedRunner(header, self._submissions, self._run)
        self._core = EngineCore(
            EngineConfig(
                model=Path(header.model),
                engine_id=header.engine_id,
                policy=header.policy,
                max_sequences=header.max_sequences,
                max_step_tokens=header.max_step_tokens,
                prefix_cache=header.prefix_cache,
                plan_ahead=header.plans_ahead,
            ),
            self._runner,
            max_model_len=header.max_model_len,
            eos_token_ids=header.eos_token_ids,
            clock=self._runner.read_clock,
            cost=header.cost,
        )
        self._notes: list[str] = []

    def run(self) -> Replayed:
        difference = ""
        for call in self._recording.calls():
            try:
                is_over = self._play(call)
            except _DivergedError as e:
                difference = f"after {self._runner.num_steps} equal steps, at line {call.line}: {e}"
                break
            if is_over:
                break
        if self._recording.is_torn:
            self._notes.append("The last line of the recording is not whole and was left out.")
        return Replayed(
            header=self._recording.header,
            num_steps=self._runner.num_steps,
            difference=difference,
            notes=tuple(self._notes),
            run=self._run.finished(),
        )

    def _play(self, call: Call) -> bool:
        """True if the engine did not get beyond this call."""
        self._runner.load(call)
        recorded_error = call.end.error if call.end is not None else ""
        error = ""
        is_over = False
        try:
            self._make(call)
        except _DivergedError:
            raise
        except _EndedError as e:
            is_over, error = True, recorded_error
            self._notes.append(f"The recording ends while the engine {e}{f': {error}' if error else ''}.")
        except Exception as e:
            is_over, error = True, error_text(e)  # the engine's own failure, which may be just what is looked for
            if error != recorded_error:
                raise _DivergedError(f"the replay fails with {error}") from e
            self._notes.append(f"The engine fails as recorded: {error}.")
        self._runner.check_played()
        if error != recorded_error:
            raise _DivergedError(f"the engine failed with {recorded_error}, the replay does not")
        return is_over

    def _make(self, call: Call) -> None:
        if isinstance(call.end, Told):
            self._tell(call.end.message, call.end.seed)
            return
        outputs: list[Output] = self._core.step()
        self._run.stepped(outputs, self._runner.now_us)
        self._submissions.stepped(outputs)

    def _tell(self, message: Message, seed: int | None) -> None:
        core = self._core
        match message:
            case Submit():
                own = self._submissions.add(message, seed)
                core.submit(own)
                self._run.submitted(own, self._runner.now_us)
            case Abort(request_id=request_id):
                core.abort(request_id)
                self._run.aborted(request_id, self._runner.now_us)
            case RaiseCap(request_id=request_id, output_cap=output_cap):
                core.raise_cap(request_id, output_cap)
                self._run.cap_raised(request_id, output_cap)
            case SetWeight(node_id=node_id, weight=weight):
                core.set_weight(node_id, weight)
            case ChargeExternal(node_id=node_id, cost_us=cost_us):
                core.charge_external(node_id, cost_us)


@dataclass(frozen=True, slots=True)
class _RecordedStep:
    runner: _RecordedRunner
    plan: StepPlan

    def wait(self) -> StepResult:
        return self.runner.finish(self.plan)


class _RecordedRunner:
    """A `Runner` and a clock, for one recorded call after the other.

    Attributes:
        num_steps: plans that were equal.
        now_us: what the clock showed last.
    """

    def __init__(self, header: Header, submissions: Submissions, run: RecordedRun) -> None:
        self.vocab_size = header.vocab_size
        self.num_blocks = header.num_blocks
        self.num_steps = 0
        self.now_us = 0
        self._submissions = submissions
        self._run = run
        self._call: Call | None = None
        self._times: deque[int] = deque()
        self._plans: deque[StepPlan] = deque()

    def load(self, call: Call) -> None:
        self._call = call
        self._times = deque(call.clock)
        self._plans = deque(call.plans)

    def read_clock(self) -> int:
        if not self._times:
            if self._is_cut:
                raise _EndedError("takes a step")
            raise _DivergedError("the replay reads the clock more often than the engine did")
        self.now_us = self._times.popleft()
        return self.now_us

    def submit(self, plan: StepPlan) -> _RecordedStep:
        recorded = self._plans.popleft() if self._plans else None
        if recorded is None and self._is_cut:
            raise _EndedError("takes a step")
        if recorded is None or _encoder.encode(plan) != _encoder.encode(recorded):
            raise _DivergedError(diff(recorded, plan, self._submissions))
        self.num_steps += 1
        self._submissions.planned(plan)
        self._run.planned(plan)
        return _RecordedStep(self, plan)

    def finish(self, plan: StepPlan) -> StepResult:
        end = self._call.end if self._call is not None else None
        result = end.result if isinstance(end, Stepped) else None
        if result is None:
            if end is None or end.error:
                raise _EndedError(f"computes step {plan.step_id}")
            raise _DivergedError(f"the replay takes in step {plan.step_id}, the engine did not")
        self._run.computed(result.elapsed_us)
        return result.unpacked(plan)

    def check_played(self) -> None:
        """Raise `_DivergedError` if the engine did more in this call than the core."""
        if self._plans:
            raise _DivergedError(diff(self._plans[0], None, self._submissions))
        if self._times:
            raise _DivergedError("the replay reads the clock less often than the engine did")

    def close(self) -> None:
        """Holds nothing."""

    @property
    def _is_cut(self) -> bool:
        """The recording ends within this call."""
        return self._call is None or self._call.end is None
