"""What a recording holds, how it is kept, and what becomes of one that is cut short or is none."""

from __future__ import annotations

import logging
import stat
from pathlib import Path

import msgspec
import pytest
from recorded_runs import RecordedHarness, small_harness

from engine.errors import ConfigError, RequestRejected
from engine.messages import ChargeExternal, SetWeight
from engine.recording.format import Header, Planned, Stepped, Told
from engine.recording.reader import Recording
from engine.runner.port import PendingStep
from engine.sched.cost import PROFILES
from engine.sched.plan import StepPlan

PROMPT = list(range(5, 45))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run.jsonl"


def record(path: Path, num_requests: int = 3, **options: object) -> RecordedHarness:
    """Some requests from their arrival to their end."""
    harness = small_harness(path, **options)
    for i in range(num_requests):
        harness.submit([*PROMPT, i], 5)
    harness.drain()
    harness.close()
    return harness


def lines(path: Path) -> list[Told | Planned | Stepped]:
    decoder = msgspec.json.Decoder(Told | Planned | Stepped)
    return [decoder.decode(line) for line in path.read_bytes().splitlines()[1:]]


def test_the_header_says_what_plans_depend_on(path: Path) -> None:
    record(path, policy="static", plan_ahead=True, prefix_cache=False)

    with Recording(path) as recording:
        assert recording.header == Header(
            model="smollm2-135m-instruct",
            engine_id="engine-0",
            policy="static",
            max_sequences=3,
            max_step_tokens=24,
            num_blocks=14,
            block_tokens=16,
            max_model_len=160,
            vocab_size=1000,
            eos_token_ids=(0,),
            prefix_cache=False,
            plans_ahead=True,
            cost=PROFILES["cpu"],
        )


@pytest.mark.parametrize("plan_ahead", [False, True], ids=["in-time", "ahead"])
def test_every_plan_and_what_it_sampled_is_there(path: Path, plan_ahead: bool) -> None:
    runner = record(path, plan_ahead=plan_ahead).runner

    recorded = lines(path)
    plans: list[StepPlan] = [line.plan.unpacked() for line in recorded if isinstance(line, Planned)]
    results = [line.result for line in recorded if isinstance(line, Stepped) and line.result is not None]

    assert len(plans) > 5
    assert plans == runner.plans
    assert len(results) == len(plans)
    assert sum(len(result.token_ids) for result in results) == 3 * 5
    assert {result.elapsed_us for result in results} == {1000}


def test_a_plan_is_in_the_file_before_the_runner_has_it(path: Path) -> None:
    harness = small_harness(path)
    submit = harness.runner.submit
    num_seen = 0

    def look_first(plan: StepPlan) -> PendingStep:
        nonlocal num_seen
        num_seen += 1
        last = lines(path)[-1]
        assert isinstance(last, Planned)
        assert last.plan.unpacked() == plan
        return submit(plan)

    harness.runner.submit = look_first  # type: ignore[assignment, method-assign]
    harness.submit(PROMPT, 5)
    harness.drain()
    harness.close()

    assert num_seen == len(harness.runner.plans) > 5


def test_a_message_is_there_with_the_time_and_the_seed_that_were_taken_for_it(path: Path) -> None:
    harness = small_harness(path)
    request_id = harness.submit(PROMPT, 5)
    harness.now_us += 70
    harness.core.stats()
    harness.core.standing(request_id)
    harness.abort(request_id)
    harness.core.set_weight("team", 3)
    harness.core.charge_external("team", 17)
    harness.close()

    submitted, aborted, weighted, charged = (line for line in lines(path) if isinstance(line, Told))
    assert submitted.message == harness.answers[request_id, 0].message
    assert (submitted.clock, submitted.seed) == ((5_000_000,), 1)
    assert (aborted.clock, aborted.seed) == ((5_000_070,), None)
    assert weighted.message == SetWeight("engine-0", "team", 3)
    assert charged.message == ChargeExternal("engine-0", "team", 17)


def test_what_is_refused_at_the_door_is_left_out(path: Path) -> None:
    harness = small_harness(path)
    with pytest.raises(RequestRejected):
        harness.submit([1] * 160)
    with pytest.raises(RequestRejected):
        harness.submit(PROMPT, temperature=float("nan"))
    harness.close()

    assert lines(path) == []


def test_a_failure_is_the_last_line(path: Path) -> None:
    harness = small_harness(path)
    harness.runner.fail_at = 2
    harness.submit(PROMPT, 5)
    with pytest.raises(RuntimeError, match="the device is gone"):
        harness.drain()
    harness.close()

    last = lines(path)[-1]
    assert isinstance(last, Stepped)
    assert last.error == "RuntimeError: the device is gone"


