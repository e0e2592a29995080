"""Scheduler and policy on a clock that moves by what the cost model says; no runner, no text. Quick.

Everything is counted here anew from requests and plans, so the policy's own books are not asked; `fair_measures.py`
looks into them where a rule speaks of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import msgspec
from fair_witness import NodePath, Parking, Witness, names_of, prefixes

from engine.kv.kv_cache import KVCache
from engine.kv.prefix_cache import PrefixCache
from engine.messages import PathNode, RequestClass
from engine.request import Phase, Request, RequestState
from engine.sampling_params import SamplingParams
from engine.sched.cost import CostModel
from engine.sched.fair.parameters import FairParameters
from engine.sched.fair.policy import FairShare
from engine.sched.plan import Chunk, StepPlan
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


@dataclass(frozen=True)
class Left:
    """What a step did not grant.

    Attributes:
        residents: with work that it did not grant.
        waiting: without a row.
        num_free_rows: that nobody holds.
    """

    residents: list[Request]
    waiting: list[Request]
    num_free_rows: int


class FairHarness:
    """Steps one after another.

    Args:
        plan_ahead: a step is planned before the one before it is applied, as long as nothing else has happened.
        make_policy: called as `FairShare` is.

    Attributes:
        targets_us: the target step in force at each step, by the promises of the classes present.
        left: what the step planned last left out.
        charged_us: what should have been charged for all plans so far.
    """

    def __init__(
        self,
        *,
        max_sequences: int = 16,
        max_step_tokens: int = 100_000,
        cost: CostModel = COST,
        parameters: FairParameters | None = None,
        num_blocks: int = 100_000,
        plan_ahead: bool = False,
        make_policy: Callable[..., Policy] = FairShare,
    ) -> None:
        self.cost = cost
        self.parameters = parameters or FairParameters()
        self.max_sequences = max_sequences
        self.max_step_tokens = max_step_tokens
        self.now_us = 1_000_000
        self.kv = KVCache(num_blocks, 16, PrefixCache())
        self.policy = make_policy(
            cost, max_sequences, parameters=parameters, num_cached_tokens=partial(_num_cached_tokens, self.kv)
        )
        self.counters = Counters()
        self.parkings: list[Parking] = []
        self.weights: dict[NodePath, int] = {}
        self.scheduler = Scheduler(
            Witness(
                self.policy,
                self.parkings,
                num_rows=self.num_rows,
                weights=self.weights,
                step=lambda: len(self.plans),
            ),
            self.kv,
            self.counters,
            max_sequences=max_sequences,
            max_step_tokens=max_step_tokens,
        )
        self.seen: dict[str, Seen] = {}
        self.live: dict[str, Seen] = {}
        self.plans: list[StepPlan] = []
        self.steps: list[Step] = []
        self.step_us: list[int] = []
        self.targets_us: list[int] = []
        self.left = Left([], [], max_sequences)
        self.served_us: Counter[NodePath] = Counter()
        self.charged_us = 0
        self._plan_ahead = plan_ahead
        self._in_flight: tuple[Step, int] | None = None
        self._has_news = False
        self._last_ran_us: dict[str, int] = {}
        self._class_weights = dict(self.parameters.class_weights)

    # --- events -------------------------------------------------------------------------------------------------------

    def submit(
        self,
        path: tuple[PathNode, ...] | str,
        num_tokens: int = 50,
        output: int = 5,
        *,
        request_class: RequestClass = "interactive",
        prompt: list[int] | None = None,
        cap: int | None = None,
    ) -> str:
        """
        Args:
            cap: where it pauses until `raise_cap`; None lets it run to its output's end.
        """
        number = len(self.seen)
        request = Request(
            request_id=f"r{number}",
            choice=0,
            arrival=number,
            path=path_of(path) if isinstance(path, str) else path,
            request_class=request_class,
            cache_salt="",
            token_ids=list(prompt) if prompt else [1000 + number, *range(num_tokens - 1)],
            sampling=SamplingParams(seed=1),
            stop_ids=frozenset(),
            output_cap=min(output, cap or output),
            output_limit=output,
            hold_at_cap=cap is not None,
            arrival_us=self.now_us,
        )
        seen = self.seen[request.request_id] = self.live[request.request_id] = Seen(request, [])
        self._learn_weights(request)
        self._has_news = True
        self.scheduler.add(request)
        return seen.request.request_id

    def abort(self, request_id: str) -> None:
        if request_id in self.live:
            self._has_news = True
            self._end(self.live[request_id])

    def raise_cap(self, request_id: str, more: int) -> None:
        """So many tokens more; one that has ended is left alone."""
        if request_id not in self.live:
            return
        request = self.of(request_id)
        is_paused = request.state is RequestState.AT_CAP
        self._has_news = True
        request.output_cap = min(request.output_cap + more, request.output_limit)
        if is_paused:
            self.scheduler.resume(request, self.now_us)

    def set_weight(self, node_id: str, weight: int) -> None:
        self._has_news = True
        for names in self.weights:
            if names[-1] == node_id:
                self.weights[names] = weight
        self.policy.set_weight(node_id, weight)

    def of(self, request_id: str) -> Request:
        return self.seen[request_id].request

    # --- steps --------------------------------------------------------------------------------------------------------

    def step(self) -> dict[str, int]:
        """Apply the oldest step that is planned: tokens by request; {} if there was nothing to do (the clock moves a
        little)."""
        if self._in_flight is None:
            self._in_flight = self._plan(is_ahead=False)
        if self._in_flight is None:
            self.now_us += 1000
            return {}
        step, elapsed_us = self._in_flight
        self._in_flight = self._plan(is_ahead=True) if self._plan_ahead and not self._has_news else None
        self.now_us += elapsed_us
        self.policy.measured(elapsed_us)
        for request, chunk in zip(step.requests, step.plan.chunks, strict=True):
            cost_us = self._useful_us(request, chunk)
            if not self.scheduler.settle(request, chunk):
                continue
            self.seen[request.request_id].served_us += cost_us
            for names in prefixes(names_of(request)):
                self.served_us[names] += cost_us
            if chunk.samples:
                self._sample(request)
        return {r.request_id: c.num_tokens for r, c in zip(step.requests, step.plan.chunks, strict=True)}

    def run(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self.step()

    def drain(self, most_steps: int = 5000) -> None:
        for _ in range(most_steps):
            if not self.scheduler.num_runnable and self._in_flight is None:
                return
            self.step()
        raise AssertionError("not done")

    def until_token(self, request_id: str, most_steps: int = 5000) -> int:
        """Steps until the request has its first token; most_steps if it has none by then."""
        for i in range(most_steps):
            if self.seen[request_id].token_us:
                return i
            self.step()
        return most_steps

    # --- looking in ---------------------------------------------------------------------------------------------------

    def plan_bytes(self) -> bytes:
        return msgspec.msgpack.encode(self.plans)

    def backlogged(self) -> set[NodePath]:
        """Nodes below which resident work was left ungranted by the step planned last."""
        return {names for request in self.left.residents for names in prefixes(names_of(request))}

    def num_rows(self) -> Counter[NodePath]:
        """Held by each node; () is the root."""
        held: Counter[NodePath] = Counter()
        for seen in self.live.values():
            if seen.request.row is not None:
                held.update([(), *prefixes(names_of(seen.request))])
        return held

    def limit_us(self, i: int) -> int:
        """Marginal work that step i has room for."""
        target_us = self.targets_us[i]
        return max(1, target_us - self.cost.fixed_us, target_us // 4)

    def _plan(self, *, is_ahead: bool) -> tuple[Step, int] | None:
        if not is_ahead:
            self._has_news = False
        step = self.scheduler.schedule(self.now_us, is_ahead=is_ahead)
        if step is None:
            return None
        self.plans.append(step.plan)
        self.steps.append(step)
        self.targets_us.append(self._target_us())
        chunks = list(zip(step.requests, step.plan.chunks, strict=True))
        elapsed_us = self.cost.step_us(
            self.cost.marginal_us(c.start, c.start + c.num_tokens, r.num_prompt_tokens) for r, c in chunks
        )
        self.step_us.append(elapsed_us)
        self.charged_us += sum(self._useful_us(r, c) for r, c in chunks)
        for request in step.requests:
            self._last_ran_us[request.request_class] = self.now_us
        live = [seen.request for seen in self.live.values()]
        self.left = Left(
            [r for r in live if r.state is RequestState.RUNNING and r.num_scheduled < len(r.token_ids)],
            [r for r in live if r.state in (RequestState.WAITING, RequestState.PARKED)],
            self.max_sequences - sum(r.row is not None for r in live),
        )
        return step, elapsed_us

    def _target_us(self) -> int:
        """Of a class with requests, or that ran not long before; what a step's own requests are makes no odds."""
        keep = 100 - self.parameters.margin_percent
        present = {seen.request.request_class for seen in self.live.values()} | {
            name for name, at_us in self._last_ran_us.items() if self.now_us - at_us < self.parameters.linger_us
        }
        return min(promise_us * keep // 100 for name, promise_us in self.parameters.promises_us if name in present)

    def _useful_us(self, request: Request, chunk: Chunk) -> int:
        """Of what was never computed before."""
        end = chunk.start + chunk.num_tokens
        low = max(chunk.start, min(end, request.high_water))
        return self.cost.marginal_us(low, end, request.num_prompt_tokens)

    def _sample(self, request: Request) -> None:
        if not request.num_output_tokens:
            request.enter(Phase.DECODE, self.now_us)
        request.token_ids.append(7)
        seen = self.seen[request.request_id]
        seen.token_us.append(self.now_us)
        if request.num_output_tokens < request.output_cap:
            return
        if request.hold_at_cap and request.output_cap < request.output_limit:
            self.scheduler.pause(request)
        else:
            self._end(seen)

    def _end(self, seen: Seen) -> None:
        seen.ended_us = self.now_us
        del self.live[seen.request.request_id]
        seen.request.enter(seen.request.phase, self.now_us)
        self.scheduler.end(seen.request)
        assert seen.request.state is RequestState.FINISHED

    def _learn_weights(self, request: Request) -> None:
        path = request.path
        org, team, key = ((path[i].weight if i < len(path) else 1) for i in range(3))
        session = path[-1].weight if len(path) > 3 else 1
        weights = (org, team, self._class_weights[request.request_class], key, session)
        self.weights.update(zip(prefixes(names_of(request)), weights, strict=True))


def _num_cached_tokens(kv: KVCache, request: Request) -> int:
    kv.lookup(request.token_ids, request.cache_salt, request.prefix)
    return len(request.prefix) * kv.block_tokens
