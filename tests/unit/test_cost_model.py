from __future__ import annotations

import random
from itertools import pairwise

import pytest

from engine.errors import ConfigError
from engine.sched.cost import PROFILES, CostModel

SIMPLE = CostModel(
    fixed_us=1000, prefill_token_ns=10_000, prefill_context_ps=1_000_000, decode_token_ns=3_000, decode_context_ps=0
)


def test_a_chunk_costs_its_tokens_and_what_lies_before_each() -> None:
    assert SIMPLE.marginal_us(0, 3, 100) == 3 * 10 + (0 + 1 + 2)
    assert SIMPLE.marginal_us(3, 5, 100) == 2 * 10 + (3 + 4)
    assert SIMPLE.marginal_us(100, 104, 100) == 4 * 3
    assert SIMPLE.step_us([30, 12]) == 1042


def test_a_chunk_over_the_end_of_the_prompt_is_both() -> None:
    assert SIMPLE.marginal_us(3, 6, 5) == SIMPLE.marginal_us(3, 5, 5) + SIMPLE.marginal_us(5, 6, 5)


@pytest.mark.parametrize("profile", PROFILES)
def test_slicing_changes_nothing(profile: str) -> None:
    model, rng = PROFILES[profile], random.Random(3)
    for _ in range(50):
        num_prompt = rng.randrange(1, 5000)
        end = num_prompt + rng.randrange(0, 300)
        cuts = sorted({0, end, *(rng.randrange(end) for _ in range(rng.randrange(40)))})
        parts = [model.marginal_us(a, b, num_prompt) for a, b in pairwise(cuts)]

        assert sum(parts) == model.marginal_us(0, end, num_prompt)
        assert min(parts) >= 0


@pytest.mark.parametrize("profile", PROFILES)
def test_the_most_tokens_within_a_budget(profile: str) -> None:
    model = PROFILES[profile]
    for budget_us in (0, 100, 5000, 45_000, 10**9):
        num_tokens = model.num_tokens_within(budget_us, 700, 2900, 2800)

        assert model.marginal_us(700, 700 + num_tokens, 2800) <= budget_us
        assert num_tokens == 2200 or model.marginal_us(700, 701 + num_tokens, 2800) > budget_us


def test_the_profiles_give_the_figures_they_were_made_from() -> None:
    assert PROFILES["cpu"].marginal_us(0, 100, 100) == pytest.approx(100 * 330, rel=0.05)
    assert PROFILES["gpu8b"].marginal_us(100_000, 100_256, 200_000) == pytest.approx(36_000, rel=0.05)


@pytest.mark.parametrize("wrong", [{"fixed_us": 0}, {"decode_token_ns": 0}, {"prefill_context_ps": -1}])
def test_a_step_or_a_token_for_nothing_is_refused(wrong: dict[str, int]) -> None:
    values = {name: getattr(SIMPLE, name) for name in SIMPLE.__struct_fields__}

    with pytest.raises(ConfigError, match="cost model"):
        CostModel(**{**values, **wrong})
