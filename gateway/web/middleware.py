"""Around everything: an id for every request, the log context, the number in flight.

Wraps the whole application and not its routes, since 404 and 405 come from routing, before any middleware of a route.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable

import structlog
from litestar.enums import ScopeType
from litestar.types import ASGIApp, Message, Receive, Scope, Send
from prometheus_client import Gauge

from gateway.domain.ids import new_request_id

_CLIENT_ID = re.compile(rb"[A-Za-z0-9._:/+=-]{1,128}")


class RequestContext:
    """Sets ``scope["state"]["request_id"]`` and puts ``x-request-id`` on every response.

    The id is always ours: one chosen by a caller could be anybody's. A caller's own ``x-client-request-id`` is sent
    back beside it. HEAD is answered as GET without a body, which the server leaves out.
    """

    def __init__(self, app: ASGIApp, in_flight: Gauge) -> None:
        self._app = app
        self._in_flight = in_flight

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != ScopeType.HTTP:
            await self._app(scope, receive, send)
            return
        request_id = new_request_id()
        scope["state"]["request_id"] = request_id
        structlog.contextvars.clear_contextvars()
        structlog.contextvars.bind_contextvars(request_id=request_id)
        ids = [(b"x-request-id", request_id.encode())]
        for name, value in scope["headers"]:
            if name == b"x-client-request-id" and _CLIENT_ID.fullmatch(value):
                ids.append((name, value))
        if scope["method"] == "HEAD":
            scope["method"] = "GET"

        def send_with_ids(message: Message) -> Awaitable[None]:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], *ids]
            return send(message)

        self._in_flight.inc()
        try:
            await self._app(scope, receive, send_with_ids)
        finally:
            self._in_flight.dec()
