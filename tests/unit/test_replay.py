"""Replay finds what is different, says so in words, and tells what a cut recording is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from recorded_runs import run_of_anything, small_harness

from engine.errors import ConfigError
from engine.messages import PathNode
from engine.sched.fcfs import Fcfs
from engine.sim.replay import replay
from engine.sim.replay_report import replay_report
from gateway.commands.sim import run_replay

PATHS = {team: (PathNode("org"), PathNode(team), PathNode(f"key-{team}")) for team in ("one", "two")}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run.jsonl"


def contest(path: Path) -> None:
    """Two teams that want more than there is, for some time."""
    harness = small_harness(path, num_blocks=64)
    for i in range(12):
        team = "one" if i % 2 else "two"
        prompt = list(range(1 + i * 50, 41 + i * 50))
        harness.submit(prompt, 20, request_id=f"{team}-{i}", path=PATHS[team], cache_salt=team)
    harness.drain()
    harness.close()


def change(path: Path, old: bytes, new: bytes) -> None:
    content = path.read_bytes()
    assert old in content
    path.write_bytes(content.replace(old, new))


def test_the_same_engine_makes_the_same_plans(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    contest(path)
    num_plans = path.read_bytes().count(b'"planned"')

    code = run_replay(path)

    assert code == 0
    head, verdict, empty, *table = capsys.readouterr().out.splitlines()
    assert head == "run.jsonl: smollm2-135m-instruct, policy fair, 3 slots, steps of 24 tokens, 64 blocks"
    assert (verdict, empty) == (f"{num_plans} steps: identical", "")
    assert [line.split()[:2] for line in table[1:3]] == [["two", "6"], ["one", "6"]]
    assert table[-1].split()[0] == str(num_plans)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b'"policy":"fair"', b'"policy":"fcfs"'),
        (b'["two",1]', b'["two",5]'),
        (b'"fixed_us":5000', b'"fixed_us":40000'),
        (b'"num_blocks":64', b'"num_blocks":9'),
        (b'"max_step_tokens":24', b'"max_step_tokens":25'),
        (b'"output_cap":20', b'"output_cap":3'),
        (b'"eos_token_ids":[0]', b'"eos_token_ids":[0,1]'),
        (b'"plans_ahead":false', b'"plans_ahead":true'),
    ],
    ids=["policy", "weight", "cost", "blocks", "budget", "cap", "eos", "ahead"],
)
def test_an_engine_that_differs_is_found(
    path: Path, capsys: pytest.CaptureFixture[str], old: bytes, new: bytes
) -> None:
    if b"eos" in old:
        harness = small_harness(path, eos_every=0)
        harness.submit(list(range(1, 40)), 30, seed=3)
        harness.drain()
        harness.close()
        sampled = harness.tokens("r0")[5]
        new = b'"eos_token_ids":[%d]' % sampled
    else:
        contest(path)
    change(path, old, new)

    assert run_replay(path) == 1
    assert "different: after " in capsys.readouterr().out


def test_a_changed_weight_midway_is_found_at_its_first_consequence(path: Path) -> None:
    harness = small_harness(path, num_blocks=64)
    for i in range(12):
        team = "one" if i % 2 else "two"
        harness.submit(list(range(1 + i * 50, 41 + i * 50)), 20, path=PATHS[team])
    for _ in range(6):
        harness.step()
    harness.core.set_weight("two", 9)
    harness.drain()
    harness.close()
    assert replay(path).difference == ""

    change(path, b'"weight":9', b'"weight":1')
    replayed = replay(path)

    assert replayed.num_steps >= 6
    assert replayed.num_steps < len(harness.runner.plans)
    assert "the plans differ" in replayed.difference


def test_a_difference_names_step_line_rows_and_requests(path: Path) -> None:
    harness = small_harness(path, policy="fcfs")
    harness.submit(list(range(1, 31)), 3, request_id="hers", num_choices=2, seed=5)
    harness.submit(list(range(50, 60)), 3, request_id="his", seed=6)
    harness.drain()
    harness.close()
    content = path.read_bytes()
    assert b"[[0,30,1,1],[1,10,1,1],[2,16,14,1,0,3]]" in content
    path.write_bytes(content.replace(b"[1,10,1,1],[2,16,14,1,0,3]]", b"[2,16,9,0,0,3]]"))

    assert replay(path).difference.splitlines() == [
        "after 2 equal steps, at line 8: the plans differ",
        "--- recorded",
        "+++ replayed",
        "@@ -1,4 +1,5 @@",
        "-step 3: 2 rows, 10 tokens",
        "+step 3: 3 rows, 16 tokens",
        ' row 2 becomes hers choice 1: 30 prompt tokens, 0 of output (checksum 729fe4ad), {"seed":5}',
        " row 0, hers: token 30, samples",
        "-row 2, hers choice 1: tokens 16 to 24, new blocks 0 3",
        "+row 1, his: token 10, samples",
        "+row 2, hers choice 1: tokens 16 to 29, new blocks 0 3, samples",
    ]


def drop_plan(lines: list[bytes]) -> None:
    """The last, so that the replay makes one more than the engine."""
    at = max(i for i, line in enumerate(lines) if b'"planned"' in line)
    del lines[at]


def add_plan(lines: list[bytes]) -> None:
    at = max(i for i, line in enumerate(lines) if b'"stepped"' in line)
    planned = next(line for line in lines if b'"planned"' in line)
    lines.insert(at, planned.replace(b'"step_id":1,', b'"step_id":99,'))


def add_time(lines: list[bytes]) -> None:
    at = max(i for i, line in enumerate(lines) if b'"stepped"' in line)
    lines[at] = lines[at].replace(b'"clock":[', b'"clock":[1,')


def drop_time(lines: list[bytes]) -> None:
    at = max(i for i, line in enumerate(lines) if b'"stepped"' in line)
    lines[at] = lines[at].replace(b'"clock":[', b'"was":[')


def drop_result(lines: list[bytes]) -> None:
    at = max(i for i, line in enumerate(lines) if b'"result"' in line)
    lines[at] = lines[at].replace(b'"result":', b'"was":')


def add_error(lines: list[bytes]) -> None:
    at = max(i for i, line in enumerate(lines) if b'"result"' in line)
    lines[at] = lines[at].replace(b'"type":"stepped"', b'"type":"stepped","error":"OSError: why"')


@pytest.mark.parametrize(
    ("alter", "says"),
    [
        (drop_plan, "+step 22: 1 rows, 1 tokens"),
        (add_plan, "-step 99: 1 rows, 24 tokens"),
        (add_time, "the replay reads the clock less often than the engine did"),
        (drop_time, "the replay reads the clock more often than the engine did"),
        (drop_result, "the replay takes in step 22, the engine did not"),
        (add_error, "the engine failed with OSError: why, the replay does not"),
    ],
)
def test_a_call_that_goes_another_way_is_found(path: Path, alter: Callable[[list[bytes]], None], says: str) -> None:
    harness = small_harness(path)
    harness.submit(list(range(1, 31)), 21)
    harness.drain()
    harness.close()
    assert len(harness.runner.plans) == 22
    lines = path.read_bytes().splitlines(keepends=True)
    alter(lines)
    path.write_bytes(b"".join(lines))

    replayed = replay(path)

    assert says in replayed.difference
    assert replayed.num_steps >= 21


def test_a_device_that_failed_is_where_the_recording_ends(path: Path) -> None:
    harness = small_harness(path)
    harness.runner.fail_at = 4
    harness.submit(list(range(1, 31)), 21)
    with pytest.raises(RuntimeError):
        harness.drain()
    harness.close()

    replayed = replay(path)

    assert (replayed.difference, replayed.num_steps) == ("", 4)
    assert replayed.notes == ("The recording ends while the engine computes step 4: RuntimeError: the device is gone.",)


def test_a_bug_of_the_engine_shows_again(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(Fcfs, "sealed", lambda policy: policy.bug(), raising=True)
        harness = small_harness(path, policy="fcfs")
        harness.submit(list(range(1, 31)), 21)
        with pytest.raises(AttributeError):
            harness.step()
        harness.close()

        replayed = replay(path)
    assert replayed.difference == ""
    assert replayed.notes == ("The engine fails as recorded: AttributeError: 'Fcfs' object has no attribute 'bug'.",)

    assert "+step 1: 1 rows, 24 tokens" in replay(path).difference, "without the bug it goes on"


def test_a_bug_that_the_engine_did_not_have_is_a_difference(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    contest(path)
    change(path, b'"policy":"fair"', b'"policy":"fcfs"')
    monkeypatch.setattr(Fcfs, "admit", lambda policy, _: policy.bug())

    assert "at line 2: the replay fails with AttributeError" in replay(path).difference


def test_a_recording_cut_at_any_line_replays_up_to_there(path: Path) -> None:
    run_of_anything(path, 1, policy="fair", plan_ahead=True, num_events=25)
    lines = path.read_bytes().splitlines(keepends=True)
    assert len(lines) > 30
    for i in range(1, len(lines)):
        path.write_bytes(b"".join(lines[:i]))
        replayed = replay(path)
        assert replayed.difference == ""
        assert replayed.num_steps == sum(b'"planned"' in line for line in lines[:i])
        is_within = b'"planned"' in lines[i - 1]
        assert len(replayed.notes) == is_within
        assert replay_report(replayed)


def test_a_recording_with_other_blocks_cannot_be_replayed(path: Path) -> None:
    contest(path)
    change(path, b'"block_tokens":16', b'"block_tokens":32')

    with pytest.raises(ConfigError, match="blocks of 32 tokens"):
        replay(path)
