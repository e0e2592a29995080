"""How OpenMP's threads wait for each other. Imported before torch, which starts them.

At the end of each parallel region a thread waits for the others. GNU's runtime lets it spin there for ever, which is
quickest while every thread has a core of its own. When another program takes one of the cores, the thread that spins
keeps the core that the missing one needs, and steps take a hundred times as long. Sleeping at once would cost half of
the speed on a quiet machine. Spinning for a short while costs nothing there, and a tenth of that harm beside a busy
neighbor; `runner/threads.py` does the rest. Figures: tests/bench/results/vllm_cpu_2core_2026-11-30.md.
"""

from __future__ import annotations

import os

SPIN_COUNT = 10_000  # some 100 microseconds


def limit_spinning() -> None:
    """Has an effect only before torch is imported, and none where the environment already says how to wait."""
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", str(SPIN_COUNT))
