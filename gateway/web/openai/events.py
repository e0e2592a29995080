"""What every OpenAI event and answer has in common: bytes of usage, log probabilities and the frame of a stream.

A chunk is filled into bytes that are made once per stream; only what changes is encoded for each one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import msgspec

from gateway.domain.events import Cause, GenerationEvent, TextDelta, TokenChance, TokenLogprob
from gateway.domain.usage import FinishReason, TokenUsage
from gateway.errors import EvenhandError
from gateway.web.errors import error_body

encode = msgspec.json.Encoder().encode

DONE = b"data: [DONE]\n\n"
HEARTBEAT = b": keep-alive\n\n"
MIN_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON does not have."""


def error_event(error: EvenhandError) -> bytes:
    """An error in mid-stream; clients raise on it. No [DONE] follows, since the answer is not done."""
    return b"data: " + error_body(error) + b"\n\n"


def finish_json(reason: FinishReason | None, cause: Cause | None) -> bytes:
    """How a choice ended; ``stop_reason`` says why if it was cut for something its caller did not ask for."""
    ended = b'"finish_reason":' + encode(reason)
    return ended if cause is None else ended + b',"stop_reason":' + encode(cause)


def usage_json(usage: TokenUsage) -> bytes:
    return encode(
        {
            "prompt_tokens": usage.prompt_tokens,
            "completion_tokens": usage.completion_tokens,
            "total_tokens": usage.total_tokens,
            "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
            "completion_tokens_details": {"reasoning_tokens": 0},
        }
    )


class ChunkStream(ABC):
    """Writes the events of one call as chunks; each kind of answer has its own shape of them.

    Args:
        head: a chunk's fields before the choices, as the beginning of a JSON object.
    """

    heartbeat = HEARTBEAT

    def __init__(self, head: bytes, *, include_usage: bool) -> None:
        self._include_usage = include_usage
        self._head = b"data: " + head
        self._tail = b'],"usage":null}\n\n' if include_usage else b"]}\n\n"

    def write(self, events: Sequence[GenerationEvent]) -> bytes:
        if len(events) == 1:  # nearly always
            return self._event(events[0])
        return b"".join([self._event(event) for event in events])

    def finish(self, usage: TokenUsage) -> bytes:
        if not self._include_usage:
            return DONE
        return self._head + b',"choices":[],"usage":' + usage_json(usage) + b"}\n\n" + DONE

    def error(self, error: EvenhandError) -> bytes:
        return error_event(error)

    @abstractmethod
    def _event(self, event: GenerationEvent) -> bytes:
        """The chunks of one event."""


class CollectedChoices:
    """The events of one call, put together by choice, for an answer in one piece.

    Attributes:
        texts: pieces of text; a choice's text is their sum.
    """

    def __init__(self, num_choices: int) -> None:
        self.texts: list[list[str]] = [[] for _ in range(num_choices)]
        self.logprobs: list[list[TokenLogprob]] = [[] for _ in range(num_choices)]
        self.reasons: list[FinishReason | None] = [None] * num_choices
        self.causes: list[Cause | None] = [None] * num_choices

    def add(self, events: Sequence[GenerationEvent]) -> None:
        for event in events:
            if isinstance(event, TextDelta):
                self.texts[event.choice].append(event.text)
                self.logprobs[event.choice].extend(event.logprobs)
            else:
                self.reasons[event.choice] = event.reason
                self.causes[event.choice] = event.cause


def logprob_entry(token: TokenLogprob) -> dict[str, object]:
    """One element of chat's ``logprobs.content``."""
    return {**_chance(token.chosen), "top_logprobs": [_chance(chance) for chance in token.top]}


def finite(logprob: float) -> float:
    return max(logprob, MIN_LOGPROB)


def _chance(chance: TokenChance) -> dict[str, object]:
    return {"token": chance.token, "logprob": finite(chance.logprob), "bytes": list(chance.utf8)}
