"""Authentication of API routes: the principal of a request is in ``scope["auth"]``, or the request is refused."""

from __future__ import annotations

from typing import Self

from litestar.enums import ScopeType
from litestar.middleware import ASGIMiddleware
from litestar.types import ASGIApp, Receive, Scope, Send

from gateway.services.authenticate import Authenticator


class Authentication(ASGIMiddleware):
    """Checks the key before the body is read. OPTIONS carries no key and tells nothing."""

    scopes = (ScopeType.HTTP,)

    def __init__(self, authenticator: Authenticator) -> None:
        self._authenticator = authenticator

    def __deepcopy__(self, _: object) -> Self:
        """Itself: the framework copies a router with all that hangs on it, and each copy of the keys would grow old."""
        return self

    async def handle(self, scope: Scope, receive: Receive, send: Send, next_app: ASGIApp) -> None:
        if scope["type"] == ScopeType.HTTP and scope["method"] != "OPTIONS":
            headers, address = scope["headers"], scope["state"]["client_address"]
            principal = self._authenticator.authenticate_now(headers, address)
            if principal is None:
                principal = await self._authenticator.authenticate(headers, address)
            scope["auth"] = principal
        await next_app(scope, receive, send)
