"""How many CPU threads a step uses: all of them, unless a neighbor has taken a core.

A step is some 300 parallel regions, and each waits for its slowest thread. One thread without a core of its own holds
up all others, so beside a busy program one thread less is many times faster (on 2 cores, one of them taken: 139 ms a
step with two threads, 18 ms as governed here; tests/bench/results/vllm_cpu_2core_2026-11-30.md). Threads spin while
they wait, so a step that has its cores burns nearly all of their time; a step that burned much less was missing one.

Tokens do not change with the number of threads (`tests/kernels` compares the bits).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_STRIKES = 2  # slow steps in a row that are taken for a neighbor
_SHORTEST_S = 0.003  # a shorter step says nothing
_FIRST_WAIT_S = 1.0
_LONGEST_WAIT_S = 60.0


class ThreadGovernor:
    """Watches steps and sets the number of threads.

    Args:
        num_threads: how many there are at the most.
        set_threads: told whenever the number changes.
        wall_s, cpu_s: clocks: of the world, and of all threads of this process together.
    """

    def __init__(
        self,
        num_threads: int,
        set_threads: Callable[[int], None],
        *,
        wall_s: Callable[[], float] = time.perf_counter,
        cpu_s: Callable[[], float] = time.process_time,
    ) -> None:
        self._most = self._now = num_threads
        self._set_threads = set_threads
        self._wall_s = wall_s
        self._cpu_s = cpu_s
        self._strikes = 0
        self._wait_s = _FIRST_WAIT_S
        self._try_again_at = 0.0

    @contextmanager
    def step(self) -> Iterator[None]:
        """Around the computation of one step."""
        if self._now < self._most and self._wall_s() >= self._try_again_at:
            self._use(self._now + 1)
        wall, cpu = self._wall_s(), self._cpu_s()
        yield
        self._judge(self._wall_s() - wall, self._cpu_s() - cpu)

    def _judge(self, wall: float, cpu: float) -> None:
        if self._now == 1 or wall < _SHORTEST_S:
            return
        missing = self._now - cpu / wall
        if missing <= max(0.5, 0.15 * self._now):
            self._strikes = 0
            if self._now == self._most:
                self._wait_s = _FIRST_WAIT_S
            return
        self._strikes += 1
        if self._strikes == _STRIKES:
            self._strikes = 0
            self._use(self._now - 1)
            self._try_again_at = self._wall_s() + self._wait_s
            self._wait_s = min(2 * self._wait_s, _LONGEST_WAIT_S)

    def _use(self, num_threads: int) -> None:
        self._now = num_threads
        self._set_threads(num_threads)
