"""How the next token is chosen: the parameters of one request.

Pure values; knows nothing of tensors. `validate` is called at the door of the engine, so that a bad value is an
answer and never a failed step.
"""

from __future__ import annotations

import math

import msgspec

from engine.errors import RequestRejected

MAX_LOGPROBS = 20
SEED_LIMIT = 1 << 63


class SamplingParams(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """Sampling parameters, named as in the OpenAI API where it has a name for them.

    Attributes:
        temperature: 0 means greedy; the most likely token, lowest id on a tie.
        top_p: keep the smallest set of tokens whose probability reaches this (0 < top_p <= 1).
        top_k: keep the k most likely tokens; 0 keeps all.
        min_p: drop tokens less likely than min_p times the most likely one.
        repetition_penalty: > 1 makes every token of prompt and output less likely (divides positive logits).
        presence_penalty: subtracted once from the logit of every token already in the output.
        frequency_penalty: subtracted from a logit for each time its token is in the output.
        logit_bias: token id → value added to its logit.
        seed: makes the request repeatable; None lets the engine draw one.
        num_logprobs: None returns none; n returns the sampled token's and the n most likely tokens' log
            probabilities (of the unmodified distribution; 0 <= n <= 20).
        stop_token_ids: end the request when one of these is sampled; the token is counted and delivered.
        min_tokens: end-of-sequence and stop tokens cannot be sampled before this many output tokens.
        ignore_eos: end-of-sequence tokens do not end the request.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = {}
    seed: int | None = None
    num_logprobs: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    min_tokens: int = 0
    ignore_eos: bool = False

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    def validate(self, vocab_size: int) -> None:
        """Raise `RequestRejected` (code ``invalid_sampling``) if a value is out of its range."""
        _within("temperature", self.temperature, 0.0, 100.0)
        _within("top_p", self.top_p, 0.0, 1.0)
        if self.top_p == 0.0:
            raise RequestRejected("invalid_sampling", "top_p must be greater than 0")
        _within("min_p", self.min_p, 0.0, 1.0)
        _within("repetition_penalty", self.repetition_penalty, 0.01, 100.0)
        _within("presence_penalty", self.presence_penalty, -100.0, 100.0)
        _within("frequency_penalty", self.frequency_penalty, -100.0, 100.0)
        if self.top_k < 0:
            raise RequestRejected("invalid_sampling", f"top_k must be 0 or more, not {self.top_k}")
        if self.min_tokens < 0:
            raise RequestRejected("invalid_sampling", f"min_tokens must be 0 or more, not {self.min_tokens}")
        if self.seed is not None and not -SEED_LIMIT <= self.seed < SEED_LIMIT:
            raise RequestRejected("invalid_sampling", "seed must fit in 64 bits")
        if self.num_logprobs is not None:
            _within("num_logprobs", self.num_logprobs, 0, MAX_LOGPROBS)
        for name, ids in (("logit_bias", self.logit_bias), ("stop_token_ids", self.stop_token_ids)):
            for token_id in ids:
                if not 0 <= token_id < vocab_size:
                    raise RequestRejected(
                        "invalid_sampling", f"{name}: token id {token_id} is outside the vocabulary of {vocab_size}"
                    )
        for token_id, bias in self.logit_bias.items():
            _within(f"logit_bias[{token_id}]", bias, -100.0, 100.0)


def _within(name: str, value: float, low: float, high: float) -> None:
    if not math.isfinite(value) or not low <= value <= high:
        raise RequestRejected("invalid_sampling", f"{name} must be between {low:g} and {high:g}, not {value:g}")
