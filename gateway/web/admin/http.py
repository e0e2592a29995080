"""What all admin handlers need from HTTP: bodies, queries, and who is calling."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec
from litestar import Request

from gateway.domain.tenancy import AdminToken
from gateway.services.administration import Administration
from gateway.services.audit import Actor
from gateway.services.ports import Clock
from gateway.web.admin.schema import NoQuery, Nothing
from gateway.web.body import read_body
from gateway.web.decoding import BodyDecoder
from gateway.web.query import decode_query

T = TypeVar("T", bound=msgspec.Struct)

MAX_BODY_BYTES = 64 << 10

AdminRequest = Request[Any, Any, Any]

_nothing = BodyDecoder(Nothing)


class AdminHttp:
    """Injected into every admin handler, with the use cases by what they are about.

    Args:
        body_timeout_s: for a body to arrive.
    """

    def __init__(self, administration: Administration, clock: Clock, *, body_timeout_s: float) -> None:
        self.tenants = administration.tenants
        self.keys = administration.keys
        self.tokens = administration.tokens
        self.catalog = administration.catalog
        self.limits = administration.limits
        self.quotas = administration.quotas
        self.prices = administration.prices
        self.reports = administration.reports
        self._clock = clock
        self._body_timeout_s = body_timeout_s

    def now_ms(self) -> int:
        return int(self._clock.time() * 1000)

    def actor(self, request: AdminRequest) -> Actor:
        """The token's holder, with the address that the request came from."""
        token: AdminToken = request.scope["auth"]
        state = request.scope["state"]
        client = request.scope["client"]
        source = state.get("client_address") or (client[0] if client else "")
        return Actor(token.id, source, state["request_id"])

    async def body(self, request: AdminRequest, decoder: BodyDecoder[T]) -> T:
        """The body of a request without a query.

        Raises:
            BodyTooLarge, SlowRequest, InvalidRequest, ClientGone: it cannot be read, or is not of that kind.
        """
        self.query(request, NoQuery)
        return decoder.decode(await self._read(request))

    async def no_body(self, request: AdminRequest) -> None:
        """None, or an empty object, and no query. Raises what `body` raises."""
        await self.query_alone(request, NoQuery)

    async def query_alone(self, request: AdminRequest, kind: type[T]) -> T:
        """The query of a request without a body. Raises what `body` raises."""
        query = self.query(request, kind)
        body = await self._read(request)
        if body.strip():
            _nothing.decode(body)
        return query

    async def _read(self, request: AdminRequest) -> bytes:
        return await read_body(request.scope, request.receive, MAX_BODY_BYTES, self._body_timeout_s)

    def query(self, request: AdminRequest, kind: type[T]) -> T:
        """Raises what `decode_query` raises."""
        return decode_query(request.scope["query_string"], kind)
