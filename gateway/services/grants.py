"""What one request may use, and how much of it is settled. Knows nothing of stores."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from gateway.domain.ids import OrganizationId
from gateway.domain.limits.admission import Ask, Reservation
from gateway.domain.limits.plan import MeterPlan
from gateway.domain.limits.policy import Price
from gateway.domain.limits.rules import holdings
from gateway.domain.principal import RequestClass
from gateway.domain.record import RequestInfo
from gateway.domain.usage import TokenUsage
from gateway.services.ports import Generation


class Grant:
    """What a request may use, from its admission to its settlement.

    Attributes:
        admitted_at_ms: its quotas' periods are those of this moment.
        request_class: lowered to `batch` if a soft quota had nothing left for it.
        caps: output tokens of one answer to each prompt, as limits on a request's size leave them.
        granted: output tokens over all answers that it may write for now.
        max_output: that it wants at most, even if it is more than one request may reserve.
        remaining: of each of the plan's uses, once it was admitted; empty if there are none.
        running: told of in reports; None before it runs.
        is_by_share: admitted by this process's share of its limits, since the store did not answer.
        is_lost: its reservation is gone though it runs, so it must end.
        is_given_away: others may have been given what it had reserved beyond `reported`.
        heard_s: when the store was last asked and answered that it holds this, by the monotonic clock.
        reported: output tokens that the store was told of then.
    """

    __slots__ = (
        "admitted_at_ms",
        "ask",
        "caps",
        "granted",
        "heard_s",
        "info",
        "is_by_share",
        "is_given_away",
        "is_lost",
        "max_output",
        "model",
        "num_choices",
        "plan",
        "prices",
        "remaining",
        "reported",
        "request_class",
        "running",
    )

    def __init__(
        self,
        info: RequestInfo,
        model: str,
        prices: Sequence[Price],
        plan: MeterPlan,
        caps: Sequence[int],
        num_choices: int,
        max_output: int,
        admitted_at_ms: int,
        heard_s: float,
    ) -> None:
        self.info = info
        self.model = model
        self.prices = prices
        self.plan = plan
        self.caps = caps
        self.num_choices = num_choices
        self.max_output = self.granted = max_output
        self.admitted_at_ms = admitted_at_ms
        self.request_class: RequestClass = info.request_class
        self.ask: Ask | None = None
        self.remaining: tuple[int, ...] = ()
        self.running: Generation | None = None
        self.is_by_share = False
        self.is_lost = False
        self.is_given_away = False
        self.heard_s = heard_s
        self.reported = 0

    @property
    def organization_id(self) -> OrganizationId:
        return self.info.principal.organization_id

    @property
    def is_clamped(self) -> bool:
        """It may write less than it wants, for now."""
        return self.granted < self.max_output

    @property
    def output(self) -> int:
        """Tokens that it has written so far."""
        return 0 if self.running is None else self.running.usage.completion_tokens

    def end(self, *, is_given_away: bool = False) -> None:
        """Its reservation is gone: it must not go on."""
        self.is_lost = True
        self.is_given_away |= is_given_away
        if self.running is not None:
            self.running.abort()

    def held(self, output: int, asked_s: float) -> None:
        """The store has been told of so much output, and holds this."""
        self.reported, self.heard_s = output, asked_s

    def settled_usage(self, usage: TokenUsage) -> TokenUsage:
        """What is settled of what it has used. Of one that was given away only what the store was told of in time: what
        the engine wrote since had no place in any quota, and its caller is told that the answer failed."""
        if not self.is_given_away or usage.completion_tokens <= self.reported:
            return usage
        return msgspec.structs.replace(usage, completion_tokens=self.reported)

    def reservation(self) -> Reservation:
        """What it holds, to be made known to a store that has lost it."""
        assert self.ask is not None
        reserved = holdings(self.ask, self.granted)
        return Reservation(ask=self.ask, granted_output=self.granted, reserved=reserved, reported_output=self.output)


class LateSettlement(NamedTuple):
    """One that the store has not taken yet."""

    grant: Grant
    usage: TokenUsage
