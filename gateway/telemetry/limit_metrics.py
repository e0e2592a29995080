"""Metrics of limits. Labels are bounded: a limit's name is one of a few, a scope one of three."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter

from gateway.domain.limits.policy import Limit


class LimitMetrics:
    """Implements `gateway.services.limiter.LimitEvents`."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._refused = Counter(
            "evenhand_limit_refusals",
            "Requests refused by a limit.",
            ["limit", "scope"],
            registry=registry,
        )
        self._shadow_refused = Counter(
            "evenhand_limit_shadow_refusals",
            "Requests that a limit in shadow mode would have refused.",
            ["limit", "scope"],
            registry=registry,
        )

    def refused(self, limit: Limit) -> None:
        self._refused.labels(limit.name, limit.scope).inc()

    def shadow_refused(self, limit: Limit) -> None:
        self._shadow_refused.labels(limit.name, limit.scope).inc()
