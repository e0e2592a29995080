"""The composition root: settings in, a Litestar application out. The only place that knows all parts."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager

from litestar import Litestar, Router
from litestar.di import Provide

from gateway.backends.local_pool import open_local_backend
from gateway.bootstrap_key import load_or_create_key
from gateway.services.authenticate import Authenticator, SingleKeyStore
from gateway.services.catalog import Catalog
from gateway.services.inference import Inference
from gateway.services.ports import Backend, Clock, KeyStore, Readiness
from gateway.settings import ServerSettings, Settings
from gateway.telemetry.logging import configure_logging
from gateway.telemetry.metrics import GatewayMetrics, metrics_server
from gateway.telemetry.recorder import TelemetryRecorder
from gateway.web.auth import Authentication
from gateway.web.errors import ErrorResponses
from gateway.web.inference import InferenceHttp
from gateway.web.middleware import RequestContext
from gateway.web.openai.chat import ChatController
from gateway.web.openai.completions import CompletionsController
from gateway.web.openai.models import ModelsController
from gateway.web.ops import health, ready

Resource = Callable[[Litestar], AbstractAsyncContextManager[None]]


class SystemClock:
    """Implements `gateway.services.ports.Clock`."""

    def time(self) -> float:
        return time.time()

    def monotonic(self) -> float:
        return time.monotonic()


def create_app(settings: Settings, *, is_draining: Callable[[], bool] = lambda: False) -> Litestar:
    """The application of one gateway worker.

    Its lifespan connects to the engine and serves the metrics port.

    Args:
        is_draining: when it says yes, ``/ready`` says no.

    Raises:
        KeyFileError, ModelLoadError, ConfigError: what is set up cannot work.
    """
    configure_logging(settings.log.level)
    key, _ = load_or_create_key(settings.home)
    backend, connection = open_local_backend(settings)
    return build(
        backend=backend,
        keys=SingleKeyStore.for_key(key),
        server=settings.server,
        is_draining=is_draining,
        lifespan=[connection],
        serve_metrics=True,
    )


def build(
    *,
    backend: Backend,
    keys: KeyStore,
    server: ServerSettings,
    clock: Clock | None = None,
    is_draining: Callable[[], bool] = lambda: False,
    lifespan: Sequence[Resource] = (),
    serve_metrics: bool = False,
) -> Litestar:
    """The application over any implementation of its ports.

    Args:
        lifespan: resources to hold while it runs, in order.
    """

    def readiness() -> Readiness:
        return Readiness(False, "the server is shutting down") if is_draining() else backend.readiness()

    metrics = GatewayMetrics(lambda: backend.readiness().is_ready)
    inference = InferenceHttp(
        Inference(backend, clock or SystemClock(), TelemetryRecorder(metrics)),
        max_body_bytes=server.max_body_bytes,
        heartbeat_s=server.heartbeat_s,
    )
    catalog = Catalog(backend)
    controllers = [ChatController, CompletionsController, ModelsController]
    authentication = Authentication(Authenticator(keys))

    @asynccontextmanager
    async def metrics_port(_: Litestar) -> AsyncIterator[None]:
        with metrics_server(server.metrics_port, metrics.registry):
            yield

    resources: list[Resource] = [*lifespan]
    if serve_metrics:
        resources.append(metrics_port)
    app = Litestar(
        route_handlers=[
            health,
            ready,
            # Users configure both kinds of base URL, with the version and without.
            *(Router(path, route_handlers=controllers, middleware=[authentication]) for path in ("/v1", "/")),
        ],
        dependencies={
            "inference": Provide(lambda: inference, sync_to_thread=False),
            "catalog": Provide(lambda: catalog, sync_to_thread=False),
            "readiness": Provide(readiness, sync_to_thread=False),
        },
        exception_handlers={Exception: ErrorResponses(metrics)},
        lifespan=resources,
        openapi_config=None,
        logging_config=None,  # ours is set up already; the framework's would log requests and responses
        request_max_body_size=None,  # `read_body` has the limit, and answers in our shape
    )
    app.asgi_handler = RequestContext(app.asgi_handler, metrics.in_flight)
    return app
