"""What the bench of isolation makes of times and tokens: figures, goals, verdicts."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from gateway.bench.caller import Answer
from gateway.bench.figures import Isolation, Line, Shares, percentile
from gateway.bench.flood import Flood
from gateway.bench.prompts import Prompts
from gateway.bench.report import as_json, table

RUN = Isolation(
    ttft_alone_s=[0.1] * 99 + [0.2],
    ttft_beside_s=[0.2] * 99 + [0.6],
    pace_beside_s=[0.05, 0.04],
    long_alone_s=[3.0, 2.0, 9.0],
    long_beside_s=[9.0, 1.0, 5.0],
    gaps_alone_s=[0.01] * 99 + [0.03],
    gaps_beside_s=[0.05] * 99 + [0.2],
    flood_alone_per_s=400.0,
    flood_beside_per_s=360.0,
    charged=0.06,
    quiet_failures=[],
    flood_failures=[],
)


def line(run: Isolation | Shares, name: str) -> Line:
    return next(each for each in run.lines() if each.name == name)


def test_a_percentile_is_a_value_that_so_many_do_not_exceed() -> None:
    values = [float(i) for i in range(100, 0, -1)]

    assert [percentile(values, rank) for rank in (0.0, 0.5, 0.9, 0.99, 1.0)] == [1, 50, 90, 99, 100]
    assert percentile([7.0], 0.99) == 7
    assert percentile([], 0.5) is None


def test_a_quiet_team_is_held_against_what_it_is_alone() -> None:
    assert line(RUN, "quiet_beside_ttft_p99_ms").goal == 250
    assert line(RUN, "quiet_beside_ttft_p99_ms").verdict == "ok"
    slow = replace(RUN, ttft_beside_s=[0.3] * 100)
    assert line(slow, "quiet_beside_ttft_p99_ms").verdict == "over"
    assert line(replace(RUN, ttft_beside_s=[]), "quiet_beside_ttft_p99_ms").verdict is None


def test_a_long_prompt_counts_by_its_median() -> None:
    assert line(RUN, "long_alone_ttft_ms").value == 3000
    long = line(RUN, "long_beside_ttft_ms")
    assert (long.value, long.goal, long.verdict) == (5000, 9000, "ok")


def test_a_stream_may_take_60_ms_or_three_times_what_it_takes_alone() -> None:
    assert line(RUN, "stream_beside_gap_p99_ms").goal == 60
    slow_alone = replace(RUN, gaps_alone_s=[0.03] * 100)
    assert line(slow_alone, "stream_beside_gap_p99_ms").goal == pytest.approx(90)
    assert line(RUN, "stream_beside_gap_max_ms").value == 200


def test_a_flood_loses_what_the_quiet_team_was_charged_and_a_little() -> None:
    kept = line(RUN, "flood_kept_percent")
    assert (kept.value, kept.verdict) == (pytest.approx(90), "ok")
    assert kept.goal == pytest.approx(89)
    assert line(replace(RUN, flood_beside_per_s=350.0), "flood_kept_percent").verdict == "under"
    unknown = line(replace(RUN, charged=None), "flood_kept_percent")
    assert (unknown.goal, unknown.verdict) == (None, None)


def test_nobody_may_be_refused() -> None:
    assert line(RUN, "quiet_failed_num").verdict == line(RUN, "flood_failed_num").verdict == "ok"
    assert line(replace(RUN, flood_failures=["429"]), "flood_failed_num").verdict == "over"


def test_shares_go_by_engine_time_where_it_is_known() -> None:
    shares = Shares(weights=(4, 1), output_per_s=(350.0, 150.0), engine_s=(81.0, 19.0), failures=[])

    assert line(shares, "team0_entitled_percent").value == 80
    assert line(shares, "team0_engine_percent").verdict == "ok"
    assert line(shares, "team1_engine_percent").verdict == "ok"
    assert line(shares, "team0_output_percent").verdict is None
    uneven = replace(shares, engine_s=(82.0, 18.0))
    assert line(uneven, "team0_engine_percent").verdict == "ok"
    assert line(uneven, "team1_engine_percent").verdict == "under"
    assert line(replace(shares, engine_s=None), "team1_output_percent").verdict == "over"


def test_the_table_says_what_is_over_and_what_is_not_known() -> None:
    lines = [
        Line("a", "first", 12.345, 10.0),
        Line("b", "second", None, 10.0),
        Line("c", "third", 98765.4, 3.0, "at least"),
        Line("d", "fourth", 3.0),
    ]
    assert table("title", lines).splitlines() == [
        "title",
        "          measured   goal",
        "  first       12.3  <= 10  over",
        "  second         -  <= 10",
        "  third      98765   >= 3  ok",
        "  fourth         3",
    ]


def test_json_has_figures_goals_and_verdicts_by_name() -> None:
    told = json.loads(as_json({"flood": 64}, RUN.lines()))

    assert told["flood"] == 64
    assert told["figures"]["long_beside_ttft_ms"] == 5000
    assert told["goals"]["long_beside_ttft_ms"] == 9000
    assert told["verdicts"]["long_beside_ttft_ms"] == "ok"
    assert set(told["figures"]) == {each.name for each in RUN.lines()}


def test_a_flood_s_tokens_are_counted_by_when_they_came() -> None:
    flood = Flood(None, size=2, num_prompt=1, num_output=1)  # type: ignore[arg-type]  # it sends nothing here
    whole = Answer(sent_s=0.0, arrivals_s=[1.0, 2.0, 3.0], num_tokens=6)
    cut_off = Answer(sent_s=0.0, arrivals_s=[2.5, 3.5])
    flood.answers += [whole, cut_off]

    assert flood.num_tokens(0.0, 9.0) == 10
    assert flood.num_tokens(2.0, 3.0) == 4
    assert flood.num_tokens(4.0, 9.0) == 0


def test_gaps_count_within_the_time_asked_for() -> None:
    answer = Answer(sent_s=0.5, arrivals_s=[1.0, 2.0, 4.0, 7.0])

    assert answer.ttft_s == 0.5
    assert answer.gaps_s() == [1, 2, 3]
    assert answer.gaps_s(2.0, 4.0) == [2]


def test_no_two_prompts_begin_alike() -> None:
    prompts, others = Prompts(), Prompts()

    texts = [each.of(16) for _ in range(50) for each in (prompts, others)]
    assert len({" ".join(text.split()[:16]) for text in texts}) == 100
    assert all(len(text.split()) == 16 for text in texts)
    assert {prompts.about(100) for _ in range(200)} <= set(range(80, 121))
