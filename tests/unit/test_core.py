"""The core, request by request: the door, endings, and what is told."""

from __future__ import annotations

import pytest
from core_harness import CoreHarness
from fake_runner import EOS, VOCAB_SIZE

from engine.errors import IntegrityError, RequestRejected
from engine.messages import PathNode

BOTH_WAYS = pytest.mark.parametrize("plan_ahead", [False, True], ids=["in-turn", "ahead"])


def prompt_of(num_tokens: int, first: int = 1) -> list[int]:
    return [first + i % 500 for i in range(num_tokens)]


# --- the door ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "request_args"),
    [
        ("empty_prompt", {"prompt": []}),
        ("context_length_exceeded", {"prompt": prompt_of(200)}),
        ("over_capacity", {"prompt": prompt_of(128)}),
        ("invalid_token", {"prompt": [1, VOCAB_SIZE]}),
        ("invalid_token", {"prompt": [-1]}),
        ("invalid_output_cap", {"prompt": [1], "output_cap": 0}),
        ("invalid_num_choices", {"prompt": [1], "num_choices": 0}),
        ("invalid_num_choices", {"prompt": [1], "num_choices": 129}),
        ("invalid_sampling", {"prompt": [1], "temperature": -1.0}),
        ("invalid_sampling", {"prompt": [1], "stop_token_ids": (VOCAB_SIZE,)}),
        ("invalid_sampling", {"prompt": [1], "stop_token_ids": tuple(range(VOCAB_SIZE)), "min_tokens": 3}),
        ("invalid_weight", {"prompt": [1], "path": (PathNode("org", 1), PathNode("team", 0))}),
        ("invalid_weight", {"prompt": [1], "path": (PathNode("org", -5),)}),
    ],
)
def test_what_can_never_run_is_refused_and_leaves_nothing(code: str, request_args: dict[str, object]) -> None:
    harness = CoreHarness(num_blocks=8, window=200)

    with pytest.raises(RequestRejected) as refusal:
        harness.submit(**request_args)

    assert code == refusal.value.code
    assert not harness.core.has_work
    harness.check_ended()


def test_the_largest_prompts_that_leave_room_for_one_token_run() -> None:
    narrow, small = CoreHarness(num_blocks=64, window=200), CoreHarness(num_blocks=8, window=200)
    by_window = narrow.submit(prompt_of(199), 50)
    by_pool = small.submit(prompt_of(127), 50)
    for harness, request_id in ((narrow, by_window), (small, by_pool)):
        harness.drain()
        assert harness.finish(request_id) == "length"
        assert len(harness.tokens(request_id)) == 1
        harness.check_ended()


def test_the_output_is_cut_to_what_the_pool_holds() -> None:
    harness = CoreHarness(num_blocks=4)
    request_id = harness.submit(prompt_of(50), 1000)
    harness.drain()

    assert len(harness.tokens(request_id)) == 14
    assert harness.finish(request_id) == "length"
    harness.check_ended()


def test_a_request_over_capacity_is_refused_at_once_while_others_run() -> None:
    harness = CoreHarness(num_blocks=8)
    running = harness.submit(prompt_of(40), 20)
    harness.step()
    with pytest.raises(RequestRejected, match="never fit"):
        harness.submit(prompt_of(300))
    small = harness.submit(prompt_of(5, 300), 2)
    harness.step()

    assert harness.tokens(running)
    assert harness.tokens(small)
    harness.drain()
    harness.check_ended()


def test_an_id_in_use_is_refused_and_free_again_after_the_end() -> None:
    harness = CoreHarness()
    harness.submit([1, 2], 2, request_id="same")
    with pytest.raises(RequestRejected) as refusal:
        harness.submit([3], 2, request_id="same")
    assert refusal.value.code == "duplicate_request"
    harness.drain()
    harness.submit([3], 2, request_id="same")
    harness.drain()

    assert harness.finish("same") == "length"


# --- endings ----------------------------------------------------------------------------------------------------------


@BOTH_WAYS
def test_a_stop_token_ends_the_request_and_is_delivered(plan_ahead: bool) -> None:
    probe = CoreHarness()
    probed = probe.submit([1, 2, 3], 10, seed=3)
    probe.drain()
    stop = probe.tokens(probed)[4]
    harness = CoreHarness(plan_ahead=plan_ahead)
    request_id = harness.submit([1, 2, 3], 10, seed=3, stop_token_ids=(stop,))
    harness.drain()

    assert probe.tokens(probed)[:5] == harness.tokens(request_id)
    assert harness.finish(request_id) == "stop"
    assert stop == harness.last(request_id).stop_token_id
    harness.check_ended()


@BOTH_WAYS
def test_end_of_sequence_ends_the_request_unless_it_is_ignored(plan_ahead: bool) -> None:
    harness = CoreHarness(plan_ahead=plan_ahead, eos_every=5)
    ended = harness.submit([1, 2, 3], 60, seed=1)
    ignoring = harness.submit([1, 2, 3], 60, seed=1, ignore_eos=True)
    harness.drain()

    assert EOS == harness.tokens(ended)[-1] == harness.last(ended).stop_token_id
    assert len(harness.tokens(ended)) < 60 == len(harness.tokens(ignoring))
    assert EOS in harness.tokens(ignoring)
    assert (harness.finish(ended), harness.finish(ignoring)) == ("stop", "length")
    harness.check_ended()


