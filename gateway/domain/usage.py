"""What a request used and how it ended."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

FinishReason = Literal["stop", "length"]
"""How an answer ends that came to its end."""

Outcome = Literal[
    "finished", "client_gone", "deadline", "engine_down", "refused", "cancelled", "internal_error", "lost"
]
"""How a started request ended. ``refused``: by the engine, after it was handed over. ``cancelled``: by our shutdown.
``lost``: the gateway process died; settled by another one, with what the engine kept."""


class TokenUsage(msgspec.Struct, frozen=True):
    """Tokens of one logical request, over all its prompts and answers.

    Attributes:
        cached_tokens: part of `prompt_tokens` whose KV was found in the prefix cache.
        completion_tokens: through the token that completed a stop string, end-of-sequence tokens included; what the
            engine made after that is its overhead.
    """

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens


class EngineTimings(msgspec.Struct, frozen=True):
    """Where a request's time in the engine went, in microseconds.

    Attributes:
        preempted_us: having lost its place and what was computed for it.
        parked_us: having lost its place alone.
        engine_us: its share of the time of the steps it took part in; unlike the others not a time that passed.
    """

    queue_us: int = 0
    prefill_us: int = 0
    decode_us: int = 0
    preempted_us: int = 0
    engine_us: int = 0
    parked_us: int = 0

    @property
    def passed_us(self) -> int:
        """From its arrival in the engine to its end there."""
        return self.queue_us + self.prefill_us + self.decode_us + self.preempted_us + self.parked_us


def over_parts(timings: Sequence[EngineTimings]) -> EngineTimings:
    """Of what runs beside each other, choices or prompts of one request: the parts of the one that took longest, so
    that they sum to a time that has passed, and all of their engine time."""
    longest = max(timings, key=lambda each: each.passed_us, default=EngineTimings())
    return msgspec.structs.replace(longest, engine_us=sum(each.engine_us for each in timings))
