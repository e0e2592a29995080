"""Metrics of teams are the engine's last answer, under names, and one worker's when there are several."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from gateway.telemetry.metrics import EngineLoad, GatewayMetrics
from gateway.telemetry.shared_metrics import forget_gauges
from gateway.telemetry.team_metrics import STALE_S, SharedTeamMetrics, TeamLoad, teams_file

NAMES = {f"team:{i}": ("acme", name) for i, name in enumerate(("red", "blue", "green", "white"))}
RED = TeamLoad(
    node_id="team:0",
    entitled_ppm=250_000,
    served_us=1_500_000,
    lag_us=-200_000,
    num_waiting=5,
    num_parked=2,
    num_slots=9,
    num_borrowed_slots=3,
)
BLUE = TeamLoad(node_id="team:1", entitled_ppm=750_000, served_us=2_000_000, lag_us=100_000, num_lent_slots=3)


class Worker:
    """The metrics of a process, which is told what the engine answers."""

    def __init__(self, *, max_teams: int = 200, file: Path | None = None) -> None:
        self.names = dict(NAMES)
        self.metrics = GatewayMetrics(
            lambda: True, max_teams=max_teams, team_names=lambda node_id: self.names.get(node_id), teams_file=file
        )

    def answer(self, *teams: TeamLoad) -> None:
        load = EngineLoad(model="m", num_running=0, num_waiting=0, num_free_blocks=0, num_used_blocks=0, teams=teams)
        self.metrics.refresh(load)

    def __call__(self, name: str, team: str, organization: str = "acme") -> float | None:
        return shown(self.metrics.registry, name, team, organization)


def shown(registry: CollectorRegistry, name: str, team: str, organization: str = "acme") -> float | None:
    return registry.get_sample_value(f"evenhand_team_{name}", {"organization": organization, "team": team})


def test_what_the_engine_tells_is_shown_under_the_names_of_its_teams() -> None:
    worker = Worker()
    worker.answer(RED, BLUE)

    expected = {
        "entitled_ratio": 0.25,
        "engine_seconds_total": 1.5,
        "lag_seconds": -0.2,
        "waiting_requests": 5,
        "parked_requests": 2,
        "slots": 9,
        "borrowed_slots": 3,
        "lent_slots": 0,
    }
    assert {name: worker(name, "red") for name in expected} == expected
    assert (worker("entitled_ratio", "blue"), worker("lent_slots", "blue")) == (0.75, 3)
    text = generate_latest(worker.metrics.registry).decode()
    assert "# TYPE evenhand_team_engine_seconds_total counter" in text
    assert 'evenhand_team_slots{organization="acme",team="red"} 9.0' in text


def test_a_team_that_is_gone_leaves_its_total_and_nothing_else() -> None:
    worker = Worker()
    worker.answer(RED, BLUE)
    worker.answer(BLUE)
    assert worker("slots", "red") is None
    assert worker("lag_seconds", "red") is None
    assert worker("engine_seconds_total", "red") == 1.5
    worker.answer(TeamLoad(node_id="team:0", served_us=1_700_000), BLUE)

    assert worker("slots", "red") is None, "served, and gone before anybody asked"
    assert worker("engine_seconds_total", "red") == 1.7


def test_an_engine_that_does_not_answer_shows_nothing() -> None:
    worker = Worker()
    worker.answer(RED)
    worker.metrics.refresh(None)
    assert worker("slots", "red") is None
    assert worker("engine_seconds_total", "red") is None
    worker.answer(BLUE)

    assert worker("engine_seconds_total", "red") == 1.5


def test_an_engine_that_was_started_anew_counts_from_nothing() -> None:
    worker = Worker()
    worker.answer(RED)
    worker.answer(TeamLoad(node_id="team:0", served_us=100, num_slots=1))

    assert worker("engine_seconds_total", "red") == pytest.approx(1e-4)


def test_a_team_that_was_renamed_is_shown_under_its_new_name_alone() -> None:
    worker = Worker()
    worker.answer(RED)
    worker.names["team:0"] = ("acme", "crimson")
    worker.answer(RED)

    assert worker("slots", "crimson") == 9
    assert worker("slots", "red") is worker("engine_seconds_total", "red") is None


def test_teams_beyond_the_most_and_those_without_a_name_are_summed_up() -> None:
    worker = Worker(max_teams=1)
    worker.answer(RED, BLUE)
    behind = TeamLoad(node_id="team:2", served_us=500_000, lag_us=-900_000, num_waiting=2, entitled_ppm=50_000)
    stranger = TeamLoad(node_id="team:9", served_us=250_000, num_waiting=4)
    worker.answer(RED, BLUE, behind, stranger)

    assert worker("slots", "red") == 9
    assert worker("slots", "blue") is None
    assert worker("entitled_ratio", "other", "other") == pytest.approx(0.8)
    assert worker("waiting_requests", "other", "other") == 6
    assert worker("lag_seconds", "other", "other") == 0.1
    assert worker("engine_seconds_total", "other", "other") == 2.75
    worker.answer(RED)
    assert worker("engine_seconds_total", "other", "other") == 2.75, "a total never falls because somebody rests"


def test_names_that_are_cut_alike_are_shown_once() -> None:
    worker = Worker()
    worker.names.update({"team:0": ("acme", "t" * 100 + "1"), "team:1": ("acme", "t" * 100 + "2")})
    worker.answer(RED, BLUE)

    assert worker("slots", "t" * 100) == 9
    assert worker("lag_seconds", "t" * 100) == 0.1
    assert generate_latest(worker.metrics.registry).decode().count("evenhand_team_slots{") == 1


@pytest.fixture
def shared(tmp_path: Path) -> CollectorRegistry:
    registry = CollectorRegistry()
    registry.register(SharedTeamMetrics(tmp_path))
    return registry


def test_of_several_workers_one_answer_is_shown_and_not_the_sum(shared: CollectorRegistry, tmp_path: Path) -> None:
    first, second = (Worker(file=teams_file(tmp_path, name)) for name in ("gateway-1", "gateway-2"))
    second.answer(BLUE)
    assert shown(shared, "entitled_ratio", "blue") == 0.75
    first.answer(RED, BLUE)
    second.answer(RED, BLUE)
    assert shown(shared, "slots", "red") == 9
    assert shown(shared, "engine_seconds_total", "red") == 1.5
    first.answer(BLUE)

    assert shown(shared, "slots", "red") is None
    assert shown(shared, "engine_seconds_total", "red") == 1.5


def test_a_worker_that_died_or_hangs_or_has_no_engine_gives_way_to_the_other(
    shared: CollectorRegistry, tmp_path: Path
) -> None:
    first, second = (Worker(file=teams_file(tmp_path, name)) for name in ("gateway-1", "gateway-2"))
    for lose in ("death", "silence", "no engine"):
        first.answer(RED)
        second.answer(BLUE)
        assert (shown(shared, "slots", "red"), shown(shared, "slots", "blue")) == (9, None)
        if lose == "death":
            forget_gauges(tmp_path, "gateway-1")
        elif lose == "silence":
            file = teams_file(tmp_path, "gateway-1")
            old = file.stat().st_mtime - STALE_S - 1
            os.utime(file, (old, old))
        else:
            first.metrics.refresh(None)
        assert (shown(shared, "slots", "red"), shown(shared, "slots", "blue")) == (None, 0), lose
    forget_gauges(tmp_path, "gateway-2")
    first.metrics.refresh(None)

    assert b"evenhand_team_slots{" not in generate_latest(shared)


def test_a_file_is_never_seen_half_written(tmp_path: Path) -> None:
    file = teams_file(tmp_path, "gateway-1")
    worker = Worker(file=file)
    worker.answer(RED)
    with file.open() as before:
        worker.answer(RED, BLUE)
        assert [row["team"] for row in json.load(before)] == ["red"]
    assert [path.name for path in tmp_path.iterdir()] == [file.name]


def test_a_folder_that_is_gone_does_not_end_the_asking(tmp_path: Path) -> None:
    worker = Worker(file=teams_file(tmp_path / "gone", "gateway-1"))
    worker.answer(RED)

    assert worker("slots", "red") == 9
