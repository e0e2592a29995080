"""What is kept of a request once it is over: for the log line, the metrics and the ledger. Never text."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from gateway.domain.ids import RequestId, SessionId
from gateway.domain.ledger import Opening
from gateway.domain.principal import FairNode, Principal, RequestClass
from gateway.domain.request import Endpoint
from gateway.domain.usage import EngineTimings, Outcome, TokenUsage


class RequestInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A request's identity, known before anything is done for it.

    Attributes:
        session_id: unique over all keys; None leaves the key itself as the leaf that the engine's work is charged to.
    """

    request_id: RequestId
    principal: Principal
    request_class: RequestClass
    endpoint: Endpoint
    stream: bool
    session_id: SessionId | None = None

    @property
    def path(self) -> tuple[FairNode, ...]:
        """From the organization down to the session: who is charged for the engine's work."""
        if self.session_id is None:
            return self.principal.path
        return (*self.principal.path, FairNode(f"session:{self.session_id}", 1))


class RequestRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A settled request.

    Attributes:
        opening: what was said of it before its answer began.
        closed_at_ms: when it was settled, since the epoch.
        finish_reason: of its choices, each kind once, joined by commas; empty if none came to its end.
        error_code: what the caller was told, if it failed.
        timings: None if the engine never told.
        first_delta_s: from the request's arrival to the first text; None if there was none.
        total_s: from arrival to the end.
        inter_token_s: for every delta but a choice's first: time since the one before, divided by its tokens.
    """

    info: RequestInfo
    opening: Opening
    closed_at_ms: int
    outcome: Outcome
    usage: TokenUsage
    timings: EngineTimings | None
    finish_reason: str
    error_code: str | None
    first_delta_s: float | None
    total_s: float
    inter_token_s: Sequence[float]
