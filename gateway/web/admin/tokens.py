"""/admin/api/admin-tokens. A raw token is in the answer that makes it, and nowhere else."""

from typing import Any

from litestar import Controller, get, post
from litestar.di import NamedDependency
from litestar.params import FromPath

from gateway.web.admin.auth import CHANGE, READ
from gateway.web.admin.http import AdminHttp, AdminRequest
from gateway.web.admin.schema import NewAdminToken, NoQuery, PageQuery
from gateway.web.admin.times import to_ms
from gateway.web.admin.wire import page_to_wire, to_wire
from gateway.web.decoding import BodyDecoder

_new = BodyDecoder(NewAdminToken)


class AdminTokensController(Controller):
    """What this API itself is called with; a token is revoked, never removed."""

    path = "/admin-tokens"
    tags = ("Admin tokens",)

    @get(operation_id="listAdminTokens", opt=READ)
    async def list_page(self, request: AdminRequest, admin: NamedDependency[AdminHttp]) -> dict[str, Any]:
        """A page of all, the oldest first; raises `InvalidRequest` for a bad cursor."""
        return page_to_wire(await admin.tokens.page(admin.query(request, PageQuery).page))

    @post(operation_id="createAdminToken", opt=CHANGE)
    async def create(self, request: AdminRequest, admin: NamedDependency[AdminHttp]) -> dict[str, Any]:
        """The raw token is in `token`, this once; raises `InvalidRequest` for a bad name or a past expiry."""
        wanted = await admin.body(request, _new)
        issued = await admin.tokens.create(
            admin.actor(request), name=wanted.name, role=wanted.role, expires_at_ms=to_ms(wanted.expires_at)
        )
        return {**to_wire(issued.token), "token": issued.raw}

    @get("/{token_id:str}", operation_id="getAdminToken", opt=READ)
    async def retrieve(
        self, request: AdminRequest, admin: NamedDependency[AdminHttp], token_id: FromPath[str]
    ) -> dict[str, Any]:
        """The token without its secret, also a revoked one; raises `NotFound`."""
        admin.query(request, NoQuery)
        return to_wire(await admin.tokens.get(token_id))

    @post("/{token_id:str}/revoke", status_code=200, operation_id="revokeAdminToken", opt=CHANGE)
    async def revoke(
        self, request: AdminRequest, admin: NamedDependency[AdminHttp], token_id: FromPath[str]
    ) -> dict[str, Any]:
        """For good, and once more does nothing; a token may revoke itself. Raises `NotFound`."""
        await admin.no_body(request)
        return to_wire(await admin.tokens.revoke(admin.actor(request), token_id))
