"""The three kinds of meters, which are never merged: a bucket (rate), a quota (calendar period), a lease (concurrency).

A meter's key names what it counts for and never how much that may be, so whoever changes a limit keeps what was used.
All figures are integers and stay below 2**53, since a store may count in doubles. Knows nothing of stores or time.
"""

from __future__ import annotations

import msgspec

from gateway.domain.usage import TokenUsage

PARTS = 86_400_000
"""Parts of a unit in which a bucket's level is kept: so a millisecond refills a whole number of them in any period."""
MOST_UNITS = 100_000_000
"""Of a bucket's capacity, refill and debt."""
MOST_QUOTA = 1_000_000_000_000_000
"""Of a quota, in tokens or micro-USD."""
MOST_TOKENS = 10_000_000
"""Of one request, in all."""
DIVISOR = 1_000_000
MOST_WEIGHT = 100_000_000
PERIODS_MS = (1_000, 60_000, 3_600_000, 86_400_000)


class Weights(msgspec.Struct, frozen=True, kw_only=True):
    """What a request costs, in the meter's units.

    Attributes:
        prompt, cached, output: millionths of a unit a token; cached tokens are the part of the prompt that was found in
            the prefix cache. For money these are micro-USD for a million tokens.
        per_request: units a request, whatever is in it.
    """

    prompt: int = DIVISOR
    cached: int = DIVISOR
    output: int = DIVISOR
    per_request: int = 0

    def cost(self, usage: TokenUsage) -> int:
        """Rounded up once, over the whole request."""
        fresh = usage.prompt_tokens - usage.cached_tokens
        millionths = fresh * self.prompt + usage.cached_tokens * self.cached + usage.completion_tokens * self.output
        return self.per_request + -(-millionths // DIVISOR)


TOKENS = Weights()
REQUESTS = Weights(prompt=0, cached=0, output=0, per_request=1)


class Bucket(msgspec.Struct, frozen=True, kw_only=True, tag="bucket"):
    """A rate: full at first, refilled all the time, never above its capacity.

    Attributes:
        refill: units in `period_ms`, one of `PERIODS_MS`.
        max_debt: how far below nothing a settlement may take it, if a request used more than was expected of it.
        is_shadow: counted and reported, not enforced.
    """

    key: str
    capacity: int
    refill: int
    period_ms: int = 60_000
    max_debt: int = 0
    is_shadow: bool = False

    @property
    def parts_per_ms(self) -> int:
        return self.refill * (PARTS // self.period_ms)


class Quota(msgspec.Struct, frozen=True, kw_only=True, tag="quota"):
    """A contract for a period, whose name is part of the key.

    Attributes:
        amount: in all, top-ups included.
        is_hard: what is committed and reserved never exceeds the amount. A soft one refuses nothing.
    """

    key: str
    amount: int
    is_hard: bool = True
    is_shadow: bool = False


class Lease(msgspec.Struct, frozen=True, kw_only=True, tag="lease"):
    """Requests at a time."""

    key: str
    limit: int
    is_shadow: bool = False


Meter = Bucket | Quota | Lease


class Use(msgspec.Struct, frozen=True):
    """A meter, and what a request costs it. A lease costs one whatever the weights are."""

    meter: Meter
    weights: Weights = TOKENS
