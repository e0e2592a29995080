"""The usage ledger: one row for each logical request that got a 200, and what is summed up from it.

Tokens, microseconds and milliseconds since the epoch are integers. A row never changes once it is there.
"""

from __future__ import annotations

import msgspec

from gateway.domain.ids import KeyId, OrganizationId, RequestId, TeamId
from gateway.domain.limits.meters import Weights
from gateway.domain.principal import RequestClass
from gateway.domain.request import Endpoint
from gateway.domain.usage import EngineTimings, Outcome, TokenUsage

HOUR_MS = 3_600_000


class Counted(msgspec.Struct, frozen=True):
    """A quota that a request counts for, in the period that it was admitted in.

    Attributes:
        key: of its meter, the period included.
        ends_at_ms: of the period.
    """

    key: str
    ends_at_ms: int
    weights: Weights


class Charge(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What a request has cost of a quota, in the quota's units."""

    key: str
    ends_at_ms: int
    units: int


class Opening(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """What is known of a request when its answer begins: enough to settle it even if this process dies.

    Attributes:
        model: the one that answers; `requested_model` the name that was asked for.
        num_parts: engine requests it was handed over as; if there are several their ids are
            ``{request_id}-0``, ``{request_id}-1`` and so on, else the one has the request's own id.
        price: what its tokens cost, by the prices of the moment; None if nobody has set any.
        quotas: that it counts for.
    """

    request_id: RequestId
    opened_at_ms: int
    organization_id: OrganizationId
    team_id: TeamId
    key_id: KeyId
    model: str
    requested_model: str
    endpoint: Endpoint
    stream: bool
    request_class: RequestClass
    prompt_tokens: int
    num_parts: int = 1
    price: Weights | None = None
    quotas: tuple[Counted, ...] = ()

    def cost_microusd(self, usage: TokenUsage) -> int:
        """Rounded up once, over the whole request."""
        return 0 if self.price is None else self.price.cost(usage)

    def charges(self, usage: TokenUsage) -> tuple[Charge, ...]:
        """Of each quota that it counts for."""
        return tuple(Charge(each.key, each.ends_at_ms, each.weights.cost(usage)) for each in self.quotas)


class LedgerRow(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A settled request.

    Attributes:
        closed_at_ms: settlement; the row counts for the hour that this lies in.
        finish_reason: of its choices, each kind once, joined by commas; empty if none came to its end.
        error_code: what the caller was told, if it failed after its answer had begun.
        cached_tokens: part of `prompt_tokens`.
        engine_us: the request's share of the engine's step times.
        parked_us: with the other four it sums to the time from arrival in the engine to the end there.
        ttft_us: from arrival to first text; None if there was none, or it is not known.
        total_us: from arrival to the end; None if it is not known.
        cost_microusd: by the prices at its admission; 0 if there were none.
        charges: of each quota that it counted for.
    """

    request_id: RequestId
    opened_at_ms: int
    closed_at_ms: int
    organization_id: OrganizationId
    team_id: TeamId
    key_id: KeyId
    model: str
    requested_model: str
    endpoint: Endpoint
    stream: bool
    request_class: RequestClass
    outcome: Outcome
    finish_reason: str
    error_code: str | None
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    queue_us: int
    prefill_us: int
    decode_us: int
    preempted_us: int
    engine_us: int
    ttft_us: int | None
    total_us: int | None
    parked_us: int = 0  # journals of older versions do not have it, nor what follows
    cost_microusd: int = 0
    charges: tuple[Charge, ...] = ()

    @property
    def timings(self) -> EngineTimings:
        return EngineTimings(
            queue_us=self.queue_us,
            prefill_us=self.prefill_us,
            decode_us=self.decode_us,
            preempted_us=self.preempted_us,
            engine_us=self.engine_us,
            parked_us=self.parked_us,
        )


class UsageTotals(msgspec.Struct, frozen=True, kw_only=True):
    """Sums over ledger rows."""

    num_requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    engine_us: int = 0
    cost_microusd: int = 0


class HourlyUsage(msgspec.Struct, frozen=True, kw_only=True):
    """The sums of one hour, key and model.

    Attributes:
        hour_ms: when the hour begins, in milliseconds since the epoch; a multiple of `HOUR_MS`.
    """

    hour_ms: int
    organization_id: OrganizationId
    team_id: TeamId
    key_id: KeyId
    model: str
    totals: UsageTotals