def test_a_recording_is_for_its_owner_only(path: Path) -> None:
    path.touch(mode=0o644)
    record(path)

    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_earlier_recordings_are_kept_under_numbers(path: Path) -> None:
    """An engine that is started again after a crash must not write over what led to it."""
    for num_requests in (1, 2, 3):
        record(path, num_requests)

    kept = [path.with_name(f"{path.name}.1"), path.with_name(f"{path.name}.2"), path]
    assert sorted(path.parent.iterdir()) == sorted(kept)
    assert [sum(isinstance(line, Told) for line in lines(file)) for file in kept] == [1, 2, 3]


def test_a_file_that_cannot_be_written_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"engine\.record: cannot write .*none/run"):
        small_harness(tmp_path / "none" / "run")


def test_a_full_disk_ends_the_recording_and_not_the_engine(caplog: pytest.LogCaptureFixture) -> None:
    mode = Path("/dev/full").stat().st_mode
    with caplog.at_level(logging.ERROR):
        harness = record(Path("/dev/full"))

    harness.check_ended()
    assert [record.getMessage() for record in caplog.records] == [
        "the recording '/dev/full' ends here: No space left on device"
    ]
    assert Path("/dev/full").stat().st_mode == mode, "only a file of its own is made private"


def test_a_last_line_that_is_not_whole_is_left_out(path: Path) -> None:
    record(path)
    whole = path.read_bytes()
    path.write_bytes(whole[:-10])

    with Recording(path) as recording:
        calls = list(recording.calls())
        assert recording.is_torn
    assert calls[-1].end is None, "the plan before the torn line is there"
    assert len(calls[-1].plans) == 1
    assert calls[-1].line == whole.count(b"\n") - 1


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "has no header"),
        (b'{"step_id":1,"new_rows":[],"chunks":[]}\n', "has no header"),
        (b"\x00\xff not text\n", "has no header"),
        (b'{"recording":1', "has no header"),
        (b'{"recording":2,"something":"new"}\n', "version 2, which this evenhand cannot replay; it reads version 1"),
        (b'{"recording":1}\n', "damaged at line 1"),
    ],
    ids=["empty", "plans-of-old", "binary", "torn-header", "newer", "half-a-header"],
)
def test_what_is_no_recording_is_a_clear_error(path: Path, content: bytes, says: str) -> None:
    path.write_bytes(content)

    with pytest.raises(ConfigError, match=says):
        Recording(path)


@pytest.mark.parametrize(
    ("name", "value"), [("num_blocks", -5), ("num_blocks", 10**13), ("max_sequences", 0), ("max_model_len", -1)]
)
def test_a_header_with_figures_that_no_engine_has_is_refused_before_anything_is_made_of_it(
    path: Path, name: str, value: int
) -> None:
    record(path)
    header, _, rest = path.read_bytes().partition(b"\n")
    path.write_bytes(msgspec.json.encode({**msgspec.json.decode(header), name: value}) + b"\n" + rest)

    with pytest.raises(ConfigError, match=name):
        Recording(path)


def test_a_file_that_cannot_be_read_is_a_clear_error(tmp_path: Path) -> None:
    for path in (tmp_path / "none", tmp_path):
        with pytest.raises(ConfigError, match="cannot read the recording"):
            Recording(path)


@pytest.mark.parametrize(
    "damage",
    [b"\n", b"{}\n", b'{"type":"planned","plan":{"step_id":1,"chunks":[[1]]}}\n', b"[" * 2000 + b"\n"],
    ids=["empty-line", "no-event", "no-chunk", "nested"],
)
def test_a_damaged_line_is_named(path: Path, damage: bytes) -> None:
    record(path)
    header, first, rest = path.read_bytes().split(b"\n", 2)
    path.write_bytes(b"\n".join([header, first, damage + rest]))

    with Recording(path) as recording, pytest.raises(ConfigError, match="damaged at line 3"):
        list(recording.calls())


def test_a_message_within_a_step_is_damage(path: Path) -> None:
    record(path)
    content = path.read_bytes().splitlines(keepends=True)
    told, planned = content[1], next(line for line in content if b'"planned"' in line)
    path.write_bytes(content[0] + planned + told)

    with Recording(path) as recording, pytest.raises(ConfigError, match="damaged at line 3: a message within a step"):
        list(recording.calls())


def test_the_runner_behind_a_recording_is_not_closed_with_it(path: Path) -> None:
    harness = small_harness(path)
    harness.submit(PROMPT, 2)
    harness.step()
    harness.recording.close()
    harness.drain()

    assert harness.finish("r0") == "length"
    assert len(lines(path)) == 3
