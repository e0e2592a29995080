"""Scheduler and fair policy on a clock that moves by what the cost model says; no runner, no text. Quick.

Service is counted here anew from the plans, so the policy's own books are not asked.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from engine.kv.kv_cache import KVCache
from engine.kv.prefix_cache import PrefixCache
from engine.messages import PathNode, RequestClass
from engine.request import Phase, Request, RequestState
from engine.sampling_params import SamplingParams
from engine.sched.cost import CostModel
from engine.sched.fair.parameters import FairParameters
from engine.sched.fair.policy import FairShare
from engine.sched.plan import StepPlan
from engine.sched.policy import Policy
from engine.sched.scheduler import Scheduler, Step
from engine.stats import Counters

COST = CostModel(
    fixed_us=5_000,
    prefill_token_ns=300_000,
    prefill_context_ps=20_000,
    decode_token_ns=400_000,
    decode_context_ps=40_000,
)

NodePath = tuple[str, ...]


def path_of(names: str, *weights: int) -> tuple[PathNode, ...]:
    """``acme/red/k1`` with weights for as many of them as are given."""
    parts = names.split("/")
    padded = (*weights, *[1] * (len(parts) - len(weights)))
    return tuple(PathNode("/".join(parts[: i + 1]), weight) for i, weight in enumerate(padded))


@dataclass
class Seen:
    """What became of a request.

    Attributes:
        token_us: when each of its tokens came.
        served_us: useful engine time.
    """

    request: Request
    token_us: list[int]
    served_us: int = 0
    ended_us: int | None = None

    @property
    def ttft_us(self) -> int:
        return self.token_us[0] - self.request.arrival_us


class FairHarness:
    """Steps one after another, each applied before the next is planned."""

    def __init__(
        self,
        *,
        max_sequences: int = 16,
        max_step_tokens: int = 100_000,
        cost: CostModel = COST,
        parameters: FairParameters | None = None,
        num_blocks: int = 100_000,
        make_policy: Callable[..., Policy] = FairShare,
    ) -> None:
        self.cost = cost
        self.now_us = 1_000_000
        self.kv = KVCache(num_blocks, 16, PrefixCache())
        self.policy = make_policy(cost, max_sequences, parameters=parameters)
        self.counters = Counters()
        self.scheduler = Scheduler(
            self.policy, self.kv, self.counters, max_sequences=max_sequences, max_step_tokens=max_step_tokens
        )
        self.seen: dict[str, Seen] = {}
        self.plans: list[StepPlan] = []
        self.steps: list[Step] = []
        self.step_us: list[int] = []
        self.served_us: dict[NodePath, int] = {}

    def submit(
        self,
        path: tuple[PathNode, ...] | str,
        num_tokens: int = 50,
        output: int = 5,
        *,
        request_class: RequestClass = "interactive",
        prompt: list[int] | None = None,
    ) -> str:
        number = len(self.seen)
        request = Request(
            request_id=f"r{number}",
            choice=0,
            arrival=number,
            path=path_of(path) if isinstance(path, str) else path,
            request_class=request_class,
            cache_salt="",
            token_ids=prompt or [1000 + number, *range(num_tokens - 1)],
            sampling=SamplingParams(seed=1),
            stop_ids=frozenset(),
            output_cap=output,
            output_limit=output,
            hold_at_cap=False,
            arrival_us=self.now_us,
        )
        self.seen[request.request_id] = Seen(request, [])
        self.scheduler.add(request)
        return request.request_id

    def abort(self, request_id: str) -> None:
        seen = self.seen[request_id]
        if seen.ended_us is None:
            self._end(seen)

    def of(self, request_id: str) -> Request:
        return self.seen[request_id].request

    def step(self) -> dict[str, int]:
        """Plan a step and apply it: tokens by request; {} if there was nothing to do (the clock moves a little)."""
        step = self.scheduler.schedule(self.now_us)
        if step is None:
            self.now_us += 1000
            return {}
        self.plans.append(step.plan)
        self.steps.append(step)
        costs = [
            self.cost.marginal_us(c.start, c.start + c.num_tokens, r.num_prompt_tokens)
            for r, c in zip(step.requests, step.plan.chunks, strict=True)
        ]
        self.step_us.append(self.cost.step_us(costs))
        self.now_us += self.step_us[-1]
        for request, chunk in zip(step.requests, step.plan.chunks, strict=True):
            self._count(request, chunk.start, chunk.start + chunk.num_tokens)
            assert self.scheduler.settle(request, chunk)
            if chunk.samples:
                self._sample(request)
        return {r.request_id: c.num_tokens for r, c in zip(step.requests, step.plan.chunks, strict=True)}

    def run(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self.step()

    def drain(self, most_steps: int = 5000) -> None:
        for _ in range(most_steps):
            if not self.scheduler.num_runnable:
                return
            self.step()
        raise AssertionError("not done")

    def plan_bytes(self) -> bytes:
        return msgspec.msgpack.encode(self.plans)

    def backlogged(self) -> set[NodePath]:
        """Nodes below which resident work was left ungranted by the last step, from requests alone.

        Asked before the next step: what a step sampled is work that came after it.
        """
        granted = dict(zip(self.steps[-1].requests, self.steps[-1].plan.chunks, strict=True))
        found: set[NodePath] = set()
        for seen in self.seen.values():
            request = seen.request
            if request.row is None or seen.ended_us is not None:
                continue
            if request not in granted or not granted[request].samples:
                found.update(prefixes(names_of(request)))
        return found

    def _count(self, request: Request, start: int, end: int) -> None:
        cost_us = self.cost.marginal_us(max(start, min(end, request.high_water)), end, request.num_prompt_tokens)
        assert cost_us >= 0
        self.seen[request.request_id].served_us += cost_us
        for names in prefixes(names_of(request)):
            self.served_us[names] = self.served_us.get(names, 0) + cost_us

    def _sample(self, request: Request) -> None:
        if not request.num_output_tokens:
            request.enter(Phase.DECODE, self.now_us)
        request.token_ids.append(7)
        seen = self.seen[request.request_id]
        seen.token_us.append(self.now_us)
        if request.num_output_tokens >= request.output_cap:
            self._end(seen)

    def _end(self, seen: Seen) -> None:
        seen.ended_us = self.now_us
        seen.request.enter(seen.request.phase, self.now_us)
        self.scheduler.end(seen.request)
        assert seen.request.state is RequestState.FINISHED


def names_of(request: Request) -> NodePath:
    """Org, team, class, key."""
    ids = [node.id for node in request.path]
    return (*ids[:2], request.request_class, *ids[2:3])


def prefixes(names: NodePath) -> list[NodePath]:
    return [names[: i + 1] for i in range(len(names))]
