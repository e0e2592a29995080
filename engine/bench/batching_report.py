"""`evenhand bench batching` for people: run, table, picture, and a JSON line for programs."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from engine.bench.batching import Batching, BatchingRun, median_run, percentile, run_batching
from engine.bench.workload import MAX_ANSWER_TOKENS, mixed_lengths
from engine.config import EngineConfig
from engine.runner.model_runner import build_runner

_NAMES: dict[Batching, str] = {
    "padded": "static, padded",
    "static": "static, unpadded",
    "continuous": "continuous",
}


def main(config: EngineConfig, *, num_jobs: int, seed: int, repeats: int, picture: Path) -> int:
    """Measure all three, in alternation; print the table to stderr and a JSON line to stdout. Returns the exit code."""
    loaded = build_runner(config)
    jobs = mixed_lengths(num_jobs, seed, loaded.model_config.vocab_size)
    runs: dict[Batching, list[BatchingRun]] = {batching: [] for batching in _NAMES}
    for repeat in range(repeats):
        for batching, done in runs.items():
            say(f"run {repeat + 1} of {repeats}, {_NAMES[batching]}: {num_jobs} jobs ...")
            done.append(
                run_batching(
                    batching,
                    jobs,
                    config,
                    loaded.runner,
                    max_model_len=loaded.max_model_len,
                    answer_cap=MAX_ANSWER_TOKENS,
                )
            )
    medians = [median_run(done) for done in runs.values()]
    block_bytes = config.block_tokens * loaded.model_config.kv_token_elements * loaded.runner.kv_element_bytes
    rows = _rows(medians, block_bytes)
    width = max(len(row[0]) for row in rows)
    say(f"\n{num_jobs} jobs, {medians[0].num_output_tokens} output tokens, {config.max_sequences} slots, seed {seed}")
    for name, *values in rows:
        say(f"  {name:<{width}}  " + "  ".join(f"{value:>16}" for value in values))
    draw(medians, picture)
    say(f"\npicture: {picture}")
    sys.stdout.write(json.dumps(_summary(medians, block_bytes, num_jobs, seed)) + "\n")
    return 0


def say(line: str) -> None:
    sys.stderr.write(line + "\n")
    sys.stderr.flush()


def _rows(runs: Sequence[BatchingRun], block_bytes: int) -> list[list[str]]:
    def row(name: str, show: str, value: Callable[[BatchingRun], float]) -> list[str]:
        return [name, *(show.format(value(run)) for run in runs)]

    mib = block_bytes / 2**20
    return [
        ["", *(_NAMES[run.batching] for run in runs)],
        row("output tokens/s", "{:.0f}", lambda r: r.tokens_per_s),
        row("useful share of slots, work waiting", "{:.1%}", lambda r: r.useful_share(only_while_work_waits=True)),
        row("useful share of slots, whole run", "{:.1%}", lambda r: r.useful_share(only_while_work_waits=False)),
        row("TTFT p50 (s)", "{:.2f}", lambda r: percentile(r.ttft_s, 0.5)),
        row("TTFT p99 (s)", "{:.2f}", lambda r: percentile(r.ttft_s, 0.99)),
        row("inter-token p50 (ms)", "{:.1f}", lambda r: 1000 * percentile(r.gaps_s, 0.5)),
        row("inter-token p99 (ms)", "{:.1f}", lambda r: 1000 * percentile(r.gaps_s, 0.99)),
        row("KV held at the peak (MiB)", "{:.0f}", lambda r: r.peak_blocks * mib),
        row("  reserving prompt + longest answer", "{:.0f}", lambda r: r.reserved_cap_blocks * mib),
        row("  reserving the window", "{:.0f}", lambda r: r.reserved_window_blocks * mib),
    ]


def _summary(runs: Sequence[BatchingRun], block_bytes: int, num_jobs: int, seed: int) -> dict[str, object]:
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

    *baselines, continuous = runs
    return {
        "jobs": num_jobs,
        "seed": seed,
        "slots": continuous.max_sequences,
        **{run.batching: of(run) for run in runs},
        "throughput_ratio": {run.batching: round(continuous.tokens_per_s / run.tokens_per_s, 2) for run in baselines},
    }


def draw(runs: Sequence[BatchingRun], path: Path) -> None:
    """Slots at work and KV held over time, one column for each run, on the same axes."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(
        2, len(runs), figsize=(5 * len(runs), 6), sharex=True, sharey="row", squeeze=False, layout="constrained"
    )
    for column, run in enumerate(runs):
        slots, memory = axes[0][column], axes[1][column]
        times = [s.began_s for s in run.steps]
        slots.fill_between(times, _rolling([s.num_slots for s in run.steps]), step="post", color="#2f6f8f")
        slots.axhline(run.max_sequences, color="#888888", linewidth=0.8, linestyle="--")
        share = run.useful_share(only_while_work_waits=True)
        slots.set_title(f"{_NAMES[run.batching]}: {run.tokens_per_s:.0f} tokens/s, {share:.0%} useful")
        memory.fill_between(times, [s.num_blocks for s in run.steps], step="post", color="#c98a2b")
        memory.set_xlabel("seconds since all jobs were submitted")
    axes[0][0].set_ylabel("slots with useful work")
    axes[1][0].set_ylabel("KV blocks held")
    for axis in axes.flat:
        axis.spines[["top", "right"]].set_visible(False)
        axis.set_ylim(bottom=0)
        axis.set_xlim(left=0)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _rolling(values: Sequence[int], window: int = 5) -> list[float]:
    """Means over a few steps, so that the picture is not all spikes."""
    return [sum(part) / len(part) for part in (values[max(0, i - window + 1) : i + 1] for i in range(len(values)))]
