"""Every Prometheus metric of the gateway, and the port they are read from.

Labels are bounded: a model is one that is served, an outcome or code one of ours.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, start_http_server

from gateway.domain.record import RequestRecord

METRICS_HOST = "127.0.0.1"

_LATENCY_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100)
_GAP_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1, 2.5, 5)


class GatewayMetrics:
    """The metric objects, in a registry of their own."""

    def __init__(self, engine_is_up: Callable[[], bool]) -> None:
        self.registry = CollectorRegistry()
        self._by_model: dict[str, _ModelMeters] = {}
        registry = self.registry
        self.in_flight = Gauge(
            "evenhand_http_requests_in_flight", "HTTP requests being answered right now.", registry=registry
        )
        self.requests = Counter(
            "evenhand_requests",
            "Requests handed to an engine, by how they ended.",
            ["model", "outcome"],
            registry=registry,
        )
        self._refused = Counter(
            "evenhand_requests_refused",
            "Requests answered with an error before they ran.",
            ["status", "code"],
            registry=registry,
        )
        self.prompt_tokens = Counter(
            "evenhand_prompt_tokens",
            "Prompt tokens of settled requests, cached ones included.",
            ["model"],
            registry=registry,
        )
        self.cached_tokens = Counter(
            "evenhand_cached_tokens", "Prompt tokens found in the prefix cache.", ["model"], registry=registry
        )
        self.completion_tokens = Counter(
            "evenhand_completion_tokens", "Output tokens of settled requests.", ["model"], registry=registry
        )
        self.queue = Histogram(
            "evenhand_queue_seconds",
            "Time in the engine's queue before the first step.",
            ["model"],
            buckets=_LATENCY_S,
            registry=registry,
        )
        self.first_token = Histogram(
            "evenhand_time_to_first_token_seconds",
            "From a request's arrival to its first text.",
            ["model"],
            buckets=_LATENCY_S,
            registry=registry,
        )
        self.inter_token = Histogram(
            "evenhand_inter_token_seconds",
            "Between two tokens of one answer.",
            ["model"],
            buckets=_GAP_S,
            registry=registry,
        )
        self.total = Histogram(
            "evenhand_request_seconds",
            "From a request's arrival to its end.",
            ["model"],
            buckets=_LATENCY_S,
            registry=registry,
        )
        Gauge("evenhand_engine_up", "1 if the engine can take requests.", registry=registry).set_function(
            lambda: float(engine_is_up())
        )

    def refused(self, status: int, code: str | None) -> None:
        self._refused.labels(status, code or "none").inc()

    def observe(self, record: RequestRecord) -> None:
        """Count a settled request."""
        meters = self._by_model.get(record.model)
        if meters is None:
            meters = self._by_model[record.model] = _ModelMeters(self, record.model)
        self.requests.labels(record.model, record.outcome).inc()
        meters.prompt_tokens.inc(record.usage.prompt_tokens)
        meters.cached_tokens.inc(record.usage.cached_tokens)
        meters.completion_tokens.inc(record.usage.completion_tokens)
        meters.total.observe(record.total_s)
        if record.timings is not None:
            meters.queue.observe(record.timings.queue_us / 1e6)
        if record.first_delta_s is not None:
            meters.first_token.observe(record.first_delta_s)
        observe = meters.inter_token.observe
        for gap_s in record.inter_token_s:
            observe(gap_s)


class _ModelMeters:
    """The metrics of one model, looked up once."""

    def __init__(self, metrics: GatewayMetrics, model: str) -> None:
        self.prompt_tokens = metrics.prompt_tokens.labels(model)
        self.cached_tokens = metrics.cached_tokens.labels(model)
        self.completion_tokens = metrics.completion_tokens.labels(model)
        self.queue = metrics.queue.labels(model)
        self.first_token = metrics.first_token.labels(model)
        self.inter_token = metrics.inter_token.labels(model)
        self.total = metrics.total.labels(model)


@contextmanager
def metrics_server(port: int, registry: CollectorRegistry) -> Iterator[int]:
    """Serve `registry` on ``127.0.0.1:port`` from a thread of its own; yields the port (0 asks for a free one).

    Raises:
        OSError: the port cannot be listened on.
    """
    server, thread = start_http_server(port, addr=METRICS_HOST, registry=registry)
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
