"""Runs a workload: the engine's own core, scheduler, KV books and policy, over a clock that is only counted."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from heapq import heappop, heappush
from pathlib import Path

from engine.config import POLICIES, EngineConfig
from engine.core import EngineCore
from engine.errors import ConfigError, RequestRejected
from engine.messages import Output, Submit
from engine.sampling_params import SamplingParams
from engine.sched.calibration import load_calibration
from engine.sched.cost import PROFILES, CostModel
from engine.sim.policies import check_policy, make_baseline
from engine.sim.runner import Clock, SimulatedRunner
from engine.sim.trace import RequestTrace, Run
from engine.sim.workload import VOCAB_SIZE, Arrival, Workload

_IDLE_TICK_US = 1000
"""How long the clock waits before it asks a policy again that let nobody run though somebody waits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What a workload runs on.

    Attributes:
        max_step_tokens: token budget of a step; policies that know of promises stay below it.
        device: as in the engine's configuration.
        kv_tokens: size of the KV pool.
        max_sequences: slots; None takes as many as the workload is meant for.
    """

    cost: CostModel
    device: str = "cpu"
    max_step_tokens: int = 8192
    kv_tokens: int = 1 << 21
    max_sequences: int | None = None
    max_model_len: int = 1 << 18
    plan_ahead: bool = False

    @classmethod
    def of_profile(cls, name: str) -> Machine:
        """
        Args:
            name: of built-in figures, or the path of a file of `evenhand bench calibrate`.

        Raises:
            ConfigError: neither, or a file that is something else.
        """
        if name in PROFILES:
            return cls(cost=PROFILES[name], device="cpu" if name == "cpu" else "cuda")
        path = Path(name)
        if not path.exists():
            raise ConfigError(f"no profile '{name}'; there are {', '.join(PROFILES)}, or a file of bench calibrate")
        found = load_calibration(path)
        return cls(cost=found.cost, device=found.device)

    def engine_config(self, workload: Workload, policy: str) -> EngineConfig:
        """A policy that the engine does not have is replaced by one that it has: it is handed over instead."""
        return EngineConfig(
            model=Path("simulated"),
            device=self.device,
            policy=policy if policy in POLICIES else "fcfs",
            max_sequences=workload.max_sequences if self.max_sequences is None else self.max_sequences,
            max_step_tokens=self.max_step_tokens,
            plan_ahead=self.plan_ahead,
        )


def simulate(workload: Workload, policy: str, machine: Machine) -> Run:
    """The run of a workload under a policy. Raises `ConfigError` unless its name is one of `policies.policy_names`."""
    return _Simulation(workload, policy, machine).run()


class _Simulation:
    """One run in progress."""

    def __init__(self, workload: Workload, policy: str, machine: Machine) -> None:
        check_policy(policy)
        config = machine.engine_config(workload, policy)
        self._workload = workload
        self._policy_name = policy
        self._cost = machine.cost
        self._clock = Clock()
        self._runner = SimulatedRunner(self._clock, machine.cost, machine.kv_tokens // config.block_tokens)
        self._engine_id = config.engine_id
        self._core = EngineCore(
            config,
            self._runner,
            max_model_len=machine.max_model_len,
            eos_token_ids=(VOCAB_SIZE - 1,),
            clock=self._clock,
            policy=make_baseline(policy, config, machine.cost, workload, self._clock),
            cost=machine.cost,
        )
        self._requests: dict[int, RequestTrace] = {}
        self._followers: defaultdict[int, list[Arrival]] = defaultdict(list)
        self._due: list[tuple[int, int, Arrival]] = []  # a heap
        self._cancels: list[tuple[int, int]] = []  # a heap
        for arrival in workload.arrivals:
            if arrival.after is None:
                heappush(self._due, (arrival.at_us, arrival.id, arrival))
            else:
                self._followers[arrival.after].append(arrival)

    def run(self) -> Run:
        while self._clock.now_us < self._workload.until_us:
            self._take_due()
            num_steps = len(self._runner.steps)
            outputs = self._core.step() if self._core.has_work else []
            for output in outputs:
                self._note(output)
            if not outputs and len(self._runner.steps) == num_steps and not self._pass_idle_time():
                break
        self._core.check_integrity()
        return Run(
            workload=self._workload,
            policy=self._policy_name,
            cost=self._cost,
            requests=self._requests,
            steps=self._runner.steps,
            ended_us=self._clock.now_us,
            plans_digest=self._runner.plans_digest,
        )

    def _pass_idle_time(self) -> bool:
        """Nothing was computed: on to when something may have changed. False if nothing ever will."""
        events = [heap[0][0] for heap in (self._due, self._cancels) if heap]
        if self._core.has_work:
            events.append(self._clock.now_us + _IDLE_TICK_US)
        if not events:
            return False
        self._clock.now_us = max(self._clock.now_us, min(*events, self._workload.until_us))
        return True

    def _take_due(self) -> None:
        now_us = self._clock.now_us
        while self._due and self._due[0][0] <= now_us:
            arrived_us, _, arrival = heappop(self._due)
            self._submit(arrival, arrived_us)
        while self._cancels and self._cancels[0][0] <= now_us:
            _, arrival_id = heappop(self._cancels)
            trace = self._requests[arrival_id]
            if trace.ended_us is None:
                self._core.abort(str(arrival_id))
                self._end(trace)  # its last output comes with the next step only

    def _submit(self, arrival: Arrival, arrived_us: int) -> None:
        trace = self._requests[arrival.id] = RequestTrace(arrival, arrived_us, self._clock.now_us)
        self._runner.expect(arrival)
        message = Submit(
            engine_id=self._engine_id,
            request_id=str(arrival.id),
            token_ids=arrival.token_ids(),
            sampling=SamplingParams(seed=arrival.id, ignore_eos=True),
            path=arrival.path,
            request_class=arrival.request_class,
            cache_salt=arrival.team,
            output_cap=arrival.num_output_tokens,
        )
        try:
            self._core.submit(message)
        except RequestRejected as e:
            trace.refused = e.code
            self._end(trace)
            return
        if arrival.cancel_after_us is not None:
            heappush(self._cancels, (arrived_us + arrival.cancel_after_us, arrival.id))

    def _note(self, output: Output) -> None:
        trace = self._requests[int(output.request_id)]
        trace.token_us.extend([self._clock.now_us] * len(output.token_ids))
        trace.num_cached_tokens = output.num_cached_tokens
        if output.finish is not None:
            assert output.timings is not None, "a finish without timings"
            trace.finish = output.finish
            if output.finish != "abort":
                self._end(trace)
            parts = output.timings
            ran_us = parts.queue_us + parts.prefill_us + parts.decode_us
            assert trace.ended_us is not None
            trace.held_us = trace.ended_us - trace.submitted_us - ran_us

    def _end(self, trace: RequestTrace) -> None:
        now_us = trace.ended_us = self._clock.now_us
        self._runner.forget(trace.arrival.id)
        for follower in self._followers.pop(trace.arrival.id, ()):
            heappush(self._due, (now_us + follower.at_us, follower.id, follower))
