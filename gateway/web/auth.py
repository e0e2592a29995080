"""Authentication of API routes: the principal of a request is in ``scope["auth"]``, or the request is refused."""

from __future__ import annotations

from litestar.enums import ScopeType
from litestar.middleware import ASGIMiddleware
from litestar.types import ASGIApp, Receive, Scope, Send

from gateway.services.authenticate import Authenticator


class Authentication(ASGIMiddleware):
    """Checks the key before the body is read. OPTIONS carries no key and tells nothing."""

    scopes = (ScopeType.HTTP,)

    def __init__(self, authenticator: Authenticator) -> None:
        self._authenticator = authenticator

    async def handle(self, scope: Scope, receive: Receive, send: Send, next_app: ASGIApp) -> None:
        if scope["type"] == ScopeType.HTTP and scope["method"] != "OPTIONS":
            scope["auth"] = self._authenticator.authenticate(scope["headers"])
        await next_app(scope, receive, send)
