"""`evenhand bench batching` for people: run, table, picture, and a JSON line for programs."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from engine.bench.batching import BatchingRun, median_run, percentile, run_batching
from engine.bench.workload import MAX_ANSWER_TOKENS, mixed_lengths
from engine.config import EngineConfig
from engine.runner.model_runner import build_runner

_NAMES = {"static": "static batches", "fcfs": "continuous"}


def main(config: EngineConfig, *, num_jobs: int, seed: int, repeats: int, picture: Path) -> int:
    """Measure both, in alternation; print the table to stderr and a JSON line to stdout. Returns the exit code."""
    loaded = build_runner(config)
    jobs = mixed_lengths(num_jobs, seed, loaded.model_config.vocab_size)
    runs: dict[str, list[BatchingRun]] = {policy: [] for policy in _NAMES}
    for repeat in range(repeats):
        for policy, done in runs.items():
            say(f"run {repeat + 1} of {repeats}, {_NAMES[policy]}: {num_jobs} jobs ...")
            done.append(
                run_batching(
                    policy,
                    jobs,
                    config,
                    loaded.runner,
                    max_model_len=loaded.max_model_len,
                    answer_cap=MAX_ANSWER_TOKENS,
                )
            )
    static, continuous = (median_run(runs[policy]) for policy in _NAMES)
    block_bytes = config.block_tokens * loaded.model_config.kv_token_elements * loaded.runner.kv_element_bytes
    rows = _rows(static, continuous, block_bytes)
    width = max(len(row[0]) for row in rows)
    say(f"\n{num_jobs} jobs, {static.num_output_tokens} output tokens, {config.max_sequences} slots, seed {seed}")
    for name, *values in rows:
        say(f"  {name:<{width}}  " + "  ".join(f"{value:>16}" for value in values))
    draw(static, continuous, picture)
    say(f"\npicture: {picture}")
    sys.stdout.write(json.dumps(_summary(static, continuous, block_bytes, num_jobs, seed)) + "\n")
    return 0


def say(line: str) -> None:
    sys.stderr.write(line + "\n")
    sys.stderr.flush()


def _rows(static: BatchingRun, continuous: BatchingRun, block_bytes: int) -> list[tuple[str, str, str]]:
    def both(name: str, show: str, *values: float) -> tuple[str, str, str]:
        return name, show.format(values[0]), show.format(values[1])

    pair = (static, continuous)
    mib = block_bytes / 2**20
    return [
        ("", _NAMES["static"], _NAMES["fcfs"]),
        both("output tokens/s", "{:.0f}", *(r.tokens_per_s for r in pair)),
        both(
            "useful share of slots, work waiting", "{:.1%}", *(r.useful_share(only_while_work_waits=True) for r in pair)
        ),
        both(
            "useful share of slots, whole run", "{:.1%}", *(r.useful_share(only_while_work_waits=False) for r in pair)
        ),
        both("TTFT p50 (s)", "{:.2f}", *(percentile(r.ttft_s, 0.5) for r in pair)),
        both("TTFT p99 (s)", "{:.2f}", *(percentile(r.ttft_s, 0.99) for r in pair)),
        both("inter-token p50 (ms)", "{:.1f}", *(1000 * percentile(r.gaps_s, 0.5) for r in pair)),
        both("inter-token p99 (ms)", "{:.1f}", *(1000 * percentile(r.gaps_s, 0.99) for r in pair)),
        both("KV held at the peak (MiB)", "{:.0f}", *(r.peak_blocks * mib for r in pair)),
        both("  reserving prompt + longest answer", "{:.0f}", *(r.reserved_cap_blocks * mib for r in pair)),
        both("  reserving the window", "{:.0f}", *(r.reserved_window_blocks * mib for r in pair)),
    ]


def _summary(
    static: BatchingRun, continuous: BatchingRun, block_bytes: int, num_jobs: int, seed: int
) -> dict[str, object]:
    def of(run: BatchingRun) -> dict[str, float]:
        return {
            "tokens_per_s": round(run.tokens_per_s, 1),
            "useful_share_work_waiting": round(run.useful_share(only_while_work_waits=True), 4),
            "useful_share": round(run.useful_share(only_while_work_waits=False), 4),
            "ttft_p50_s": round(percentile(run.ttft_s, 0.5), 3),
            "ttft_p99_s": round(percentile(run.ttft_s, 0.99), 3),
            "inter_token_p50_ms": round(1000 * percentile(run.gaps_s, 0.5), 2),
            "inter_token_p99_ms": round(1000 * percentile(run.gaps_s, 0.99), 2),
            "kv_peak_bytes": run.peak_blocks * block_bytes,
            "kv_reserved_cap_bytes": run.reserved_cap_blocks * block_bytes,
            "kv_reserved_window_bytes": run.reserved_window_blocks * block_bytes,
        }

    return {
        "jobs": num_jobs,
        "seed": seed,
        "slots": static.max_sequences,
        "static": of(static),
        "continuous": of(continuous),
        "throughput_ratio": round(continuous.tokens_per_s / static.tokens_per_s, 2),
    }


def draw(static: BatchingRun, continuous: BatchingRun, path: Path) -> None:
    """Slots at work and KV held over time, one column for each policy, on the same axes."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(2, 2, figsize=(11, 6), sharex=True, sharey="row", layout="constrained")
    for column, run in enumerate((static, continuous)):
        slots, memory = axes[0][column], axes[1][column]
        times = [s.began_s for s in run.steps]
        slots.fill_between(times, _rolling([s.num_slots for s in run.steps]), step="post", color="#2f6f8f")
        slots.axhline(run.max_sequences, color="#888888", linewidth=0.8, linestyle="--")
        share = run.useful_share(only_while_work_waits=True)
        slots.set_title(f"{_NAMES[run.policy]}: {run.tokens_per_s:.0f} tokens/s, {share:.0%} of slots useful")
        memory.fill_between(times, [s.num_blocks for s in run.steps], step="post", color="#c98a2b")
        memory.set_xlabel("seconds since all jobs were submitted")
    axes[0][0].set_ylabel("slots at work")
    axes[1][0].set_ylabel("KV blocks held")
    for axis in axes.flat:
        axis.spines[["top", "right"]].set_visible(False)
        axis.set_ylim(bottom=0)
        axis.set_xlim(left=0)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _rolling(values: Sequence[int], window: int = 5) -> list[float]:
    """Means over a few steps, so that the picture is not all spikes."""
    return [sum(part) / len(part) for part in (values[max(0, i - window + 1) : i + 1] for i in range(len(values)))]
