"""From measured steps to a cost model."""

from __future__ import annotations

import random

import pytest

from engine.bench.cost_fit import UnusableMeasurements, fit_cost
from engine.bench.step_grid import StepShape, whole_grid
from engine.sched.cost import PROFILES, CostModel

GRID = whole_grid()
TERMS = [shape.terms() for shape in GRID]
FREE_CONTEXT = CostModel(
    fixed_us=700, prefill_token_ns=9_000, prefill_context_ps=0, decode_token_ns=4_000, decode_context_ps=0
)


def _times(cost: CostModel) -> list[float]:
    """To the last fraction of a microsecond, unlike `predicted_us`."""
    values = (getattr(cost, name) for name in CostModel.__struct_fields__)
    per_us = [value / unit for value, unit in zip(values, (1, 1e3, 1e6, 1e3, 1e6), strict=True)]
    return [sum(a * b for a, b in zip(terms, per_us, strict=True)) for terms in TERMS]


@pytest.mark.parametrize("cost", [*PROFILES.values(), FREE_CONTEXT])
def test_a_model_is_found_again_from_its_own_times(cost: CostModel) -> None:
    assert fit_cost(TERMS, _times(cost)) == cost


def test_the_terms_of_a_step_are_what_the_model_charges_for_it() -> None:
    cost = PROFILES["cpu"]

    assert [shape.predicted_us(cost) for shape in GRID] == pytest.approx(_times(cost), abs=len(GRID))


def test_a_step_s_prediction_is_the_scheduler_s() -> None:
    cost = PROFILES["cpu"]
    shape = StepShape(num_decodes=3, decode_context=100, chunk_tokens=20, chunk_start=40)

    assert shape.predicted_us(cost) == cost.step_us(
        [cost.marginal_us(40, 60, 1000), *[cost.marginal_us(100, 101, 5)] * 3]
    )


def test_noise_moves_the_model_little() -> None:
    cost, rng = PROFILES["cpu"], random.Random(5)

    found = fit_cost(TERMS, [time * rng.uniform(0.95, 1.05) for time in _times(cost)])

    for name in CostModel.__struct_fields__:
        assert getattr(found, name) == pytest.approx(getattr(cost, name), rel=0.15), name


def test_small_steps_count_as_much_as_large_ones() -> None:
    """One large step that is far off outweighs all others if errors are absolute."""
    cost = PROFILES["cpu"]
    times = _times(cost)
    largest = times.index(max(times))
    times[largest] *= 2

    found = fit_cost(TERMS, times)

    errors = [
        abs(s.predicted_us(found) / t - 1) for i, (s, t) in enumerate(zip(GRID, times, strict=True)) if i != largest
    ]
    assert max(errors) < 0.15


@pytest.mark.parametrize("seed", range(5))
def test_no_coefficient_is_negative_even_where_times_fall_with_the_context(seed: int) -> None:
    rng = random.Random(seed)
    times = [
        time * (1 - rng.uniform(0.02, 0.05) * shape.num_tokens_known / 1000)
        for time, shape in zip(_times(FREE_CONTEXT), GRID, strict=True)
    ]

    found = fit_cost(TERMS, times)

    assert (found.prefill_context_ps, found.decode_context_ps) == (0, 0)
    assert min(found.fixed_us, found.prefill_token_ns, found.decode_token_ns) > 0


@pytest.mark.parametrize(
    ("times", "said"),
    [
        ([5_000.0] * len(TERMS), "costs nothing"),
        ([0.0] * len(TERMS), "no time"),
        ([float("nan")] * len(TERMS), "no time"),
    ],
)
def test_times_that_say_nothing_are_refused(times: list[float], said: str) -> None:
    with pytest.raises(UnusableMeasurements, match=said):
        fit_cost(TERMS, times)


@pytest.mark.parametrize(
    "chosen",
    [
        [],
        GRID[:4],
        [StepShape(chunk_tokens=16)] * 40,
        [shape for shape in GRID if not shape.num_decodes],
        [shape for shape in GRID if shape.decode_context == 110],
    ],
    ids=["none", "fewer than unknowns", "one step", "no decodes", "one context"],
)
def test_steps_too_much_alike_are_refused(chosen: list[StepShape]) -> None:
    with pytest.raises(UnusableMeasurements, match="too few, or too much alike"):
        fit_cost([shape.terms() for shape in chosen], [shape.predicted_us(PROFILES["cpu"]) for shape in chosen])
