"""Totals that the engine counts from its start."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Counters:
    """Named as in `messages.Stats`. Every token a step computed is in exactly one of prefill, decode and recomputed,
    unless its request had ended before the step was applied."""

    num_steps: int = 0
    num_prefill_tokens: int = 0
    num_decode_tokens: int = 0
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    num_parkings: int = 0
    num_recomputed_tokens: int = 0
    busy_us: int = 0
    unshared_us: int = 0

    def count_computed(self, start: int, end: int, *, num_prompt_tokens: int, high_water: int) -> None:
        """Positions start .. end - 1 were computed for a request that had been up to high_water before."""
        first_useful = min(max(start, high_water), end)
        first_decode = min(max(first_useful, num_prompt_tokens), end)
        self.num_recomputed_tokens += first_useful - start
        self.num_prefill_tokens += first_decode - first_useful
        self.num_decode_tokens += end - first_decode
