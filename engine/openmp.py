"""How OpenMP's threads wait for each other. Imported before torch, which starts them.

At the end of each parallel region a thread waits for the others. GNU's runtime lets it spin there for ever, which is
quickest while every thread has a core of its own. When another program takes one of the cores, the thread that spins
keeps the core that the missing one needs: steps of 13 ms became 2 s here. Sleeping at once costs 40 % on a quiet
machine. Spinning for a short while costs nothing to measure there, and 12 times instead of 150 beside a busy neighbor;
`runner/threads.py` does the rest.
"""

from __future__ import annotations

import os

SPIN_COUNT = 10_000  # some 100 microseconds


def limit_spinning() -> None:
    """Has an effect only before torch is imported, and none where the environment already says how to wait."""
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", str(SPIN_COUNT))
