"""How much output is expected of a request: by what requests like it wrote lately."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.domain.ids import TeamId
from gateway.services import estimates
from gateway.services.estimates import FIRST_TOKENS, KEPT, OutputEstimates

TEAM, OTHER = TeamId("team_1"), TeamId("team_2")


def test_of_a_kind_that_nobody_is_known_of_a_few_are_expected_if_its_cap_allows() -> None:
    kinds = OutputEstimates()

    assert [kinds.expected(TEAM, "m", cap) for cap in (1, 100, FIRST_TOKENS, 8_000)] == [1, 100, 256, 256]


def test_one_answer_counts_for_all_of_its_kind_and_no_other() -> None:
    kinds = OutputEstimates()
    kinds.learn(TEAM, "m", 100, 70)

    assert [kinds.expected(TEAM, "m", cap) for cap in (63, 64, 69, 100, 127, 128)] == [63, 64, 69, 70, 70, 128]
    assert kinds.expected(OTHER, "m", 100) == kinds.expected(TEAM, "n", 100) == 100


@given(outputs=st.lists(st.integers(0, 300), min_size=1, max_size=2 * KEPT))
def test_nine_of_ten_of_the_latest_wrote_no_more_and_nobody_is_expected_to_write_what_none_did(
    outputs: list[int],
) -> None:
    kinds = OutputEstimates()
    for output in outputs:
        kinds.learn(TEAM, "m", 500, output)
    latest = outputs[-KEPT:]
    expected = kinds.expected(TEAM, "m", 500)

    assert expected in latest
    assert sum(output <= expected for output in latest) * 10 >= 9 * len(latest)
    assert sum(output < expected for output in latest) * 10 <= 9 * len(latest)
    assert kinds.expected(TEAM, "m", 256) == min(256, expected)


def test_the_kind_that_was_not_heard_of_for_longest_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(estimates, "MOST_KINDS", 2)
    kinds = OutputEstimates()
    kinds.learn(TEAM, "a", 100, 1)
    kinds.learn(TEAM, "b", 100, 2)
    kinds.learn(TEAM, "a", 100, 1)
    kinds.learn(TEAM, "c", 100, 3)

    assert [kinds.expected(TEAM, model, 100) for model in "abc"] == [1, 100, 3]
