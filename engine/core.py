"""The engine in four verbs: schedule, run, apply, emit. Open this file first.

    submit, abort, raise_cap ──►  schedule ──► run ──► apply ──► emit  ──► outputs
                                  (sched/)   (runner/)  (here)   (here)

`schedule` makes a plan: how many tokens of which request the next step computes. `run` hands it to the runner. `apply`
takes the sampled tokens in, ends what has ended and gives its place back. `emit` tells the news.

With `plans_ahead`, step n+1 is planned and handed over while step n still computes, so the device never waits for
Python. Such a plan counts on every request of step n to go on. A request that step n ends all the same stands in step
n+1 as a row whose sample is dropped, and keeps its row and blocks until that step is applied too. When something has
arrived in the meantime nothing is planned ahead: step n is applied first, and the next plan knows all.

Knows nothing of sockets, of text or of tensors. One thread calls it.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import asdict, dataclass
from heapq import heappop, heappush

from engine.config import EngineConfig
from engine.errors import RequestRejected
from engine.intake import MOST_WEIGHT, Limits
from engine.kv.kv_cache import KVCache
from engine.kv.prefix_cache import PrefixCache
from engine.messages import FinishReason, Output, Stats, Submit, TokenLogprobs
from engine.request import Phase, Request, RequestState
from engine.runner.port import PendingStep, Runner
from engine.sched.cost import CostModel
from engine.sched.plan import StepResult
from engine.sched.policy import Policy
from engine.sched.registry import make_policy
from engine.sched.scheduler import Scheduler, Step
from engine.shares import share_step_time
from engine.standing import Standing
from engine.standings import Standings
from engine.stats import Counters


@dataclass(frozen=True, slots=True)
class _InFlight:
    """A step that the runner has and that is not applied yet."""

    step: Step
    pending: PendingStep


MOST_EXTERNAL_US = 10**12
"""Of one charge: eleven days."""


def draw_seed() -> int:
    """A seed nobody can guess, for a request that brings none."""
    return secrets.randbits(63)


class EngineCore:
    """All requests of one engine, from `submit` to their last output.

    Args:
        max_model_len: the window of the model as served.
        clock: microseconds, monotonic.
        policy: the order of requests; None takes the one that the configuration names.
        cost: what steps cost, for a policy that the configuration names; None takes what it says.
        draw_seed: called once for each request without a seed.
    """

    def __init__(
        self,
        config: EngineConfig,
        runner: Runner,
        *,
        max_model_len: int,
        eos_token_ids: tuple[int, ...],
        clock: Callable[[], int],
        policy: Policy | None = None,
        cost: CostModel | None = None,
        draw_seed: Callable[[], int] = draw_seed,
    ) -> None:
        self._engine_id = config.engine_id
        self._plans_ahead = config.plans_ahead
        self._runner = runner
        self._clock = clock
        self._draw_seed = draw_seed
        self.kv_capacity_tokens = runner.num_blocks * config.block_tokens
        self._limits = Limits(
            max_model_len=max_model_len,
            kv_capacity_tokens=self.kv_capacity_tokens,
            vocab_size=runner.vocab_size,
            eos_token_ids=eos_token_ids,
        )
        self._counters = Counters()
        self._kv = KVCache(runner.num_blocks, config.block_tokens, PrefixCache() if config.prefix_cache else None)
        self._policy = policy if policy is not None else make_policy(config, self._kv, cost)
        self._scheduler = Scheduler(
            self._policy,
            self._kv,
            self._counters,
            max_sequences=config.max_sequences,
            max_step_tokens=config.max_step_tokens,
        )
        self._live: dict[str, list[Request]] = {}  # choices that have not ended
        self._standings = Standings(self._live, self._policy, self._kv, max_sequences=config.max_sequences)
        self._held: dict[Request, list[Request]] = {}  # choice 0 → choices that wait for its prompt
        self._deadlines: list[tuple[int, int, list[Request]]] = []  # a heap: (when, arrival, the list in _live)
        self._num_arrivals = 0
        self._in_flight: _InFlight | None = None
        self._has_news = False  # something that no plan knows of yet
        self._outbox: list[Output] = []

    # --- the loop -----------------------------------------------------------------------------------------------------

    def step(self) -> list[Output]:
        """Take one step: what the oldest step in flight has brought, and finals of what ended beside it.

        Returns [] when there is nothing to do. Whatever the runner raises passes through: the engine cannot go on.
        """
        self._end_expired()
        if self._in_flight is None:
            self._in_flight = self._run(self._schedule())
        if self._in_flight is not None:
            current, self._in_flight = self._in_flight, self._run(self._schedule_ahead())
            self._apply(current.step, current.pending.wait())
        return self._emit()

    def _schedule(self) -> Step | None:
        self._has_news = False
        return self._scheduler.schedule(self._clock())

    def _schedule_ahead(self) -> Step | None:
        if not self._plans_ahead or self._has_news:
            return None
        return self._scheduler.schedule(self._clock(), is_ahead=True)

    def _run(self, step: Step | None) -> _InFlight | None:
        return _InFlight(step, self._runner.submit(step.plan)) if step is not None else None

    def _apply(self, step: Step, result: StepResult) -> None:
        now_us = self._clock()
        self._counters.busy_us += result.elapsed_us
        self._policy.measured(result.elapsed_us)
        self._counters.unshared_us += share_step_time(step.requests, step.plan.chunks, result.elapsed_us)
        samples = zip(result.rows, result.token_ids, result.logprobs, strict=True)
        for request, chunk in zip(step.requests, step.plan.chunks, strict=True):
            sample = next(samples) if chunk.samples else None
            if not self._scheduler.settle(request, chunk):
                continue
            if request in self._held and request.num_computed >= request.num_prompt_tokens:
                for held in self._held.pop(request):
                    self._scheduler.add(held)
            if sample is not None:
                row, token_id, logprobs = sample
                assert row == chunk.row, f"the runner sampled row {row} for row {chunk.row}"
                self._accept(request, token_id, logprobs, now_us)

    def _accept(self, request: Request, token_id: int, logprobs: TokenLogprobs | None, now_us: int) -> None:
        """A token was sampled for a live request: see what that means for it."""
        if request.num_output_tokens == 0:
            request.enter(Phase.DECODE, now_us)
        request.token_ids.append(token_id)
        finish: FinishReason | None = None
        is_held = False
        if token_id in request.stop_ids:
            finish = "stop"
        elif request.num_output_tokens >= request.output_cap:
            is_held = request.hold_at_cap and request.output_cap < request.output_limit
            finish = None if is_held else "length"
        news_logprobs = (logprobs,) if logprobs is not None else None
        if finish is not None:
            self._end(request, finish, now_us, token_ids=(token_id,), logprobs=news_logprobs)
            return
        self._outbox.append(request.news(token_ids=(token_id,), logprobs=news_logprobs))
        if is_held:
            self._scheduler.pause(request)
            self._outbox.append(request.news(held_at_cap=True))

    def _emit(self) -> list[Output]:
        outputs, self._outbox = self._outbox, []
        return outputs

    # --- messages -----------------------------------------------------------------------------------------------------

    def submit(self, message: Submit) -> None:
        """Take a request. Raises `RequestRejected` if it can never run here; then it has left nothing behind."""
        if message.request_id in self._live:
            raise RequestRejected("duplicate_request", f"request '{message.request_id}' is already here")
        self._limits.check(message)
        now_us = self._clock()
        choices = self._limits.requests(
            message,
            seed=self._draw_seed() if message.sampling.seed is None else message.sampling.seed,
            first_arrival=self._num_arrivals,
            now_us=now_us,
        )
        self._num_arrivals += len(choices)
        self._live[message.request_id] = choices
        if message.deadline_ms is not None:
            heappush(self._deadlines, (now_us + message.deadline_ms * 1000, choices[0].arrival, choices))
        leader, *others = choices
        self._scheduler.add(leader)
        if others and self._kv.caches_prefixes:
            self._held[leader] = others
            for request in others:
                request.state = RequestState.HELD
        else:
            for request in others:
                self._scheduler.add(request)
        self._has_news = True

    def abort(self, request_id: str) -> None:
        """End the request, whatever its state; its finals come with the next step. An unknown id is ignored."""
        self._end_all(self._live.get(request_id, []), "abort", self._clock())

    def raise_cap(self, request_id: str, output_cap: int) -> None:
        """A new cap for a request with `hold_at_cap`; an unknown id is ignored.

        A higher one lets choices that are held go on. Any other is the last word: choices at their cap end with
        ``length``, and the others will when they get there.
        """
        now_us = self._clock()
        for request in self._live.get(request_id, [])[:]:
            if not request.hold_at_cap:
                continue
            self._has_news = True
            is_paused = request.state is RequestState.AT_CAP
            if output_cap > request.output_cap:
                request.output_cap = min(output_cap, request.output_limit)
                if is_paused:
                    self._scheduler.resume(request, now_us)
            else:
                request.hold_at_cap = False
                if is_paused:
                    self._end(request, "length", now_us)

    def set_weight(self, node_id: str, weight: int) -> None:
        """A weight that no client of ours sends changes nothing: shares are divided by it, and told as numbers."""
        if not 1 <= weight <= MOST_WEIGHT:
            return
        self._policy.set_weight(node_id, weight)

    def charge_external(self, node_id: str, cost_us: int) -> None:
        self._policy.charge_external(node_id, min(cost_us, MOST_EXTERNAL_US))

    # --- endings ------------------------------------------------------------------------------------------------------

    def _end(
        self,
        request: Request,
        reason: FinishReason,
        now_us: int,
        *,
        token_ids: tuple[int, ...] = (),
        logprobs: tuple[TokenLogprobs, ...] | None = None,
    ) -> None:
        request.enter(request.phase, now_us)
        self._outbox.append(request.news(token_ids=token_ids, logprobs=logprobs, finish=reason))
        self._scheduler.end(request)
        choices = self._live[request.request_id]
        choices.remove(request)
        if not choices:
            del self._live[request.request_id]

    def _end_all(self, choices: list[Request], reason: FinishReason, now_us: int) -> None:
        for request in choices[:]:
            self._has_news = True
            self._held.pop(request, None)  # those it holds are among the choices
            self._end(request, reason, now_us)

    def _end_expired(self) -> None:
        if not self._deadlines:
            return
        now_us = self._clock()
        while self._deadlines and self._deadlines[0][0] <= now_us:
            _, _, choices = heappop(self._deadlines)
            self._end_all(choices, "deadline", now_us)  # none are left if they ended in time

    # --- looking in ---------------------------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        """`step` would do something; False while all there is waits for `raise_cap`."""
        return bool(
            self._outbox
            or self._in_flight is not None
            or self._scheduler.num_runnable
            or (self._deadlines and self._deadlines[0][0] <= self._clock())
        )

    def stats(self) -> Stats:
        live = [request for choices in self._live.values() for request in choices]
        num_running = sum(request.row is not None for request in live)
        return Stats(
            engine_id=self._engine_id,
            num_running=num_running,
            num_waiting=len(live) - num_running,
            num_blocks=self._kv.num_blocks,
            num_free_blocks=self._kv.num_free,
            num_cached_blocks=self._kv.num_cached,
            teams=self._policy.teams(),
            **asdict(self._counters),
        )

    def standing(self, *request_ids: str) -> Standing:
        """Of the choice that is furthest behind; phase ``unknown`` if none of these is here. Changes nothing."""
        return self._standings.of(request_ids, self._clock())

    def check_integrity(self) -> None:
        """Raise `IntegrityError` if the books of rows, tables, blocks and cache do not add up.

        For idle moments and tests: it looks at every block.
        """
        self._scheduler.check()
