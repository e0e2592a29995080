"""Why the engine exists, on the real model: continuous against static batching (`evenhand bench batching`, small)."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.bench.batching import run_batching
from engine.bench.workload import MAX_ANSWER_TOKENS, mixed_lengths
from engine.config import EngineConfig
from engine.runner.model_runner import build_runner

ATTEMPTS = 2
"""Something else that runs during one half of a comparison says nothing about the other."""


@pytest.mark.model
@pytest.mark.slow
def test_continuous_batching_doubles_the_throughput_and_fills_the_slots(smollm2_path: Path) -> None:
    config = EngineConfig(model=smollm2_path, max_sequences=8)
    loaded = build_runner(config)
    jobs = mixed_lengths(64, 1, loaded.model_config.vocab_size, max_prompt_tokens=64)

    ratios: list[float] = []
    while len(ratios) < ATTEMPTS and max(ratios, default=0.0) < 2:
        padded, continuous = (
            run_batching(
                batching,
                jobs,
                config,
                loaded.runner,
                max_model_len=loaded.max_model_len,
                answer_cap=MAX_ANSWER_TOKENS,
            )
            for batching in ("padded", "continuous")
        )
        ratios.append(continuous.tokens_per_s / padded.tokens_per_s)

    assert padded.useful_share(only_while_work_waits=True) < 0.45
    assert continuous.useful_share(only_while_work_waits=True) >= 0.85
    assert max(ratios) >= 2
    assert continuous.peak_blocks < 0.8 * continuous.reserved_cap_blocks
    assert continuous.peak_blocks < 0.1 * continuous.reserved_window_blocks
