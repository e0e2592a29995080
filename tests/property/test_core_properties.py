"""The core under everything at once: arrivals that share prefixes, choices, caps, deadlines and aborts at any moment,
small pools and budgets, planned ahead or not. The fake runner proves in every step that each row reads its own tokens.
"""

from __future__ import annotations

import msgspec
import pytest
from chaos_policy import ChaosPolicy
from core_harness import CoreHarness
from examples import examples
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from engine.errors import RequestRejected
from engine.sched.plan import StepPlan
from engine.sched.policy import Policy

SALTS = ("", "team-a")


@st.composite
def prompts(draw: st.DrawFn, most_tokens: int = 70) -> list[int]:
    """Prompts of three families: those of one family begin alike, for as long as the shorter of them."""
    family = draw(st.integers(1, 3))
    num_shared = draw(st.integers(0, most_tokens - 1))
    tail = draw(st.lists(st.integers(1, 5), min_size=1, max_size=min(20, most_tokens - num_shared)))
    return [family * 100 + i for i in range(num_shared)] + tail


configurations = st.fixed_dictionaries(
    {
        "num_blocks": st.integers(2, 14),
        "max_sequences": st.integers(1, 6),
        "max_step_tokens": st.integers(1, 70),
        "eos_every": st.sampled_from([0, 8, 30]),
        "plan_ahead": st.booleans(),
        "prefix_cache": st.booleans(),
        "window": st.sampled_from([90, 400]),
    }
)

requests = st.fixed_dictionaries(
    {
        "prompt": prompts(),
        "output_cap": st.integers(1, 40),
        "seed": st.sampled_from([None, 1, 2]),
        "num_choices": st.sampled_from([1, 1, 1, 2, 4]),
        "cache_salt": st.sampled_from(SALTS),
        "hold_at_cap": st.booleans(),
        "deadline_ms": st.sampled_from([None, None, None, 0, 5, 40]),
        "ignore_eos": st.booleans(),
        "num_logprobs": st.sampled_from([None, 0]),
    }
)


