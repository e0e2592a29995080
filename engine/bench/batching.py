"""Static batches against continuous batching: the same engine, the same jobs, only the policy differs.

All jobs are submitted at once, so that work is waiting until the last ones are in. "Useful share" is measured while
work waits: of the sequence slots times step time, the part in which a slot computed something that was wanted.

Three ways to run the jobs:

- ``padded``: static batches as they are usually meant. A batch is one tensor until its longest answer is complete, so a
  slot whose answer is complete computes padding until then.
- ``static``: the same, but a slot whose answer is complete costs nothing any more; kinder than such servers are.
- ``continuous``: a slot is given to the next request at the next step.
"""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from engine.bench.workload import Job
from engine.config import EngineConfig
from engine.core import EngineCore
from engine.messages import Output, Submit
from engine.runner.port import PendingStep, Runner
from engine.sampling_params import SamplingParams
from engine.sched.plan import StepPlan

Batching = Literal["padded", "static", "continuous"]
_POLICIES: dict[Batching, str] = {"padded": "static", "static": "static", "continuous": "fcfs"}


@dataclass(frozen=True, slots=True)
class StepSample:
    """One step: when it began (seconds since the run began), how long it took, and what it held.

    Attributes:
        num_slots: requests that computed something that was wanted.
        num_waiting: requests without a slot when it was planned.
        num_blocks: KV blocks that requests held after it.
    """

    began_s: float
    elapsed_s: float
    num_slots: int
    num_waiting: int
    num_blocks: int


@dataclass(slots=True)
class _Timed:
    """A `Runner` that notes every plan it passes on."""

    runner: Runner
    plans: list[StepPlan] = field(default_factory=list)

    @property
    def vocab_size(self) -> int:
        return self.runner.vocab_size

    @property
    def num_blocks(self) -> int:
        return self.runner.num_blocks

    def submit(self, plan: StepPlan) -> PendingStep:
        self.plans.append(plan)
        return self.runner.submit(plan)

    def close(self) -> None:
        self.runner.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchingRun:
    """What one way of batching made of the jobs.

    Attributes:
        num_output_tokens: those that were wanted; padding does not count.
        reserved_window_blocks, reserved_cap_blocks: at the moment when most blocks were held: what reserving the whole
            window, or prompt plus longest allowed answer, for every resident request would have taken.
    """

    batching: Batching
    wall_s: float
    num_output_tokens: int
    ttft_s: list[float]
    gaps_s: list[float]
    steps: list[StepSample]
    max_sequences: int
    peak_blocks: int
    reserved_window_blocks: int
    reserved_cap_blocks: int

    @property
    def tokens_per_s(self) -> float:
        return self.num_output_tokens / self.wall_s

    def useful_share(self, *, only_while_work_waits: bool) -> float:
        """Slots that worked, of all slots, weighted by step time."""
        steps = [s for s in self.steps if s.num_waiting or not only_while_work_waits]
        total_s = sum(s.elapsed_s for s in steps)
        return sum(s.elapsed_s * s.num_slots for s in steps) / (total_s * self.max_sequences) if total_s else 0.0


def run_batching(
    batching: Batching,
    jobs: Sequence[Job],
    config: EngineConfig,
    runner: Runner,
    *,
    max_model_len: int,
    answer_cap: int,
    clock: Callable[[], float] = time.perf_counter,
) -> BatchingRun:
    """Run all jobs to their end, one way.

    Args:
        answer_cap: the longest answer a server would have to expect; for the memory comparison only.
        clock: seconds, monotonic.
    """
    timed = _Timed(runner)
    core = EngineCore(
        replace(config, policy=_POLICIES[batching], prefix_cache=False),
        timed,
        max_model_len=max_model_len,
        eos_token_ids=(),
        clock=lambda: int(clock() * 1e6),
    )
    diary = _Diary(jobs, config.block_tokens, max_model_len, answer_cap, began=clock())
    for i, (job, num_tokens) in enumerate(zip(jobs, _computed_lengths(batching, jobs, config), strict=True)):
        core.submit(_submit(config.engine_id, i, job, num_tokens))
    while core.has_work:
        num_waiting, step_began = core.stats().num_waiting, clock()
        outputs = core.step()
        stats = core.stats()
        diary.note(
            outputs,
            num_rows=len(timed.plans[-1].chunks),
            num_waiting=num_waiting,
            num_blocks=stats.num_blocks - stats.num_free_blocks,
            step_began=step_began,
            now=clock(),
        )
    return BatchingRun(
        batching=batching,
        wall_s=clock() - diary.began,
        num_output_tokens=sum(job.num_answer_tokens for job in jobs),
        ttft_s=sorted(diary.ttft_s),
        gaps_s=sorted(diary.gaps_s),
        steps=diary.steps,
        max_sequences=config.max_sequences,
        peak_blocks=diary.peak_blocks,
        reserved_window_blocks=diary.reserved_window_blocks,
        reserved_cap_blocks=diary.reserved_cap_blocks,
    )


