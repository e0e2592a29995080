"""The same prompts give the same tokens: alone or among others, at any step budget, cold, cached or preempted."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from engine.config import EngineConfig
from engine.core import EngineCore
from engine.messages import Submit
from engine.models.registry import open_source
from engine.runner.model_runner import build_runner
from engine.sampling_params import SamplingParams

pytestmark = [pytest.mark.model, pytest.mark.slow]

NUM_PROMPTS = 20
NUM_OTHERS = 12  # beside the 20: each prompt runs among 31 others
NUM_TOKENS = 24
SAMPLING = {
    "greedy": SamplingParams(temperature=0.0, seed=0, ignore_eos=True),
    "seeded": SamplingParams(temperature=0.9, top_p=0.95, seed=1234, ignore_eos=True),
    "penalized": SamplingParams(
        temperature=0.7, seed=5, repetition_penalty=1.3, frequency_penalty=0.5, min_tokens=10, ignore_eos=True
    ),
}


def _prompt(index: int) -> list[int]:
    """Unlike lengths from 5 to about 400, among them one token before, at, and after the edge of a KV tile."""
    edges = [255, 256, 257, 15, 16, 17]
    length = edges[index] if index < len(edges) else 5 + (index * 97) % 400
    return [1000 + (index * 7919 + i * 104729) % 40000 for i in range(length)]


@dataclass
class Engine:
    core: EngineCore
    num_cached_tokens: int = 0
    num_runs: int = 0

    def generate(self, indices: list[int], sampling: SamplingParams) -> dict[int, tuple[int, ...]]:
        """Run all at once to their end; returns the tokens of each."""
        self.num_runs += 1
        tokens: dict[int, tuple[int, ...]] = dict.fromkeys(indices, ())
        for index in indices:
            self.core.submit(
                Submit(
                    engine_id="engine-0",
                    request_id=f"{self.num_runs}:{index}",
                    token_ids=_prompt(index),
                    sampling=sampling,
                    path=(),
                    output_cap=NUM_TOKENS + index % 3,
                )
            )
        while self.core.has_work:
            for output in self.core.step():
                index = int(output.request_id.split(":")[1])
                tokens[index] += output.token_ids
                if output.finish is not None:
                    self.num_cached_tokens += output.num_cached_tokens
        self.core.check_integrity()
        return tokens


def _engine(path: Path, **changes: object) -> Engine:
    config = EngineConfig(model=path, dtype="bfloat16", max_sequences=32, **changes)  # type: ignore[arg-type]
    loaded = build_runner(config)
    core = EngineCore(
        config,
        loaded.runner,
        max_model_len=loaded.max_model_len,
        eos_token_ids=loaded.model_config.eos_token_ids,
        clock=lambda: time.monotonic_ns() // 1000,
    )
    return Engine(core)


@pytest.fixture(scope="module")
def alone(smollm2_path: Path) -> dict[str, dict[int, tuple[int, ...]]]:
    """Every prompt in an engine that has nothing else to do and no cache."""
    engine = _engine(smollm2_path, prefix_cache=False)
    return {
        kind: {i: engine.generate([i], sampling)[i] for i in range(NUM_PROMPTS)} for kind, sampling in SAMPLING.items()
    }


@pytest.mark.parametrize("kind", SAMPLING)
@pytest.mark.parametrize("budget", [16, 64, 512])
def test_tokens_do_not_depend_on_neighbors_step_budget_or_cache(
    smollm2_path: Path, alone: dict[str, dict[int, tuple[int, ...]]], budget: int, kind: str
) -> None:
    engine = _engine(smollm2_path, max_step_tokens=budget)
    everybody = list(range(NUM_PROMPTS + NUM_OTHERS))

    cold = engine.generate(everybody, SAMPLING[kind])
    assert engine.num_cached_tokens == 0
    cached = engine.generate(everybody[::-1], SAMPLING[kind])

    assert engine.num_cached_tokens > NUM_PROMPTS * 50, "the second run was meant to hit the cache"
    assert alone[kind] == {i: cold[i] for i in range(NUM_PROMPTS)}
    assert alone[kind] == {i: cached[i] for i in range(NUM_PROMPTS)}


@pytest.mark.parametrize("kind", ["seeded", "penalized"])
@pytest.mark.parametrize("plan_ahead", [False, True], ids=["planned-in-time", "planned-ahead"])
def test_tokens_do_not_depend_on_preemption(
    smollm2_path: Path, alone: dict[str, dict[int, tuple[int, ...]]], plan_ahead: bool, kind: str
) -> None:
    block_bytes = 16 * open_source(smollm2_path).config.kv_token_elements * 2
    # In order of arrival: fair share lets nobody in ahead whose blocks it could not have.
    engine = _engine(smollm2_path, policy="fcfs", kv_cache_bytes=60 * block_bytes, plan_ahead=plan_ahead)
    everybody = list(range(NUM_PROMPTS))

    tokens = engine.generate(everybody, SAMPLING[kind])

    assert engine.core.stats().num_preemptions > 0, "the pool was meant to be too small"
    assert alone[kind] == tokens