def test_abort_before_the_first_step_computes_nothing() -> None:
    harness = CoreHarness()
    request_id = harness.submit([1, 2, 3], num_choices=3)
    harness.abort(request_id)
    harness.drain()

    assert [harness.finish(request_id, choice) for choice in range(3)] == ["abort"] * 3
    assert not harness.runner.plans
    harness.check_ended()


def test_abort_in_flight_frees_row_and_blocks_only_after_the_step() -> None:
    harness = CoreHarness(plan_ahead=True, max_sequences=2)
    harness.submit([7], 30)
    request_id = harness.submit(prompt_of(20), 30)
    harness.step()
    num_delivered, num_plans = len(harness.tokens(request_id)), len(harness.runner.plans)
    harness.abort(request_id)

    assert harness.core.stats().num_blocks - harness.core.stats().num_free_blocks == 3
    assert [output.finish for output in harness.step()] == ["abort", None]
    assert num_delivered == len(harness.tokens(request_id))
    assert num_plans == len(harness.runner.plans)  # nothing was planned ahead without knowing of it
    assert (
        harness.core.stats().num_blocks - harness.core.stats().num_free_blocks - harness.core.stats().num_cached_blocks
        == 1
    )
    harness.drain()
    harness.check_ended()


@BOTH_WAYS
def test_abort_while_waiting_and_while_held_and_in_mid_prefill(plan_ahead: bool) -> None:
    harness = CoreHarness(plan_ahead=plan_ahead, max_sequences=1, max_step_tokens=8)
    running = harness.submit(prompt_of(40), 5, num_choices=2)
    waiting = harness.submit(prompt_of(40, 300), 5)
    harness.step()
    harness.step()
    for request_id in (waiting, running):
        harness.abort(request_id)
        harness.core.check_integrity()
    harness.abort(running)
    harness.abort("unknown")
    harness.drain(3)

    assert {"abort"} == {answer.finish for answer in harness.answers.values()}
    harness.check_ended()


@BOTH_WAYS
def test_a_deadline_ends_a_request_in_any_state(plan_ahead: bool) -> None:
    harness = CoreHarness(plan_ahead=plan_ahead, max_sequences=1)
    running = harness.submit([1, 2], 400, deadline_ms=5)
    waiting = harness.submit([3, 4], 400, deadline_ms=3)
    in_time = harness.submit([5, 6], 3, deadline_ms=1000)
    harness.drain()

    assert [harness.finish(r) for r in (running, waiting, in_time)] == ["deadline", "deadline", "length"]
    assert harness.tokens(running)
    assert not harness.tokens(waiting)
    harness.check_ended()


def test_a_deadline_passes_while_a_choice_is_held_at_its_cap() -> None:
    harness = CoreHarness()
    request_id = harness.submit([1, 2], 2, hold_at_cap=True, deadline_ms=50)
    harness.drain()
    assert not harness.core.has_work
    harness.now_us += 50_000

    assert harness.core.has_work
    assert [output.finish for output in harness.step()] == ["deadline"]
    assert harness.finish(request_id) == "deadline"
    harness.check_ended()


# --- what is told -----------------------------------------------------------------------------------------------------


@BOTH_WAYS
def test_a_prompt_in_chunks_gives_the_same_tokens(plan_ahead: bool) -> None:
    tokens = []
    for budget in (3, 16, 500):
        harness = CoreHarness(plan_ahead=plan_ahead, max_step_tokens=budget)
        request_id = harness.submit(prompt_of(100), 20, seed=5, num_logprobs=0)
        harness.drain()
        harness.check_ended()
        tokens.append(harness.tokens(request_id))

    assert tokens[0] == tokens[1] == tokens[2]


@pytest.mark.parametrize("num_tokens", [47, 48, 49])
def test_a_hit_at_the_edge_of_a_block_gives_the_same_tokens_as_a_miss(num_tokens: int) -> None:
    harness = CoreHarness()
    miss = harness.submit(prompt_of(num_tokens), 20, seed=5)
    harness.drain()
    hit = harness.submit(prompt_of(num_tokens), 20, seed=5)
    harness.drain()

    assert harness.tokens(miss) == harness.tokens(hit)
    assert {47: 32, 48: 32, 49: 48}[num_tokens] == harness.last(hit).num_cached_tokens
    harness.check_ended()


def test_a_longer_turn_finds_prompt_and_answer_of_the_one_before() -> None:
    harness = CoreHarness()
    first = harness.submit(prompt_of(30), 20, seed=5)
    harness.drain()
    second = harness.submit([*prompt_of(30), *harness.tokens(first), 7, 8, 9], 5, cache_salt="")
    other_team = harness.submit([*prompt_of(30), *harness.tokens(first), 7, 8, 9], 5, cache_salt="other")
    harness.drain()

    assert harness.last(second).num_cached_tokens == 48
    assert harness.last(other_team).num_cached_tokens == 0
    harness.check_ended()


def test_stats_show_who_runs_and_who_waits() -> None:
    harness = CoreHarness(max_sequences=2)
    for _ in range(3):
        harness.submit([1, 2, 3], 20, num_choices=2)
    harness.step()
    stats = harness.core.stats()

    assert (stats.num_running, stats.num_waiting) == (2, 4)
    assert (stats.num_steps, stats.num_prefill_tokens) == (1, 6)
    assert stats.num_blocks - 2 == stats.num_free_blocks
    harness.drain()
    harness.check_ended()


def test_check_integrity_finds_a_leaked_row() -> None:
    harness = CoreHarness()
    harness.submit([1, 2, 3], 20)
    harness.step()
    harness.core._scheduler._free_rows.pop()

    with pytest.raises(IntegrityError, match="rows"):
        harness.core.check_integrity()
