"""What an `Ask` must keep to before any store looks at it. All figures that follow from one then stay below 2**53."""

from __future__ import annotations

from collections.abc import Sequence

from gateway.domain.limits.admission import Ask
from gateway.domain.limits.meters import (
    MOST_QUOTA,
    MOST_TOKENS,
    MOST_UNITS,
    MOST_WEIGHT,
    PERIODS_MS,
    Bucket,
    Lease,
    Meter,
    Quota,
    Use,
    Weights,
)

MOST_LEASE_MS = 86_400_000
MOST_SEEN = 20_000


def validate(ask: Ask) -> None:
    """Raises ValueError."""
    _figures(ask)
    _uses(ask.uses)


class Validator:
    """`validate` for one that is asked for the same uses over and over: a tuple that was looked through is known again
    as the very same one."""

    def __init__(self) -> None:
        self._seen: dict[int, tuple[Use, ...]] = {}
        """By `id`, which no other tuple has for as long as this one is kept."""

    def validate(self, ask: Ask) -> None:
        """Raises ValueError."""
        _figures(ask)
        uses = ask.uses
        if self._seen.get(id(uses)) is uses:
            return
        _uses(uses)
        if len(self._seen) >= MOST_SEEN:
            self._seen.clear()
        self._seen[id(uses)] = uses


def _uses(uses: Sequence[Use]) -> None:
    seen: set[str] = set()
    for use in uses:
        if use.meter.key in seen:
            raise ValueError(f"two uses of the meter {use.meter.key!r}")
        seen.add(use.meter.key)
        _meter(use.meter)
        _weights(use.weights)


def _figures(ask: Ask) -> None:
    if not 0 <= ask.min_output <= ask.max_output:
        raise ValueError(f"min_output is {ask.min_output}, not 0 to max_output, {ask.max_output}")
    if not 0 <= ask.expected_output <= ask.max_output:
        raise ValueError(f"expected_output is {ask.expected_output}, not 0 to max_output, {ask.max_output}")
    if ask.prompt_tokens < 0 or ask.prompt_tokens + ask.max_output > MOST_TOKENS:
        raise ValueError(f"{ask.prompt_tokens} and {ask.max_output} tokens, not 0 to {MOST_TOKENS} together")
    if not 0 < ask.lease_ms <= MOST_LEASE_MS:
        raise ValueError(f"lease_ms is {ask.lease_ms}, not 1 to {MOST_LEASE_MS}")


def _meter(meter: Meter) -> None:
    match meter:
        case Bucket():
            _within(meter, "capacity", meter.capacity, MOST_UNITS)
            _within(meter, "refill", meter.refill, MOST_UNITS)
            _within(meter, "max_debt", meter.max_debt, MOST_UNITS)
            if meter.period_ms not in PERIODS_MS:
                raise ValueError(f"period_ms of {meter.key!r} is {meter.period_ms}, not one of {PERIODS_MS}")
        case Quota():
            _within(meter, "amount", meter.amount, MOST_QUOTA)
        case Lease():
            _within(meter, "limit", meter.limit, MOST_UNITS)


def _within(meter: Meter, name: str, value: int, most: int) -> None:
    if not 0 <= value <= most:
        raise ValueError(f"{name} of {meter.key!r} is {value}, not 0 to {most}")


def _weights(weights: Weights) -> None:
    """Cached tokens may not cost more than others: what is reserved supposes that none is cached."""
    if not (0 <= weights.cached <= weights.prompt <= MOST_WEIGHT and 0 <= weights.output <= MOST_WEIGHT):
        raise ValueError(f"weights of a token are 0 to {MOST_WEIGHT}, cached at most prompt: {weights}")
    if not 0 <= weights.per_request <= MOST_UNITS:
        raise ValueError(f"per_request is {weights.per_request}, not 0 to {MOST_UNITS}")
