"""Memory that a step frees stays with the process, so the next step's pages need not be cleared by the kernel."""

import resource
import subprocess
import sys

PROGRAM = """
import resource, sys, torch
from engine.allocator import keep_freed_memory
if sys.argv[1] == "kept":
    keep_freed_memory()
for _ in range(20):
    pieces = [torch.ones(48 << 20, dtype=torch.uint8) for _ in range(2)]
    del pieces
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)
"""


def _page_faults(how: str) -> int:
    done = subprocess.run([sys.executable, "-c", PROGRAM, how], capture_output=True, text=True, check=True, timeout=120)
    return int(done.stdout)


def test_a_step_that_is_like_the_last_one_costs_no_new_pages() -> None:
    pages_of_a_round = 2 * (48 << 20) // resource.getpagesize()

    usual, kept = _page_faults("usual"), _page_faults("kept")

    assert usual - kept > 10 * pages_of_a_round, (usual, kept)
