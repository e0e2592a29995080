"""What a request asks for, free of any wire format. Knows nothing of tokens, HTTP or tenants."""

from __future__ import annotations

from typing import Literal

import msgspec

Role = Literal["system", "user", "assistant", "tool"]

Endpoint = Literal["chat", "completions"]
"""What can be called with a key; a key's scope may name some of them."""


class Message(msgspec.Struct, frozen=True):
    """One turn of a conversation, as text."""

    role: Role
    content: str


class Conversation(msgspec.Struct, frozen=True):
    """A prompt to be made from messages by the model's chat template."""

    messages: tuple[Message, ...]


class Text(msgspec.Struct, frozen=True):
    """A prompt that is continued as it stands."""

    text: str


class TokenIds(msgspec.Struct, frozen=True):
    """A prompt in the model's own tokens."""

    token_ids: tuple[int, ...]


Prompt = Conversation | Text | TokenIds


class Sampling(msgspec.Struct, frozen=True, kw_only=True):
    """How tokens are chosen; names and meanings are those of the OpenAI API and, below `seed`, of vLLM's extras.

    Attributes:
        num_logprobs: None asks for none; n for the chosen token's and those of the n likeliest.
        top_k: 0 keeps all tokens.
        stop_token_ids: end the answer; not part of its text.
        min_tokens: neither end-of-sequence nor stop tokens before that many.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = {}
    num_logprobs: int | None = None
    seed: int | None = None
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    stop_token_ids: tuple[int, ...] = ()
    min_tokens: int = 0
    ignore_eos: bool = False


class GenerationRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One logical request: `num_choices` answers to each of `prompts`.

    The answers are numbered through: choice c of prompt p is p * num_choices + c.

    Attributes:
        stop: an answer ends before the first of these strings.
        max_output_tokens: for each answer; None means what the window leaves.
        echo: the answer's text begins with the prompt's.
        deadline_ms: from now; when it passes the request fails.
    """

    model: str
    prompts: tuple[Prompt, ...]
    sampling: Sampling = Sampling()
    stop: tuple[str, ...] = ()
    num_choices: int = 1
    max_output_tokens: int | None = None
    echo: bool = False
    deadline_ms: int | None = None

    @property
    def num_answers(self) -> int:
        return len(self.prompts) * self.num_choices
