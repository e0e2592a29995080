from __future__ import annotations

from pathlib import Path

import pytest
from sim_kit import arrival, machine, path, run_of, step, trace, workload

from engine.errors import ConfigError
from engine.sim.comparison import compare, gap_bound_us
from engine.sim.figures import served_by_class
from engine.sim.plot import draw, make_folder, served_by_team
from engine.sim.report import report
from gateway.commands.sim import run as run_command

BOTH = workload(
    *(arrival(i, "red", 30, 20) for i in range(6)),
    *(arrival(10 + i, "blue", 30, 20, request_class="batch") for i in range(6)),
    max_sequences=2,
    until_us=200_000,
    greedy=("red",),
    watched=("red",),
)


def test_the_reference_is_its_own_throughput_and_others_are_measured_by_it() -> None:
    first, second = compare(BOTH, ["fcfs", "bucket"], machine()).results

    assert first.throughput == 1.0
    assert second.throughput == pytest.approx(compare(BOTH, ["bucket"], machine()).results[0].throughput)
    assert second.throughput <= 1.0


def test_a_watched_team_is_also_run_alone() -> None:
    (result,) = compare(BOTH, ["priority"], machine()).results

    assert result.alone["red"] == result.latency["red"], "interactive comes before batch"
    (result,) = compare(BOTH, ["vtc"], machine()).results
    assert (result.alone["red"].ttft_p99_us or 0) < (result.latency["red"].ttft_p99_us or 0)


def test_the_table_holds_a_row_for_each_policy_and_team() -> None:
    text = report(compare(BOTH, ["fcfs", "vtc"], machine()))
    rows = [line.split() for line in text.splitlines()]

    assert text.startswith("test: for a test (seed 0, 2 slots)\n")
    assert [row[0] for row in rows if row and row[0] in {"fcfs", "vtc"}] == ["fcfs", "vtc"] * 4
    assert ["served", "by", "class", "batch", "interactive"] in rows
    assert "100.0%" in next(row for row in rows if row[:1] == ["fcfs"])


def test_service_by_class() -> None:
    arrivals = [arrival(0, "red", 10, 1), arrival(1, "red", 10, 1, request_class="batch")]
    steps = [step(0, 1, (0, 5), (1, 7)), step(1, 2, (0, 3))]

    run = run_of(workload(*arrivals, measure_from_us=1), [trace(made) for made in arrivals], steps, 2)
    assert served_by_class(run) == {"interactive": 3, "batch": 0}


def test_the_bound_is_window_lag_quantum_and_a_token_twice_and_the_lag_once_more() -> None:
    made = arrival(0, "red", 10, 1)
    run = run_of(workload(made), [trace(made)], [step(0, 1600, (0, 5))], 1600)

    assert gap_bound_us(run) == 2 * (20 * 1600 + 100 + 200) + 16 * 1600


def test_the_picture_shows_who_was_served_when(tmp_path: Path) -> None:
    arrivals = [arrival(0, "red", 10, 1), arrival(1, "blue", 10, 1, path=path("blue"))]
    run = run_of(workload(*arrivals), [trace(made) for made in arrivals], [step(0, 10, (0, 6), (1, 3))], 600)
    times, layers = served_by_team(run, ["blue"])

    assert len(times) == 60
    assert (layers["blue"][0], layers["all others"][0]) == (0.3, 0.6)
    make_folder(tmp_path / "pictures")
    draw(compare(BOTH, ["fcfs", "vtc"], machine()), tmp_path / "pictures" / "both.png")
    assert (tmp_path / "pictures" / "both.png").stat().st_size > 10_000


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"workloads": ["storm"]}, "no workload 'storm'"),
        ({"policies": ["lottery"]}, "no policy 'lottery'"),
        ({"profile": "abacus"}, "no profile 'abacus'"),
    ],
)
def test_the_command_refuses_names_it_does_not_know_before_it_runs_anything(
    wrong: dict[str, object], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    given = {"workloads": ["flood"], "policies": ["fcfs"], "profile": "cpu", "seed": 1, **wrong}

    with pytest.raises(ConfigError, match=named):
        run_command(given.pop("workloads"), **given)  # type: ignore[arg-type]
    assert capsys.readouterr().out == ""


def test_the_command_prints_the_table_alone(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code = run_command(["long-prompt"], policies=["fcfs"], profile="cpu", seed=2, plot_folder=tmp_path)
    told = capsys.readouterr()

    assert code == 0
    assert told.out.startswith("long-prompt: ")
    assert "picture" in told.err
    assert (tmp_path / "long-prompt.png").exists()


def test_a_folder_for_pictures_that_cannot_be_is_said_in_a_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="file is no folder"):
        make_folder(tmp_path / "file")
    with pytest.raises(ConfigError, match="cannot be written"):
        draw(compare(BOTH, ["fcfs"], machine()), tmp_path / "none" / "both.png")
