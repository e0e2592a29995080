"""The OpenAI wire format, inward: request bodies as msgspec structs.

Unknown fields are ignored. Every optional field also takes null, which clients send for "not set". Ranges are checked
in ``requests.py``; here are only shapes.
"""

from __future__ import annotations

from typing import Literal

import msgspec


class StreamOptions(msgspec.Struct):
    include_usage: bool | None = None


class ContentPart(msgspec.Struct):
    """A part of a message's content; any `type` decodes, so that a kind we do not serve is refused by name."""

    type: str
    text: str | None = None
    refusal: str | None = None


class ChatMessage(msgspec.Struct):
    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[ContentPart] | None = None


class SamplingFields(msgspec.Struct, kw_only=True):
    """What chat and completions have in common."""

    model: str
    temperature: float | None = None
    top_p: float | None = None
    n: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stop: str | list[str] | None = None
    max_tokens: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: int | None = None
    prompt_cache_key: str | None = None
    # vLLM's extras
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    stop_token_ids: list[int] | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None

    @property
    def wants_usage(self) -> bool:
        """A streamed answer ends with the usage."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)


class NamedTool(msgspec.Struct):
    """Refused whatever it says, so nothing of it is kept."""


class ResponseFormat(msgspec.Struct):
    type: str


class ChatRequest(SamplingFields, kw_only=True):
    messages: list[ChatMessage]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    response_format: ResponseFormat | None = None
    tool_choice: str | NamedTool | None = None
    tools: msgspec.Raw = msgspec.Raw(b"null")
    """Not decoded, since the model is not told of them; they only tell conversations apart."""


class CompletionRequest(SamplingFields, kw_only=True):
    prompt: str | list[str | int | list[int]]
    logprobs: int | None = None
    echo: bool | None = None
    suffix: str | None = None
    best_of: int | None = None