class _Diary:
    """What a run looks like from outside, step by step."""

    def __init__(
        self, jobs: Sequence[Job], block_tokens: int, max_model_len: int, answer_cap: int, began: float
    ) -> None:
        self._jobs = jobs
        self._block_tokens = block_tokens
        self._window_blocks = self._num_blocks(max_model_len)
        self._answer_cap = answer_cap
        self._last_token: dict[str, float] = {}  # by request that has answered something and goes on
        self._num_answered: Counter[str] = Counter()
        self._padding: set[str] = set()  # answers that are complete and still computed
        self.began = began
        self.ttft_s: list[float] = []
        self.gaps_s: list[float] = []
        self.steps: list[StepSample] = []
        self.peak_blocks = self.reserved_window_blocks = self.reserved_cap_blocks = 0

    def note(
        self,
        outputs: Sequence[Output],
        *,
        num_rows: int,
        num_waiting: int,
        num_blocks: int,
        step_began: float,
        now: float,
    ) -> None:
        """One step and its outputs."""
        self.steps.append(
            StepSample(
                began_s=step_began - self.began,
                elapsed_s=now - step_began,
                num_slots=num_rows - len(self._padding),
                num_waiting=num_waiting,
                num_blocks=num_blocks,
            )
        )
        for output in (o for o in outputs if o.token_ids and o.request_id not in self._padding):
            self._num_answered[output.request_id] += len(output.token_ids)
            if self._num_answered[output.request_id] >= self._jobs[int(output.request_id)].num_answer_tokens:
                self._padding.add(output.request_id)
            if output.request_id in self._last_token:
                self.gaps_s.append(now - self._last_token[output.request_id])
            else:
                self.ttft_s.append(now - self.began)
            self._last_token[output.request_id] = now
        for output in (o for o in outputs if o.finish is not None):
            del self._last_token[output.request_id]
            self._padding.discard(output.request_id)
        if num_blocks > self.peak_blocks:
            self.peak_blocks = num_blocks
            resident = [self._jobs[int(request_id)] for request_id in self._last_token]
            self.reserved_window_blocks = len(resident) * self._window_blocks
            self.reserved_cap_blocks = sum(self._num_blocks(len(job.token_ids) + self._answer_cap) for job in resident)

    def _num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self._block_tokens)


def percentile(ordered: Sequence[float], share: float) -> float:
    """The value below which this share of the ordered values lies; 0.0 of nothing."""
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


def median_run(runs: Sequence[BatchingRun]) -> BatchingRun:
    """The run with the median throughput (the lower one of an even number)."""
    middle = statistics.median_low([run.tokens_per_s for run in runs])
    return next(run for run in runs if run.tokens_per_s == middle)


def _computed_lengths(batching: Batching, jobs: Sequence[Job], config: EngineConfig) -> list[int]:
    """Tokens that are computed for each answer; batches are formed in the order of the jobs."""
    lengths = [job.num_answer_tokens for job in jobs]
    if batching != "padded":
        return lengths
    size = config.max_sequences
    return [max(lengths[i // size * size : (i // size + 1) * size]) for i in range(len(lengths))]


def _submit(engine_id: str, index: int, job: Job, num_tokens: int) -> Submit:
    return Submit(
        engine_id=engine_id,
        request_id=str(index),
        token_ids=job.token_ids,
        sampling=SamplingParams(temperature=0.0, seed=index, ignore_eos=True),
        path=(),
        output_cap=num_tokens,
    )
