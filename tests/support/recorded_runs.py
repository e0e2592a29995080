"""Random runs of a core over the checking fake runner, recorded."""

from __future__ import annotations

from pathlib import Path
from random import Random

from core_harness import CoreHarness
from fake_runner import EOS

from engine.config import EngineConfig
from engine.core import EngineCore
from engine.messages import PathNode
from engine.recording.recorder import RecordingCore
from engine.sched.cost import PROFILES


class RecordedHarness(CoreHarness):
    """A `CoreHarness` whose core is recorded."""

    core: EngineCore  # what is recorded; calls go to `recording`

    def __init__(self, path: Path, *, policy: str = "fair", **options: object) -> None:
        super().__init__(policy=policy, **options)  # type: ignore[arg-type]
        runner = self.runner
        config = EngineConfig(
            model=Path("no-model"),
            policy=policy,
            max_sequences=options.get("max_sequences", 8),  # type: ignore[arg-type]
            max_step_tokens=options.get("max_step_tokens", 64),  # type: ignore[arg-type]
            plan_ahead=self.plan_ahead,
            prefix_cache=options.get("prefix_cache", True),  # type: ignore[arg-type]
        )
        self.recording = RecordingCore(
            config,
            runner,
            path=path,
            max_model_len=self.window,
            eos_token_ids=(EOS,),
            clock=lambda: self.now_us,
            cost=PROFILES["cpu"],
            draw_seed=self._draw_seed,
        )
        self.core = self.recording  # type: ignore[assignment]

    def close(self) -> None:
        """End the recording, and look at the recorded core from now on."""
        self.recording.close()
        self.core = self.recording._core


def small_harness(path: Path, **options: object) -> RecordedHarness:
    """Few rows, few blocks, small steps: somebody always has to yield."""
    sizes: dict[str, object] = {"num_blocks": 14, "max_sequences": 3, "max_step_tokens": 24, "window": 160}
    return RecordedHarness(path, **{**sizes, **options})


def play_anything(harness: RecordedHarness, random: Random, num_events: int = 120) -> None:
    """Whatever may happen between two steps, in any order."""
    for _ in range(num_events):
        kind = random.choices(_KINDS, _ODDS)[0]
        kind(harness, random)


def run_of_anything(path: Path, seed: int, *, policy: str, plan_ahead: bool, num_events: int = 120) -> RecordedHarness:
    """A recorded run, cut off in the middle of things; closed."""
    random = Random(seed)
    harness = small_harness(
        path, policy=policy, plan_ahead=plan_ahead, eos_every=random.choice([0, 20]), prefix_cache=random.random() < 0.7
    )
    play_anything(harness, random, num_events)
    harness.close()
    return harness


def _submit(harness: RecordedHarness, random: Random) -> None:
    team = random.choice(["a", "b", "c"])
    family = random.randrange(3)
    prompt = [family * 100 + i for i in range(random.randrange(1, 60))] + [random.randrange(1, 999)]
    harness.submit(
        prompt,
        random.randrange(1, 50),
        seed=random.choice([None, None, 7]),
        num_choices=random.choice([1, 1, 1, 3]),
        cache_salt=team,
        hold_at_cap=random.random() < 0.3,
        deadline_ms=random.choice([None, None, None, 0, 30]),
        path=(
            PathNode(f"org-{team == 'c'}"),
            PathNode(team, random.choice([1, 1, 3])),
            PathNode(f"key-{team}-{random.randrange(2)}"),
        ),
        request_class=random.choice(["interactive", "interactive", "standard", "batch"]),
        num_logprobs=random.choice([None, 0]),
    )


def _step(harness: RecordedHarness, random: Random) -> None:
    for _ in range(random.randrange(1, 6)):
        harness.step()


def _abort(harness: RecordedHarness, random: Random) -> None:
    harness.abort(random.choice([*_unfinished(harness), "nobody"]))


def _raise_cap(harness: RecordedHarness, random: Random) -> None:
    for request_id in _unfinished(harness):
        if random.random() < 0.5:
            caps = [answer.cap for (key, _), answer in harness.answers.items() if key == request_id]
            harness.raise_cap(request_id, max(caps) + random.choice([-1, 5, 20, 20]))


def _set_weight(harness: RecordedHarness, random: Random) -> None:
    harness.core.set_weight(random.choice(["a", "b", "c", "org-True"]), random.choice([0, 1, 2, 5]))


def _charge_external(harness: RecordedHarness, random: Random) -> None:
    harness.core.charge_external(random.choice(["a", "b", "nobody"]), random.randrange(100_000))


def _ask(harness: RecordedHarness, random: Random) -> None:
    """Questions change nothing, so they are not recorded."""
    harness.core.stats()
    harness.core.standing(random.choice([*_unfinished(harness), "nobody"]))
    assert harness.core.has_work in (True, False)


def _pass_time(harness: RecordedHarness, random: Random) -> None:
    harness.now_us += random.randrange(40_000)


def _unfinished(harness: RecordedHarness) -> list[str]:
    return sorted({key for (key, _), answer in harness.answers.items() if answer.finish is None})


_KINDS = (_submit, _step, _abort, _raise_cap, _set_weight, _charge_external, _ask, _pass_time)
_ODDS = (30, 60, 5, 12, 4, 4, 8, 4)
