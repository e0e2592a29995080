"""Authentication and permission of admin routes: whose token it is, and whether its role may do what the route does.

Every handler says in its `opt` what it needs; one that says nothing is refused to everybody.
"""

from __future__ import annotations

from typing import Any, Self

from litestar.connection import ASGIConnection
from litestar.enums import ScopeType
from litestar.handlers import BaseRouteHandler
from litestar.middleware import ASGIMiddleware
from litestar.types import ASGIApp, Guard, Receive, Scope, Send

from gateway.domain.tenancy import AdminToken
from gateway.services.admin_tokens import AdminAuthenticator, Permission, require_permission
from gateway.services.throttle import Throttle, check_changes

PERMISSION = "permission"


def _needs(permission: Permission) -> dict[str, Any]:
    return {PERMISSION: permission}


READ = _needs("read")
CHANGE = _needs("change")


class AdminAuthentication(ASGIMiddleware):
    """Puts the `AdminToken` of the caller into ``scope["auth"]``, or refuses, before the body is read."""

    scopes = (ScopeType.HTTP,)

    def __init__(self, authenticator: AdminAuthenticator) -> None:
        self._authenticator = authenticator

    def __deepcopy__(self, _memo: dict[int, Any]) -> Self:
        """The framework copies a router with all that it holds; there is one database."""
        return self

    async def handle(self, scope: Scope, receive: Receive, send: Send, next_app: ASGIApp) -> None:
        address = scope["state"]["client_address"]
        scope["auth"] = await self._authenticator.authenticate(scope["headers"], address)
        await next_app(scope, receive, send)


def permission_guard(changes: Throttle) -> Guard:
    """Whether the caller's role may do what the route does, and a change may come now.

    OPTIONS, which the framework answers, tells only what methods there are.
    """

    async def check(connection: ASGIConnection[Any, Any, Any, Any], handler: BaseRouteHandler) -> None:
        token: AdminToken = connection.scope["auth"]
        needed: Permission | None = handler.opt.get(PERMISSION)
        if connection.scope.get("method") == "OPTIONS":
            needed = "read"
        require_permission(token, needed)
        if needed == "change":
            await check_changes(changes, token.id)

    return check
