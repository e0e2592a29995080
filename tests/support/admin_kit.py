"""The administration over a real database, its use cases and its HTTP API, as tests use them."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
from identity_kit import PEPPERS, SteppedClock
from litestar import Litestar
from litestar.types import ASGIApp, Receive, Scope, Send

from gateway.domain.audit import AuditEntry
from gateway.domain.catalog import Model
from gateway.domain.ids import KeyId, OrganizationId, RequestId, TeamId
from gateway.domain.ledger import Charge, LedgerRow
from gateway.domain.tenancy import Role
from gateway.services.admin_tokens import AdminAuthenticator
from gateway.services.administration import Administration
from gateway.services.audit import Actor
from gateway.services.stores import Storage
from gateway.services.throttle import Guesses, Throttle
from gateway.web.admin.router import admin_router
from gateway.web.errors import ErrorResponses

ACTOR = Actor("cli:tester", "192.0.2.7", "req_0")
SOURCE = "192.0.2.9"
NOW_S = 1_800_000_000.25
MODEL = "org/model-1"
BODY_TIMEOUT_S = 10.0


class CountingFeed:
    """Implements `gateway.services.stores.ChangeFeed`, and counts."""

    def __init__(self) -> None:
        self.num_announced = 0

    async def announce(self) -> None:
        self.num_announced += 1

    async def heard(self) -> AsyncIterator[None]:
        raise AssertionError("nobody listens here")
        yield


class CountingMetrics:
    """The part of the metrics that error responses use."""

    def __init__(self) -> None:
        self.statuses: list[int] = []

    def refused(self, status: int, code: str | None) -> None:
        self.statuses.append(status)


@dataclass(slots=True)
class Office:
    """Administration, and what it stands on."""

    storage: Storage
    guesses: Guesses | None = None
    changes: Throttle | None = None
    clock: SteppedClock = field(default_factory=lambda: SteppedClock(NOW_S))
    feed: CountingFeed = field(default_factory=CountingFeed)
    admin: Administration = field(init=False)
    app: Litestar = field(init=False)

    def __post_init__(self) -> None:
        self.admin = Administration.over(self.storage, self.feed, PEPPERS, self.clock)
        authenticator = AdminAuthenticator(self.storage, PEPPERS, self.clock, self.guesses)
        router = admin_router(
            self.admin, authenticator, self.clock, body_timeout_s=BODY_TIMEOUT_S, changes=self.changes
        )
        self.app = Litestar(
            route_handlers=[router],
            exception_handlers={Exception: ErrorResponses(CountingMetrics())},  # type: ignore[arg-type]
            openapi_config=None,
            logging_config=None,
            request_max_body_size=None,
        )
        self.app.asgi_handler = _with_context(self.app.asgi_handler)

    async def add_model(self, name: str = MODEL) -> None:
        async with self.storage.writing() as work:
            await work.catalog.enter_model(Model(name=name, created_at_ms=1))

    async def audit(self) -> list[AuditEntry]:
        async with self.storage.reading() as work:
            return list(await work.audit.page(after=0, limit=1000))

    async def version(self) -> int:
        async with self.storage.reading() as work:
            return await work.version()

    async def token(self, role: Role = "admin") -> str:
        return (await self.admin.tokens.create(ACTOR, name=f"a {role}", role=role)).raw

    @asynccontextmanager
    async def client(self, token: str | None = None) -> AsyncIterator[httpx.AsyncClient]:
        """Requests to ``/admin/api`` with a token, without a socket between."""
        headers = {} if token is None else {"authorization": f"Bearer {token}"}
        transport = httpx.ASGITransport(self.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test/admin/api", headers=headers) as client:
            yield client


def _with_context(app: ASGIApp) -> ASGIApp:
    """What the application's own outer layer puts into the scope."""

    async def handler(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            scope["state"] |= {"request_id": "req_test", "client_address": SOURCE}
        await app(scope, receive, send)

    return handler


def admin_routes(app: Litestar) -> Iterator[tuple[str, str, Any]]:
    """Method, path template and handler of every admin route, those that the framework adds left out."""
    for route in app.routes:
        for handler in getattr(route, "route_handlers", ()):
            for method in handler.http_methods:
                if method != "OPTIONS":
                    yield method, route.path, handler


def said(text: str) -> dict[str, Any]:
    """An audit entry's `before` or `after`."""
    value: dict[str, Any] = json.loads(text)
    return value


def ledger_row(
    number: int,
    *,
    team_id: str,
    key_id: str,
    closed_at_ms: int,
    cost_microusd: int = 0,
    charges: tuple[Charge, ...] = (),
) -> LedgerRow:
    return LedgerRow(
        request_id=RequestId(f"req_{number:032x}"),
        opened_at_ms=closed_at_ms,
        closed_at_ms=closed_at_ms,
        organization_id=OrganizationId("org_x"),
        team_id=TeamId(team_id),
        key_id=KeyId(key_id),
        model=MODEL,
        requested_model=MODEL,
        endpoint="chat",
        stream=True,
        request_class="interactive",
        outcome="finished",
        finish_reason="stop",
        error_code=None,
        prompt_tokens=20,
        cached_tokens=0,
        completion_tokens=8,
        queue_us=1,
        prefill_us=2,
        decode_us=3,
        preempted_us=0,
        engine_us=4,
        ttft_us=5,
        total_us=6,
        cost_microusd=cost_microusd,
        charges=charges,
    )
