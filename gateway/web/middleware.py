"""Around everything: an id for every request, the log context, the number in flight, and what is refused unseen.

Wraps the whole application and not its routes, since 404 and 405 come from routing, before any middleware of a route.
"""

from __future__ import annotations

import re
import time
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

import structlog
from litestar import Request, Response
from litestar.enums import ScopeType
from litestar.types import ASGIApp, HTTPScope, Message, Receive, Scope, Send
from prometheus_client import Gauge

from gateway.domain.credential import holds_credential
from gateway.domain.ids import new_request_id
from gateway.errors import EvenhandError, HeadersTooLarge, Unavailable
from gateway.settings import ServerSettings
from gateway.web.client_address import client_address

_CLIENT_ID = re.compile(rb"[A-Za-z0-9._:/+=-]{1,128}")
_LINE_BYTES = 4
"""Of each header besides its name and value: the colon, the space, and the end of the line."""
OPS_PATHS = frozenset({"/health", "/ready"})
"""Answered to the end: who asks there wants to know how it stands with us."""

Respond = Callable[[Request[Any, Any, Any], Exception], Response[bytes]]
"""What `gateway.web.errors.ErrorResponses` does."""


class Leaving(Protocol):
    """What is asked of `gateway.shutdown.Shutdown`."""

    @property
    def is_draining(self) -> bool: ...

    @property
    def is_closing(self) -> bool: ...


class RequestContext:
    """Sets ``request_id`` and ``client_address`` in ``scope["state"]``, and puts ``x-request-id`` on every response.

    The id is always ours: one chosen by a caller could be anybody's. A caller's own ``x-client-request-id`` is sent
    back beside it. HEAD is answered as GET without a body, which the server leaves out. During a drain every response
    closes its connection, so that the client's next request finds another server; near its end new requests are
    refused, and so are, at any time, those with more bytes of headers than the settings allow.
    """

    def __init__(
        self, app: ASGIApp, in_flight: Gauge, respond: Respond, settings: ServerSettings, leaving: Leaving
    ) -> None:
        self._app = app
        self._in_flight = in_flight
        self._respond = respond
        self._max_header_bytes = settings.max_header_bytes
        self._trusted = settings.trusted_proxies
        self._leaving = leaving

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != ScopeType.HTTP:
            await self._app(scope, receive, send)
            return
        request_id = new_request_id(time.time_ns() // 1_000_000)
        client = client_address(scope, self._trusted)
        state = scope["state"]
        state["request_id"] = request_id
        state["client_address"] = client
        structlog.contextvars.clear_contextvars()
        structlog.contextvars.bind_contextvars(request_id=request_id, client=client)
        ids = [(b"x-request-id", request_id.encode())]
        num_bytes = len(scope["raw_path"]) + len(scope["query_string"])
        for name, value in scope["headers"]:
            num_bytes += len(name) + len(value) + _LINE_BYTES
            if name == b"x-client-request-id" and _CLIENT_ID.fullmatch(value) and not holds_credential(value.decode()):
                ids.append((name, value))
        if scope["method"] == "HEAD":
            scope["method"] = "GET"
        leaving = self._leaving

        def send_with_ids(message: Message) -> Awaitable[None]:
            if message["type"] == "http.response.start":
                closing = [(b"connection", b"close")] if leaving.is_draining else []
                message["headers"] = [*message["headers"], *ids, *closing]
            return send(message)

        self._in_flight.inc()
        try:
            if num_bytes > self._max_header_bytes:
                refusal = f"The request's headers are larger than the limit of {self._max_header_bytes} bytes."
                await self._refuse(HeadersTooLarge(refusal), scope, send_with_ids)
            elif leaving.is_closing and scope["path"] not in OPS_PATHS:
                refusal = "The server is shutting down. Please try again shortly."
                await self._refuse(Unavailable(refusal), scope, send_with_ids)
            else:
                await self._app(scope, receive, send_with_ids)
        finally:
            self._in_flight.dec()

    async def _refuse(self, error: EvenhandError, scope: HTTPScope, send: Send) -> None:
        response = self._respond(Request(scope), error)
        headers = [(name.lower().encode(), value.encode()) for name, value in response.headers.items()]
        headers.append((b"content-type", str(response.media_type).encode()))
        await send({"type": "http.response.start", "status": error.status, "headers": headers})
        await send({"type": "http.response.body", "body": response.content, "more_body": False})