class CoreMachine(RuleBasedStateMachine):
    """Anything may happen between any two steps; in the end everything has ended as it should and nothing is held."""

    @initialize(data=st.data(), configuration=configurations)
    def start(self, data: st.DataObject, configuration: dict[str, object]) -> None:
        self.policy = self.make_policy(data)
        self.harness = CoreHarness(**configuration, policy=self.policy)

    def make_policy(self, data: st.DataObject) -> str | Policy:
        return data.draw(st.sampled_from(["fair", "fair", "fcfs", "static"]))

    def _unfinished(self) -> list[str]:
        return sorted({key for (key, _), answer in self.harness.answers.items() if answer.finish is None})

    @rule(request=requests)
    def submit(self, request: dict[str, object]) -> None:
        num_prompt_tokens = len(request["prompt"])
        capacity = min(self.harness.core.kv_capacity_tokens, self.harness.window)
        if num_prompt_tokens < capacity:
            self.harness.submit(**request)
            return
        with pytest.raises(RequestRejected):
            self.harness.submit(**request)

    @rule(num_steps=st.integers(1, 8))
    def step(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self.harness.step()

    @precondition(lambda self: self._unfinished())
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self.harness.abort(data.draw(st.sampled_from(self._unfinished())))
        self.harness.core.check_integrity()

    @precondition(lambda self: self._unfinished())
    @rule(data=st.data(), more=st.integers(-1, 20))
    def raise_cap(self, data: st.DataObject, more: int) -> None:
        request_id = data.draw(st.sampled_from(self._unfinished()))
        caps = [a.cap for (key, _), a in self.harness.answers.items() if key == request_id]
        self.harness.raise_cap(request_id, max(caps) + more)
        self.harness.core.check_integrity()

    @rule(ms=st.integers(1, 30))
    def time_passes(self, ms: int) -> None:
        self.harness.now_us += ms * 1000

    def teardown(self) -> None:
        if hasattr(self, "harness"):
            self._end_all()
            self.harness.check_ended()

    def _end_all(self) -> None:
        drain_raising_caps(self.harness)


def drain_raising_caps(harness: CoreHarness) -> None:
    """Run until all is done; a choice that is held gets the last word that its cap stands."""
    harness.drain(steps_bound(harness))
    while held := {key for (key, _), answer in harness.answers.items() if answer.is_held and answer.finish is None}:
        for request_id in sorted(held):
            harness.raise_cap(request_id, 1)
        harness.drain(steps_bound(harness))


def steps_bound(harness: CoreHarness) -> int:
    """Most steps until every request that was submitted has ended or is held, if nothing else arrives.

    Let T be the tokens of all requests together. While the oldest of them is resident it gets a token in every plan
    but those where the decodes of others use up the budget; the others are not joined by anybody in the meantime, so
    they do that T times at most. While it waits, the others run to their ends or are preempted for good, in T steps at
    most; once nobody runs, paused ones yield, one a plan. So it ends within 3 T steps, twice that where a plan made
    ahead is dropped or a place is freed a step late; and then the next one is the oldest.
    """
    num_requests = len(harness.answers)
    num_tokens = sum(len(a.message.token_ids) + min(a.cap, harness.window) for a in harness.answers.values())
    return 6 * (num_requests + 1) * (num_tokens + 1)


TestCore = CoreMachine.TestCase
TestCore.settings = settings(
    max_examples=examples(150), stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)


class ChaosMachine(CoreMachine):
    """The same under a policy that keeps no order at all, so nothing promises an end: what is left is aborted."""

    def make_policy(self, data: st.DataObject) -> str | Policy:
        return ChaosPolicy(data.draw(st.integers(0, 1000)))

    def _end_all(self) -> None:
        for _ in range(30):
            self.harness.step()
        for request_id in self._unfinished():
            self.harness.abort(request_id)
        self.harness.drain(3)
        assert sum(plan.num_tokens for plan in self.harness.runner.plans) == sum(self.policy.charged.values())


TestChaos = ChaosMachine.TestCase
TestChaos.settings = settings(
    max_examples=examples(100), stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)


@settings(max_examples=examples(60), deadline=None)
@given(configuration=configurations, batch=st.lists(st.tuples(requests, st.integers(0, 6)), max_size=12))
def test_the_same_events_lead_to_the_same_plans_byte_for_byte(
    configuration: dict[str, object], batch: list[tuple[dict[str, object], int]]
) -> None:
    def run() -> tuple[bytes, list[list[int]]]:
        harness = play(configuration, batch)
        plans: list[StepPlan] = harness.runner.plans
        return msgspec.msgpack.encode(plans), [answer.token_ids for answer in harness.answers.values()]

    assert run() == run()


@settings(max_examples=examples(60), deadline=None)
@given(configuration=configurations, batch=st.lists(st.tuples(requests, st.integers(0, 6)), max_size=12))
def test_planning_ahead_changes_no_token_and_no_ending(
    configuration: dict[str, object], batch: list[tuple[dict[str, object], int]]
) -> None:
    def run(plan_ahead: bool) -> list[tuple[list[int], str | None]]:
        timeless = [(request | {"deadline_ms": None}, num_steps) for request, num_steps in batch]
        harness = play(configuration | {"plan_ahead": plan_ahead}, timeless)
        return [(answer.token_ids, answer.finish) for answer in harness.answers.values()]

    assert run(plan_ahead=False) == run(plan_ahead=True)


def play(configuration: dict[str, object], batch: list[tuple[dict[str, object], int]]) -> CoreHarness:
    harness = CoreHarness(**configuration)
    capacity = min(harness.core.kv_capacity_tokens, harness.window)
    for request, num_steps in batch:
        if len(request["prompt"]) < capacity:
            harness.submit(**request)
        for _ in range(num_steps):
            harness.step()
    drain_raising_caps(harness)
    harness.check_ended()
    return harness
