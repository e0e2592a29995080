"""The door: a `Submit` becomes requests, or an error that says why it can never run here.

Everything that can be known at once is refused at once, so that nothing waits in vain.
"""

from __future__ import annotations

from dataclasses import dataclass

from msgspec import structs

from engine.errors import RequestRejected
from engine.messages import Submit
from engine.request import Request

MAX_CHOICES = 128


MOST_WEIGHT = 10**9


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What this engine can run.

    Attributes:
        max_model_len: the window: most tokens of prompt plus output.
        kv_capacity_tokens: tokens that the whole KV pool holds.
    """

    max_model_len: int
    kv_capacity_tokens: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]

    def check(self, message: Submit) -> None:
        """Raise `RequestRejected` if the message asks for what can never be."""
        num_tokens = len(message.token_ids)
        if not num_tokens:
            raise RequestRejected("empty_prompt", "the prompt has no tokens")
        if num_tokens >= self.max_model_len:
            raise RequestRejected(
                "context_length_exceeded",
                f"This model's maximum context length is {self.max_model_len} tokens, and at least one of them is for "
                f"the answer. The prompt has {num_tokens}.",
            )
        if num_tokens + 1 > self.kv_capacity_tokens:
            raise RequestRejected(
                "over_capacity",
                f"a prompt of {num_tokens} tokens and one of answer never fit in a KV cache of "
                f"{self.kv_capacity_tokens}",
            )
        if min(message.token_ids) < 0 or max(message.token_ids) >= self.vocab_size:
            raise RequestRejected("invalid_token", f"token ids must be between 0 and {self.vocab_size - 1}")
        if message.output_cap < 1:
            raise RequestRejected("invalid_output_cap", f"output_cap must be at least 1, not {message.output_cap}")
        if not 1 <= message.num_choices <= MAX_CHOICES:
            raise RequestRejected(
                "invalid_num_choices", f"num_choices must be between 1 and {MAX_CHOICES}, not {message.num_choices}"
            )
        message.sampling.validate(self.vocab_size)
        if message.sampling.min_tokens:
            num_forbidden = len({*message.sampling.stop_token_ids, *self.eos_token_ids})
            if num_forbidden >= self.vocab_size:
                raise RequestRejected("invalid_sampling", "min_tokens leaves no token that may be sampled")
        if not all(1 <= node.weight <= MOST_WEIGHT for node in message.path):
            raise RequestRejected("invalid_weight", f"the weights of a path must be 1 to {MOST_WEIGHT}")

    def requests(self, message: Submit, *, seed: int, first_arrival: int, now_us: int) -> list[Request]:
        """One request for each choice of a checked message.

        An output cap beyond window or pool is cut to what they hold.

        Args:
            seed: used if the message brings none; all choices share it and differ by their number.
            first_arrival: choice i takes place first_arrival + i in the order of arrival.
        """
        sampling = message.sampling
        if sampling.seed is None:
            sampling = structs.replace(sampling, seed=seed)
        stop_ids = frozenset(sampling.stop_token_ids) | frozenset(() if sampling.ignore_eos else self.eos_token_ids)
        output_limit = min(self.max_model_len, self.kv_capacity_tokens) - len(message.token_ids)
        return [
            Request(
                request_id=message.request_id,
                choice=choice,
                arrival=first_arrival + choice,
                path=message.path,
                request_class=message.request_class,
                cache_salt=message.cache_salt,
                token_ids=list(message.token_ids),
                sampling=sampling,
                stop_ids=stop_ids,
                output_cap=min(message.output_cap, output_limit),
                output_limit=output_limit,
                hold_at_cap=message.hold_at_cap,
                arrival_us=now_us,
            )
            for choice in range(message.num_choices)
        ]
