"""The composition root: settings in, a Litestar application out. The only place that knows all parts."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Protocol

from litestar import Controller, Litestar, Router
from litestar.di import Provide

from gateway.backends.local_pool import open_local_pool
from gateway.clock import SystemClock
from gateway.domain.principal import TeamNames
from gateway.journal.folder import new_writer_id
from gateway.limit_opening import OpenedLimits, in_memory, open_limits
from gateway.limits.throttles import Throttles
from gateway.pepper_file import load_peppers
from gateway.services.admin_tokens import AdminAuthenticator
from gateway.services.administration import Administration
from gateway.services.audit import SYSTEM, Actor
from gateway.services.authenticate import Authenticator
from gateway.services.bookkeeping import Bookkeeping
from gateway.services.catalog import Catalog, FixedListing, Listings
from gateway.services.directory import Directory
from gateway.services.inference import Inference
from gateway.services.limit_keeping import LimitKeeping
from gateway.services.limit_reports import LimitReports
from gateway.services.limiter import Limiter
from gateway.services.lookup import RequestLookup
from gateway.services.metering import MeteringRecorder, Recorders
from gateway.services.ports import Backend, Clock, Readiness
from gateway.services.quota_alerts import QuotaAlerts
from gateway.services.recovery import FinalsSource
from gateway.services.refresher import Refresher
from gateway.services.roll import Roll
from gateway.services.throttle import Guesses
from gateway.services.usage import UsageReports
from gateway.settings import ServerSettings, Settings
from gateway.shutdown import Shutdown
from gateway.storage.opening import open_database, open_feed
from gateway.storage.schema import migrate
from gateway.telemetry.limit_metrics import LimitMetrics
from gateway.telemetry.logging import configure_logging
from gateway.telemetry.metrics import EngineLoad, GatewayMetrics, metrics_server
from gateway.telemetry.recorder import TelemetryRecorder
from gateway.telemetry.team_metrics import nobody_known
from gateway.web.admin.router import admin_router
from gateway.web.auth import Authentication
from gateway.web.errors import ErrorResponses
from gateway.web.inference import InferenceHttp
from gateway.web.middleware import RequestContext
from gateway.web.openai.chat import ChatController
from gateway.web.openai.completions import CompletionsController
from gateway.web.openai.limits import LimitsController
from gateway.web.openai.models import ModelsController
from gateway.web.openai.standing import RequestsController
from gateway.web.openai.usage import UsageController
from gateway.web.ops import health, ready

Resource = Callable[[Litestar], AbstractAsyncContextManager[None]]


class Pool(Protocol):
    """Where answers come from, with all that belongs to it; `gateway.backends.local_pool.LocalPool` is one."""

    @property
    def backend(self) -> Backend: ...

    @property
    def model(self) -> str:
        """The name of the model that it serves."""

    @property
    def finals(self) -> FinalsSource: ...

    def connection(self) -> AbstractAsyncContextManager[None]:
        """To be held while the backend is used."""

    async def load(self) -> EngineLoad | None: ...

    def set_weights(self, weights: Mapping[str, int]) -> None:
        """These are the weights of all fairness nodes that have one; running requests are subject to them from now."""


def create_app(
    settings: Settings,
    *,
    shutdown: Shutdown | None = None,
    teams_file: Path | None = None,
    open_pool: Callable[[Settings, str], Pool] = open_local_pool,
) -> Litestar:
    """The application of one gateway worker.

    Its lifespan brings the database up to date, connects to the engine, keeps the books, and serves the metrics port.

    Args:
        shutdown: how far the process is on its way out; None never leaves.
        teams_file: set if metrics are shared with other workers: another process serves them, and finds here what this
            one knows of teams.
        open_pool: given this process' name at the engines.

    Raises:
        PepperError, UnusableDatabase, JournalError, ModelLoadError, ConfigError: what is set up cannot work.
    """
    configure_logging(settings.log.level)
    clock = SystemClock()
    peppers = load_peppers(settings)
    database = open_database(settings)
    feed = open_feed(settings)
    directory = Directory(database, feed, clock)
    writer_id = new_writer_id()
    pool = open_pool(settings, writer_id)
    roll = Roll(database, directory, pool.set_weights)
    limits = open_limits(settings, clock)
    limiter = Limiter(
        limits.store, clock, owner=writer_id, lease_s=settings.limits.lease_s, refresh=Refresher(directory)
    )
    keeping = LimitKeeping(limiter, database, clock)
    alerts = QuotaAlerts(database, clock, limiter.quotas.get)
    books = Bookkeeping(
        settings.home,
        database,
        pool.finals,
        clock,
        writer_id=writer_id,
        on_posted=(keeping.posted, alerts.posted),
        on_recovered=(keeping.recovered, alerts.posted),
        is_told=keeping.is_told,
        on_gone=keeping.orphans.gone,
    )
    keeping.is_recovered = lambda: books.is_recovered
    keeping.orphans.dying = lambda: books.dead
    administration = Administration.over(database, feed, peppers, clock)
    redis_url, rates = settings.redis.url, settings.throttle
    throttles = Throttles(None if redis_url is None else redis_url.get_secret_value())

    def guesses(kind: str, rate: str) -> Guesses:
        return Guesses(throttles.throttle(f"failed-{kind}", rate), throttles.throttle(f"unknown-{kind}", rate))

    @asynccontextmanager
    async def hub(_: Litestar) -> AsyncIterator[None]:
        async with AsyncExitStack() as stack:
            stack.push_async_callback(database.close)
            stack.push_async_callback(throttles.close)
            if feed is not None:
                stack.push_async_callback(feed.close)
            await migrate(database)
            await administration.catalog.enter_models(Actor(SYSTEM), [pool.model])
            await stack.enter_async_context(directory.running())
            await stack.enter_async_context(pool.connection())
            await stack.enter_async_context(roll.running())
            await stack.enter_async_context(alerts.running())
            await stack.enter_async_context(books.running())  # which end knowing what the store of limits has not taken
            await stack.enter_async_context(keeping.running())
            yield

    return build(
        backend=pool.backend,
        authenticator=Authenticator(directory, peppers, clock, guesses("keys", rates.failed_keys)),
        listings=directory,
        books=books.recorder,
        usage=UsageReports(database, clock),
        lookup=RequestLookup(pool.backend, database, books.recorder, clock),
        admin=admin_router(
            administration,
            AdminAuthenticator(database, peppers, clock, guesses("tokens", rates.failed_admin_tokens)),
            clock,
            body_timeout_s=settings.server.body_timeout_s,
            changes=throttles.throttle("changes", rates.admin_changes),
        ),
        storage_readiness=directory.readiness,
        limiter=limiter,
        limits=limits,
        throttles_are_alone=lambda: throttles.is_alone,
        server=settings.server,
        clock=clock,
        shutdown=shutdown,
        lifespan=[hub],
        load=pool.load,
        team_names=roll.names,
        serve_metrics=teams_file is None,
        teams_file=teams_file,
    )


def build(
    *,
    backend: Backend,
    authenticator: Authenticator,
    server: ServerSettings,
    listings: Listings | None = None,
    books: MeteringRecorder | None = None,
    usage: UsageReports | None = None,
    lookup: RequestLookup | None = None,
    admin: Router | None = None,
    storage_readiness: Callable[[], Readiness] | None = None,
    limiter: Limiter | None = None,
    limits: OpenedLimits | None = None,
    throttles_are_alone: Callable[[], bool] = lambda: False,
    clock: Clock | None = None,
    shutdown: Shutdown | None = None,
    lifespan: Sequence[Resource] = (),
    load: Callable[[], Awaitable[EngineLoad | None]] | None = None,
    team_names: Callable[[str], TeamNames | None] = nobody_known,
    serve_metrics: bool = False,
    teams_file: Path | None = None,
) -> Litestar:
    """The application over any implementation of its ports.

    Args:
        listings: the catalogue; None has no aliases.
        books: keeps the ledger; None keeps none. Without `usage`, `lookup` and `admin` their routes are not there.
        shutdown: how far the process is on its way out; None never leaves.
        limiter: what requests may use, and `limits` where that is kept; None keeps it in memory.
        lifespan: resources to hold while it runs, in order.
        load: asks the engine how busy it is, for the metrics.
        team_names: of the team with a fairness node, for the metrics.
        teams_file: as in `create_app`.
    """
    leaving = shutdown or Shutdown()
    clock = clock or SystemClock()
    limiting = limiter or Limiter(in_memory(clock), clock)

    def readiness() -> Readiness:
        if leaving.is_draining:
            return Readiness(False, "the server is shutting down")
        if storage_readiness is not None and not (storage := storage_readiness()).is_ready:
            return storage
        if books is not None and not (kept := books.readiness()).is_ready:
            return kept
        engine = backend.readiness()
        # A store that nobody's requests go by takes no server out of service.
        return limits.readiness() if engine.is_ready and limits is not None and limiting.is_used else engine

    metrics = GatewayMetrics(
        lambda: backend.readiness().is_ready,
        limits_are_up=(lambda: True) if limits is None else limits.is_up,
        throttles_are_alone=throttles_are_alone,
        max_teams=server.metrics_teams,
        team_names=team_names,
        teams_file=teams_file,
    )
    errors = ErrorResponses(metrics)
    listings = listings or FixedListing()
    limiting.events = LimitMetrics(metrics.registry)
    limit_reports = LimitReports(limiting, listings)
    catalog = Catalog(backend, listings)
    telemetry = TelemetryRecorder(metrics)
    recorder = telemetry if books is None else Recorders(books, telemetry)
    inference = InferenceHttp(
        Inference(backend, catalog, clock, recorder, limiting),
        max_body_bytes=server.max_body_bytes,
        body_timeout_s=server.body_timeout_s,
        heartbeat_s=server.heartbeat_s,
    )
    controllers: list[type[Controller]] = [
        ChatController,
        CompletionsController,
        ModelsController,
        LimitsController,
    ]
    if usage is not None:
        controllers.append(UsageController)
    if lookup is not None:
        controllers.append(RequestsController)
    authentication = Authentication(authenticator)

    @asynccontextmanager
    async def metrics_port(_: Litestar) -> AsyncIterator[None]:
        with metrics_server(server.metrics_port, metrics.registry):
            yield

    @asynccontextmanager
    async def engine_metrics(_: Litestar) -> AsyncIterator[None]:
        async with metrics.kept_fresh(load):
            yield

    resources: list[Resource] = [*lifespan, engine_metrics]
    if serve_metrics:
        resources.append(metrics_port)
    app = Litestar(
        route_handlers=[
            health,
            ready,
            # Users configure both kinds of base URL, with the version and without.
            *(Router(path, route_handlers=controllers, middleware=[authentication]) for path in ("/v1", "/")),
            *([] if admin is None else [admin]),
        ],
        dependencies={
            "inference": Provide(lambda: inference, sync_to_thread=False),
            "catalog": Provide(lambda: catalog, sync_to_thread=False),
            "readiness": Provide(readiness, sync_to_thread=False),
            "limits": Provide(lambda: limit_reports, sync_to_thread=False),
            "usage": Provide(lambda: usage, sync_to_thread=False),
            "lookup": Provide(lambda: lookup, sync_to_thread=False),
        },
        exception_handlers={Exception: errors},
        lifespan=resources,
        openapi_config=None,
        logging_config=None,  # ours is set up already; the framework's would log requests and responses
        request_max_body_size=None,  # `read_body` has the limit, and answers in our shape
    )
    app.asgi_handler = RequestContext(app.asgi_handler, metrics.in_flight, errors, server, leaving)
    return app
