"""The steps that a calibration measures: decode batches, prompt chunks, and both at once, at several contexts.

Contexts are no multiples of a power of two: kernels work in tiles, and a context at a tile's edge is dearer or cheaper
than its neighbors. Every chunk ends its prompt, so that every step samples at least one token, as real steps nearly
all do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from engine.sched.cost import CostModel


@dataclass(frozen=True, slots=True, kw_only=True)
class StepShape:
    """A step: num_decodes rows that write one token each, and one chunk of a prompt; either may be missing.

    Attributes:
        decode_context: tokens before each of the written ones.
        chunk_start: tokens before the chunk.
    """

    num_decodes: int = 0
    decode_context: int = 0
    chunk_tokens: int = 0
    chunk_start: int = 0

    def __str__(self) -> str:
        parts = []
        if self.num_decodes:
            parts.append(f"{self.num_decodes} decodes at {self.decode_context}")
        if self.chunk_tokens:
            parts.append(f"{self.chunk_tokens} of prompt at {self.chunk_start}")
        return " + ".join(parts)

    @property
    def num_tokens_known(self) -> int:
        """Length of the longest sequence in it, when it is done."""
        return max(self.decode_context + 1 if self.num_decodes else 0, self.chunk_start + self.chunk_tokens)

    @property
    def num_tokens_held(self) -> int:
        """Of all its sequences together, when it is done."""
        return self.num_decodes * (self.decode_context + 1) + self.chunk_start + self.chunk_tokens

    def terms(self) -> tuple[int, int, int, int, int]:
        """What each coefficient of `CostModel`, in the order of its fields, is multiplied with."""
        num, start = self.chunk_tokens, self.chunk_start
        return (
            1,
            num,
            num * start + num * (num - 1) // 2,
            self.num_decodes,
            self.num_decodes * self.decode_context,
        )

    def predicted_us(self, cost: CostModel) -> int:
        """As the scheduler reckons it."""
        end = self.chunk_start + self.chunk_tokens
        decode_us = cost.marginal_us(self.decode_context, self.decode_context + 1, 0)
        return cost.step_us([cost.marginal_us(self.chunk_start, end, end), *[decode_us] * self.num_decodes])


_ROWS_AT_CONTEXT = {110: 32, 430: 32, 1400: 8, 3000: 2}
"""Few rows where contexts are long: they have to be computed before anything can be measured."""
_BATCHES = (1, 2, 4, 8, 16, 32)
_CHUNKS = ((16, (0, 430, 1400, 3000)), (64, (0, 430, 1400, 3000)), (256, (0, 430, 1400, 3000)), (512, (0, 430)))
_MIXTURES = (
    (2, 110, 16, 0),
    (32, 110, 32, 0),
    (8, 430, 64, 0),
    (16, 110, 128, 430),
    (16, 430, 256, 430),
    (4, 1400, 256, 0),
    (8, 1400, 64, 1400),
    (2, 3000, 32, 3000),
)


def whole_grid() -> tuple[StepShape, ...]:
    """Every step worth measuring on a machine with room for all."""
    decodes = [
        StepShape(num_decodes=num, decode_context=context)
        for context, most in _ROWS_AT_CONTEXT.items()
        for num in _BATCHES
        if num <= most
    ]
    chunks = [StepShape(chunk_tokens=num, chunk_start=start) for num, starts in _CHUNKS for start in starts]
    mixtures = [
        StepShape(num_decodes=rows, decode_context=context, chunk_tokens=num, chunk_start=start)
        for rows, context, num, start in _MIXTURES
    ]
    return (*decodes, *chunks, *mixtures)


NUM_ROWS = max(_BATCHES) + 1
"""Sequence slots that the whole grid needs: decodes, and the prompt in the last one."""


def row_lengths(shapes: Sequence[StepShape]) -> list[int]:
    """How many tokens each of the `NUM_ROWS` rows must be able to hold."""
    lengths = [
        max((s.decode_context + 1 for s in shapes if s.num_decodes > row), default=0) for row in range(NUM_ROWS - 1)
    ]
    return [*lengths, max((s.chunk_start + s.chunk_tokens for s in shapes if s.chunk_tokens), default=0)]


def fitting_grid(*, max_model_len: int, num_blocks: int, block_tokens: int) -> tuple[StepShape, ...]:
    """The grid as far as the window reaches, without the largest steps if the KV pool is too small for all."""
    shapes = [s for s in whole_grid() if s.num_tokens_known < max_model_len]
    while shapes and sum(-(-length // block_tokens) for length in row_lengths(shapes)) > num_blocks:
        shapes.remove(max(shapes, key=lambda s: s.num_tokens_held))
    return tuple(shapes)
