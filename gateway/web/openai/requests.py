"""From wire structs to the domain's request: every range check, every default, every clear refusal.

Limits follow the OpenAI API where it has one. Knows nothing of tokens: what the window leaves, or whether a token id
exists, is the backend's business.
"""

from __future__ import annotations

import math

from gateway.domain.request import (
    Conversation,
    GenerationRequest,
    Message,
    Prompt,
    Role,
    Sampling,
    Text,
    TokenIds,
)
from gateway.errors import InvalidRequest
from gateway.web.openai.schema import (
    ChatMessage,
    ChatRequest,
    CompletionRequest,
    SamplingFields,
)

MAX_MESSAGES = 10_000
"""Of one conversation, and parts of one message."""
MAX_CHOICES = 16
MAX_ANSWERS = 128
"""Prompts of one completion request times n."""
MAX_STOPS = 16
MAX_STOP_CHARACTERS = 1000
MAX_TOP_LOGPROBS = 20
DEFAULT_COMPLETION_TOKENS = 16
"""What `/v1/completions` makes if nothing is said, as the vendor's does. Chat takes what the window leaves."""
MAX_NAMED_TOKENS = 1 << 18
"""In `logit_bias` or `stop_token_ids`: as many as the largest vocabularies have."""
_SEED_LIMIT = 1 << 63

_ROLES: dict[str, Role] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "function": "tool",
}


def chat_to_domain(wire: ChatRequest, deadline_ms: int | None) -> GenerationRequest:
    """Raises `InvalidRequest` with the field that is at fault."""
    if not wire.messages:
        raise InvalidRequest("Invalid 'messages': at least one message is required.", param="messages")
    if len(wire.messages) > MAX_MESSAGES:
        raise InvalidRequest(f"Too many messages in one request: {MAX_MESSAGES} at most.", param="messages")
    if wire.response_format is not None and wire.response_format.type != "text":
        raise InvalidRequest(
            f"response_format of type '{wire.response_format.type[:50]}' is not supported by this server.",
            param="response_format",
        )
    if wire.tool_choice not in (None, "none", "auto"):
        raise InvalidRequest("This server cannot force tool calls.", param="tool_choice")
    max_tokens, name = wire.max_completion_tokens, "max_completion_tokens"
    if max_tokens is None:
        max_tokens, name = wire.max_tokens, "max_tokens"
    num_logprobs = None
    if wire.logprobs:
        num_logprobs = _int("top_logprobs", wire.top_logprobs, 0, MAX_TOP_LOGPROBS) or 0
    elif wire.top_logprobs:
        raise InvalidRequest("'top_logprobs' needs 'logprobs' to be true.", param="top_logprobs")
    messages = tuple(_message(i, message) for i, message in enumerate(wire.messages))
    return _request(wire, (Conversation(messages),), num_logprobs, _int(name, max_tokens, 1), deadline_ms)


def completion_to_domain(wire: CompletionRequest, deadline_ms: int | None) -> GenerationRequest:
    """Raises `InvalidRequest` with the field that is at fault."""
    if wire.suffix:
        raise InvalidRequest("'suffix' is not supported: the model cannot fill in the middle.", param="suffix")
    if wire.best_of is not None and wire.best_of != (1 if wire.n is None else wire.n):
        raise InvalidRequest("'best_of' is not supported unless it equals 'n'.", param="best_of")
    num_logprobs = _int("logprobs", wire.logprobs, 0, MAX_TOP_LOGPROBS)
    if wire.echo and num_logprobs is not None:
        raise InvalidRequest(
            "'logprobs' cannot be combined with 'echo': no log probabilities of prompts.", param="logprobs"
        )
    max_tokens = _int("max_tokens", wire.max_tokens, 1)
    if max_tokens is None:
        max_tokens = DEFAULT_COMPLETION_TOKENS
    request = _request(wire, _prompts(wire.prompt), num_logprobs, max_tokens, deadline_ms, echo=bool(wire.echo))
    if request.num_answers > MAX_ANSWERS:
        raise InvalidRequest(
            f"Too many answers in one request: prompts times n may be {MAX_ANSWERS} at most.", param="prompt"
        )
    return request


def _request(
    wire: SamplingFields,
    prompts: tuple[Prompt, ...],
    num_logprobs: int | None,
    max_tokens: int | None,
    deadline_ms: int | None,
    *,
    echo: bool = False,
) -> GenerationRequest:
    sampling = Sampling(
        temperature=_float("temperature", wire.temperature, 0.0, 2.0, default=1.0),
        top_p=_float("top_p", wire.top_p, 0.0, 1.0, default=1.0, above_low=True),
        presence_penalty=_float("presence_penalty", wire.presence_penalty, -2.0, 2.0, default=0.0),
        frequency_penalty=_float("frequency_penalty", wire.frequency_penalty, -2.0, 2.0, default=0.0),
        logit_bias=_logit_bias(wire.logit_bias) if wire.logit_bias else {},
        num_logprobs=num_logprobs,
        seed=_int("seed", wire.seed, -_SEED_LIMIT, _SEED_LIMIT - 1),
        top_k=max(_int("top_k", wire.top_k, -1, _SEED_LIMIT - 1) or 0, 0),
        min_p=_float("min_p", wire.min_p, 0.0, 1.0, default=0.0),
        repetition_penalty=_float("repetition_penalty", wire.repetition_penalty, 0.01, 100.0, default=1.0),
        stop_token_ids=_stop_token_ids(wire.stop_token_ids or []),
        min_tokens=_int("min_tokens", wire.min_tokens, 0, _SEED_LIMIT - 1) or 0,
        ignore_eos=bool(wire.ignore_eos),
    )
    if max_tokens is not None and sampling.min_tokens > max_tokens:
        raise InvalidRequest(f"'min_tokens' is above the {max_tokens} tokens asked for.", param="min_tokens")
    return GenerationRequest(
        model=wire.model,
        prompts=prompts,
        sampling=sampling,
        stop=_stops(wire.stop),
        num_choices=_int("n", wire.n, 1, MAX_CHOICES) or 1,
        max_output_tokens=max_tokens,
        echo=echo,
        deadline_ms=deadline_ms,
    )


