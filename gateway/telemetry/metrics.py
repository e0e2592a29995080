"""Every Prometheus metric of the gateway, and the port they are read from.

Labels are bounded: a model is one that is served, an outcome or code one of ours, and only so many teams have labels of
their own. Gauges say how several workers' values become one (`shared_metrics`), so none of them may be a function.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import cache, partial
from pathlib import Path

import msgspec
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, start_http_server

from gateway.domain.principal import Principal, TeamNames
from gateway.domain.record import RequestRecord
from gateway.telemetry.team_metrics import TeamLabels, TeamLoad, TeamMetrics, nobody_known

METRICS_HOST = "127.0.0.1"

_LATENCY_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100)
REFRESH_S = 2.0
"""Between two looks at the engine, for the gauges that tell of it."""

_GAP_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1, 2.5, 5)


class EngineLoad(msgspec.Struct, frozen=True, kw_only=True):
    """How busy the engine of a model is."""

    model: str
    num_running: int
    num_waiting: int
    num_free_blocks: int
    num_used_blocks: int
    teams: tuple[TeamLoad, ...] = ()


class GatewayMetrics:
    """The metric objects, in a registry of their own.

    Args:
        throttles_are_alone: each process counts for itself what they should count together.
        max_teams: teams with labels of their own: the first so many that this process sees.
        team_names, teams_file: see `TeamMetrics`.
    """

    def __init__(
        self,
        engine_is_up: Callable[[], bool],
        *,
        limits_are_up: Callable[[], bool] = lambda: True,
        throttles_are_alone: Callable[[], bool] = lambda: False,
        max_teams: int = 200,
        team_names: Callable[[str], TeamNames | None] = nobody_known,
        teams_file: Path | None = None,
    ) -> None:
        self.registry = CollectorRegistry()
        self._engine_is_up = engine_is_up
        self._limits_are_up = limits_are_up
        self._throttles_are_alone = throttles_are_alone
        self._labels = TeamLabels(max_teams)
        self._by_model: dict[str, _ModelMeters] = {}
        self._by_team: dict[TeamNames, _TeamMeters] = {}
        self._teams = TeamMetrics(self._labels, team_names, file=teams_file)
        self.registry.register(self._teams)
        registry = self.registry
        self.in_flight = Gauge(
            "evenhand_http_requests_in_flight",
            "HTTP requests being answered right now.",
            registry=registry,
            multiprocess_mode="livesum",
        )
        self.in_flight.set(0)
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
        self.team_tokens = Counter(
            "evenhand_team_tokens",
            "Tokens of settled requests by team: prompt (cached ones included), cached, completion.",
            ["organization", "team", "kind"],
            registry=registry,
        )
        self.team_requests = Counter(
            "evenhand_team_requests",
            "Requests handed to an engine by team, by how they ended.",
            ["organization", "team", "outcome"],
            registry=registry,
        )
        self._engine_up = Gauge(
            "evenhand_engine_up",
            "1 if the engine can take requests.",
            registry=registry,
            multiprocess_mode="livemin",
        )
        self._limits_up = Gauge(
            "evenhand_limits_up",
            "1 if limits can be checked where all processes share them.",
            registry=registry,
            multiprocess_mode="livemin",
        )
        self._throttles_alone = Gauge(
            "evenhand_throttles_alone",
            "1 if Redis is set up and did not count for throttles lately, so that this process does for itself.",
            registry=registry,
            multiprocess_mode="livemax",
        )
        self._running = Gauge(
            "evenhand_engine_running",
            "Sequences that have a slot in the engine.",
            ["model"],
            registry=registry,
            multiprocess_mode="livemostrecent",
        )
        self._waiting = Gauge(
            "evenhand_engine_waiting",
            "Sequences that wait for a slot in the engine.",
            ["model"],
            registry=registry,
            multiprocess_mode="livemostrecent",
        )
        self._blocks = Gauge(
            "evenhand_engine_kv_blocks",
            "Blocks of the engine's KV pool, used or free; free ones may hold cached prefixes.",
            ["model", "state"],
            registry=registry,
            multiprocess_mode="livemostrecent",
        )
        self.refresh(None)

    def refused(self, status: int, code: str | None) -> None:
        self._refused.labels(status, code or "none").inc()

    def observe(self, record: RequestRecord) -> None:
        """Count a settled request."""
        meters = self._by_model.get(record.opening.model)
        if meters is None:
            meters = self._by_model[record.opening.model] = _ModelMeters(self, record.opening.model)
        meters.outcome(record.outcome).inc()
        self._team(record.info.principal).observe(record)
        meters.prompt_tokens.inc(record.usage.prompt_tokens)
        if record.usage.cached_tokens:
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

    def refresh(self, load: EngineLoad | None) -> None:
        """Say how it stands with engine and throttles now; `load` is None if the engine does not answer."""
        self._engine_up.set(self._engine_is_up())
        self._limits_up.set(self._limits_are_up())
        self._throttles_alone.set(self._throttles_are_alone())
        self._teams.update(None if load is None else load.teams)
        if load is not None:
            self._running.labels(load.model).set(load.num_running)
            self._waiting.labels(load.model).set(load.num_waiting)
            self._blocks.labels(load.model, "used").set(load.num_used_blocks)
            self._blocks.labels(load.model, "free").set(load.num_free_blocks)

    @asynccontextmanager
    async def kept_fresh(self, ask: Callable[[], Awaitable[EngineLoad | None]] | None = None) -> AsyncIterator[None]:
        """Call `refresh` every `REFRESH_S` as long as the block runs.

        Args:
            ask: asks the engine for its load. Must not raise.
        """

        async def keep() -> None:
            while True:
                self.refresh(None if ask is None else await ask())
                await asyncio.sleep(REFRESH_S)

        keeping = asyncio.create_task(keep())
        try:
            yield
        finally:
            keeping.cancel()

    def _team(self, principal: Principal) -> _TeamMeters:
        labels = self._labels.of((principal.organization, principal.team))
        meters = self._by_team.get(labels)
        if meters is None:
            meters = self._by_team[labels] = _TeamMeters(self, *labels)
        return meters


class _TeamMeters:
    """The metrics of one team, or of all others together, looked up once."""

    def __init__(self, metrics: GatewayMetrics, organization: str, team: str) -> None:
        self._prompt = metrics.team_tokens.labels(organization, team, "prompt")
        self._cached = metrics.team_tokens.labels(organization, team, "cached")
        self._completion = metrics.team_tokens.labels(organization, team, "completion")
        self._outcome = cache(partial(metrics.team_requests.labels, organization, team))

    def observe(self, record: RequestRecord) -> None:
        usage = record.usage
        self._outcome(record.outcome).inc()
        self._prompt.inc(usage.prompt_tokens)
        if usage.cached_tokens:
            self._cached.inc(usage.cached_tokens)
        self._completion.inc(usage.completion_tokens)


class _ModelMeters:
    """The metrics of one model, looked up once."""

    def __init__(self, metrics: GatewayMetrics, model: str) -> None:
        self.outcome = cache(partial(metrics.requests.labels, model))
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
