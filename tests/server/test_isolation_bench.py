"""`evenhand bench isolation` against servers that run already: what it says, and on which of its two outputs.

Gateway and scheduler are real; the engine computes nothing and takes its time over it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from cluster import FAIR_ENGINE, MODEL, Cluster, running_alone
from identity_kit import KEY
from scripted_server import ScriptedServer

from gateway.bench.caller import Caller
from gateway.bench.prompts import Prompts

NUM_SLOTS = 8
QUICK = ("--flood", "12", "--samples", "4", "--long-tokens", "1500", "--window", "4")


@pytest.fixture(scope="module")
def cluster(
    tmp_path_factory: pytest.TempPathFactory, smollm2_path: Path, free_port: Callable[[], int]
) -> Iterator[Cluster]:
    """With an organization ``acme`` and its teams ``red`` and ``blue``."""
    engine = (FAIR_ENGINE, str(NUM_SLOTS))
    folder, models = tmp_path_factory.mktemp("bench"), smollm2_path.parents[1]
    with running_alone(folder, models, free_port, engine=engine) as cluster:
        cluster.command("org", "create", "acme")
        for team in ("red", "blue"):
            cluster.command("team", "create", "--org", "acme", team)
        yield cluster


def bench(*arguments: str, **settings: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "gateway.cli", "bench", "isolation", *arguments],
        env=os.environ | settings,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def measured(cluster: Cluster, *arguments: str) -> dict[str, Any]:
    """The JSON of a run in which ``red`` is the quiet team and ``blue`` floods with two keys."""
    gateway = cluster.gateways[0]
    keys = [cluster.new_key("acme", team) for team in ("red", "blue", "blue")]
    done = bench(
        "--url",
        gateway.url,
        "--metrics-url",
        f"http://127.0.0.1:{gateway.metrics_port}/metrics",
        "--quiet-key",
        keys[0],
        "--flood-key",
        f"{keys[1]},{keys[2]}",
        "--json",
        *QUICK,
        *arguments,
    )
    assert done.returncode == 0, done.stderr
    assert not any(key in done.stdout + done.stderr for key in keys)
    told: dict[str, Any] = json.loads(done.stdout)
    return told


@pytest.mark.slow
def test_a_run_has_every_figure(cluster: Cluster) -> None:
    told = measured(cluster)

    figures = told["figures"]
    assert told["flood_keys"] == 2
    assert [name for name, value in figures.items() if value is None] == []
    assert (figures["quiet_alone_num"], figures["quiet_beside_num"]) == (4, 4)
    assert min(figures["flood_alone_per_s"], figures["flood_beside_per_s"]) > 0
    assert 0 < figures["quiet_charged_percent"] < 50
    assert told["verdicts"]["quiet_failed_num"] == told["verdicts"]["flood_failed_num"] == "ok"
    assert 1.2 < figures["long_beside_ttft_ms"] / figures["long_alone_ttft_ms"] < 4
    assert figures["stream_beside_gap_p50_ms"] > 1.2 * figures["stream_alone_gap_p50_ms"]


@pytest.mark.slow
def test_both_flood_and_get_their_shares_by_weight(cluster: Cluster) -> None:
    cluster.command("team", "set-weight", "--org", "acme", "red", "4")

    told = measured(cluster, "--weights", "4:1", "--window", "12")  # what is owed meanwhile is little of that

    figures = told["figures"]
    assert told["weights"] == [4, 1]
    assert figures["team0_entitled_percent"] == 80
    assert figures["team0_engine_percent"] == pytest.approx(80, rel=0.05)
    assert figures["team0_engine_percent"] + figures["team1_engine_percent"] == pytest.approx(100)
    assert figures["team0_output_percent"] > 65
    assert figures["failed_num"] == 0


async def test_an_answer_is_its_pieces_and_the_server_s_count(scripted: ScriptedServer) -> None:
    async with httpx.AsyncClient(base_url=scripted.url) as http:
        whole = await Caller(http, "eight", [KEY], Prompts()).complete(10, 8)
        cut = await Caller(http, "dies-in-the-middle", [KEY], Prompts()).complete(10, 8)
        refused = await Caller(http, "eight", ["wrong"], Prompts()).complete(10, 8)
    async with httpx.AsyncClient(base_url="http://127.0.0.1:1") as http:
        nobody = await Caller(http, "eight", [KEY], Prompts()).complete(10, 8)

    assert (whole.failure, whole.num_tokens) == (None, 8)
    assert whole.ttft_s is not None
    assert len(whole.gaps_s()) == len(whole.arrivals_s) - 1 <= 7
    assert cut.num_tokens is None
    assert len(cut.arrivals_s) > 0
    assert "engine_unavailable" in str(cut.failure)
    assert (refused.ttft_s, str(refused.failure)[:4]) == (None, "401 ")
    assert str(nobody.failure).startswith("ConnectError")
    assert all(answer.begun.is_set() for answer in (whole, cut, refused, nobody))


def test_a_server_of_its_own_that_cannot_start_ends_it_with_one_line(smollm2_path: Path) -> None:
    done = bench(EVENHAND_HOME=str(smollm2_path.parents[2]), EVENHAND_ENGINE__DEVICE="cuda")

    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.splitlines()[-1].startswith("evenhand: the server ended with exit code 78: ")


def test_a_server_that_refuses_ends_it_with_one_line(scripted: ScriptedServer) -> None:
    done = bench("--url", scripted.url, "--quiet-key", KEY, "--flood-key", KEY, "--model", MODEL)

    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(f"evenhand: {scripted.url} does not answer as it should: 404 ")


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("--url", "http://127.0.0.1:1"), "--quiet-key and --flood-key"),
        (("--quiet-key", "x"), "go with --url"),
        (("--weights", "4"), "--weights are not two such as 4:1"),
        (("--weights", "0:1"), "--weights are 1 at least"),
    ],
)
def test_options_that_do_not_fit_are_told_before_anything_starts(arguments: tuple[str, ...], complaint: str) -> None:
    done = bench(*arguments)

    assert (done.returncode, done.stdout) == (2, "")
    assert complaint in " ".join(done.stderr.replace("│", " ").split())
