"""What a step costs: a fixed part, and a marginal part for every token by its position. Integers only.

The fixed part (weights read once, launches) is nobody's; the marginal part is what a request is charged. The marginal
cost of a chunk is the difference of a cumulative function at its ends, so it does not matter how work is sliced: the
charges for 0 .. 5,000 are the same microseconds in one step or in a hundred.

Whether a position is prefill or decode depends on the prompt's length alone, not on how many tokens a chunk has; so
output that is computed again after a preemption costs what it cost the first time.

Where the coefficients come from: measured (`calibration.py`), or built in (`PROFILES`).
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from engine.errors import ConfigError

_PS_PER_US = 1_000_000
_MOST = 10**9
"""Of any figure: a second, or a millisecond a token and position."""


class CostModel(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Coefficients of one model on one machine.

    Attributes:
        fixed_us: what a step costs whatever is in it.
        prefill_token_ns: a prompt token with nothing before it.
        prefill_context_ps: added for each position before it.
        decode_token_ns: an output token with nothing before it.
        decode_context_ps: added for each position before it.
    """

    fixed_us: int
    prefill_token_ns: int
    prefill_context_ps: int
    decode_token_ns: int
    decode_context_ps: int

    def __post_init__(self) -> None:
        """Raises `ConfigError` unless time passes in every step and no token is free."""
        if min(self.fixed_us, self.prefill_token_ns, self.decode_token_ns) < 1:
            raise ConfigError("cost model: fixed_us, prefill_token_ns and decode_token_ns must be at least 1")
        if min(self.prefill_context_ps, self.decode_context_ps) < 0:
            raise ConfigError("cost model: prefill_context_ps and decode_context_ps must be 0 or more")
        if max(msgspec.structs.astuple(self)) > _MOST:
            raise ConfigError(f"cost model: no figure may be more than {_MOST}")

    def marginal_us(self, start: int, end: int, num_prompt_tokens: int) -> int:
        """Positions start .. end - 1 of a request, of which the first num_prompt_tokens are prompt."""
        if end <= num_prompt_tokens:
            return self._prefill_us(end) - self._prefill_us(start)
        if start >= num_prompt_tokens:
            return self._decode_us(end) - self._decode_us(start)
        return (
            self._prefill_us(num_prompt_tokens)
            - self._prefill_us(start)
            + self._decode_us(end)
            - self._decode_us(num_prompt_tokens)
        )

    def step_us(self, marginals_us: Iterable[int]) -> int:
        """The time of a step with chunks of these marginal costs."""
        return self.fixed_us + sum(marginals_us)

    def num_tokens_within(self, budget_us: int, start: int, end: int, num_prompt_tokens: int) -> int:
        """How many of the positions start .. end - 1, taken from the first, cost no more than the budget together."""
        low, high = 0, end - start
        while low < high:
            middle = (low + high + 1) // 2
            if self.marginal_us(start, start + middle, num_prompt_tokens) <= budget_us:
                low = middle
            else:
                high = middle - 1
        return low

    def _prefill_us(self, position: int) -> int:
        """Of all prompt tokens before the position."""
        return _cumulative_us(self.prefill_token_ns, self.prefill_context_ps, position)

    def _decode_us(self, position: int) -> int:
        """Of all tokens before the position, were they all output."""
        return _cumulative_us(self.decode_token_ns, self.decode_context_ps, position)


def _cumulative_us(token_ns: int, context_ps: int, position: int) -> int:
    return position * (2000 * token_ns + context_ps * (position - 1)) // (2 * _PS_PER_US)


PROFILES: dict[str, CostModel] = {
    "cpu": CostModel(
        fixed_us=5_000,
        prefill_token_ns=330_000,
        prefill_context_ps=200_000,
        decode_token_ns=350_000,
        decode_context_ps=500_000,
    ),
    "gpu8b": CostModel(
        fixed_us=3_700,
        prefill_token_ns=35_000,
        prefill_context_ps=1_050,
        decode_token_ns=20_000,
        decode_context_ps=33_000,
    ),
}
"""Figures to plan and to simulate with where nothing was calibrated: SmolLM2-135M on two cores, and an 8B model in
bfloat16 on one large GPU (3.7 ms to read its weights, 256 tokens behind 100,000 others in 36 ms)."""
