"""Python's garbage collector, as long-running processes with many objects want it."""

from __future__ import annotations

import gc


def collect_less_often() -> None:
    """What exists now stays, so it is not looked at again; and the usual 700 new objects are two requests.

    Called once a process has made what it keeps. Measured: 14 % of the CPU time of a request in the gateway; and a
    collection of all that 20,000 waiting requests are takes an engine 150 ms, in the middle of a step.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)