def _message(index: int, wire: ChatMessage) -> Message:
    content = wire.content
    if isinstance(content, list):
        if len(content) > MAX_MESSAGES:
            where = f"messages[{index}].content"
            raise InvalidRequest(f"Invalid '{where}': {MAX_MESSAGES} parts at most.", param=where)
        texts = []
        for i, part in enumerate(content):
            text = part.text if part.type == "text" else part.refusal if part.type == "refusal" else None
            if text is None:
                where = f"messages[{index}].content[{i}]"
                raise InvalidRequest(
                    f"Invalid '{where}': content of type '{part.type[:50]}' is not supported: text only.",
                    param=where,
                )
            texts.append(text)
        content = "".join(texts)
    elif content is None:
        if wire.role != "assistant":
            where = f"messages[{index}].content"
            raise InvalidRequest(f"Invalid '{where}': expected a string or a list of parts, got null.", param=where)
        content = ""
    return Message(_ROLES[wire.role], content)


def _prompts(prompt: str | list[str | int | list[int]]) -> tuple[Prompt, ...]:
    if isinstance(prompt, str):
        return (Text(prompt),)
    if prompt and all(isinstance(item, int) for item in prompt):
        return (TokenIds(tuple(prompt)),)  # type: ignore[arg-type]
    if len(prompt) > MAX_ANSWERS:
        raise InvalidRequest(f"Too many prompts in one request: {MAX_ANSWERS} at most.", param="prompt")
    prompts: list[Prompt] = []
    for i, item in enumerate(prompt):
        if isinstance(item, str):
            prompts.append(Text(item))
        elif isinstance(item, list) and item:
            prompts.append(TokenIds(tuple(item)))
        else:
            raise InvalidRequest(
                f"Invalid 'prompt[{i}]': expected a string or a list of token ids.", param=f"prompt[{i}]"
            )
    if not prompts:
        raise InvalidRequest("Invalid 'prompt': at least one prompt is required.", param="prompt")
    return tuple(prompts)


def _stops(stop: str | list[str] | None) -> tuple[str, ...]:
    if stop is None:
        return ()
    stops = (stop,) if isinstance(stop, str) else tuple(stop)
    if len(stops) > MAX_STOPS:
        raise InvalidRequest(f"Invalid 'stop': {MAX_STOPS} strings at most.", param="stop")
    for text in stops:
        if not 1 <= len(text) <= MAX_STOP_CHARACTERS:
            raise InvalidRequest(
                f"Invalid 'stop': a stop string has between 1 and {MAX_STOP_CHARACTERS} characters.", param="stop"
            )
    return stops


def _stop_token_ids(wire: list[int]) -> tuple[int, ...]:
    if len(wire) > MAX_NAMED_TOKENS:
        raise InvalidRequest(f"Invalid 'stop_token_ids': {MAX_NAMED_TOKENS} at most.", param="stop_token_ids")
    return tuple(dict.fromkeys(wire))


def _logit_bias(wire: dict[str, float]) -> dict[int, float]:
    if len(wire) > MAX_NAMED_TOKENS:
        raise InvalidRequest(f"Invalid 'logit_bias': {MAX_NAMED_TOKENS} tokens at most.", param="logit_bias")
    bias = {}
    for key, value in wire.items():
        if not (key.isascii() and key.isdigit() and len(key) < 12):
            raise InvalidRequest("Invalid 'logit_bias': keys are token ids.", param="logit_bias")
        bias[int(key)] = _float("logit_bias", value, -100.0, 100.0, default=0.0)
    return bias


def _float(
    name: str, value: float | None, low: float, high: float, *, default: float, above_low: bool = False
) -> float:
    if value is None:
        return default
    if not math.isfinite(value) or not low <= value <= high or (above_low and value == low):
        lower = f"above {low:g}" if above_low else f"at least {low:g}"
        raise InvalidRequest(f"Invalid '{name}': must be {lower} and at most {high:g}, not {value:g}.", param=name)
    return value


def _int(name: str, value: int | None, low: int, high: int | None = None) -> int | None:
    if value is not None and (value < low or (high is not None and value > high)):
        upper = "" if high is None else f" and at most {high}"
        raise InvalidRequest(f"Invalid '{name}': must be at least {low}{upper}.", param=name)
    return value
