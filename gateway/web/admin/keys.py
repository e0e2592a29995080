"""/admin/api/keys. A raw key is in the answer that makes it, and nowhere else."""

from typing import Any

from litestar import Controller, get, patch, post
from litestar.di import NamedDependency
from litestar.params import FromPath

from gateway.web.admin.auth import CHANGE, READ
from gateway.web.admin.http import AdminHttp, AdminRequest
from gateway.web.admin.schema import ChangedKey, NewKey, NoQuery, OfTeamQuery
from gateway.web.admin.wire import page_to_wire, to_wire
from gateway.web.decoding import BodyDecoder

_new = BodyDecoder(NewKey)
_changed = BodyDecoder(ChangedKey)


class KeysController(Controller):
    """A key belongs to one team, for good; it is revoked, never removed."""

    path = "/keys"
    tags = ("Keys",)

    @get(operation_id="listKeys", opt=READ)
    async def list_page(self, request: AdminRequest, admin: NamedDependency[AdminHttp]) -> dict[str, Any]:
        """A page of all, the oldest first, or of one team's; raises `NotFound` if there is no such team."""
        query = admin.query(request, OfTeamQuery)
        return page_to_wire(await admin.keys.page(query.page, team_id=query.team_id))

    @post(operation_id="createKey", opt=CHANGE)
    async def create(self, request: AdminRequest, admin: NamedDependency[AdminHttp]) -> dict[str, Any]:
        """The raw key is in `key`, this once; raises `NotFound` for the team, `Conflict` if that is disabled."""
        wanted = await admin.body(request, _new)
        issued = await admin.keys.create(admin.actor(request), team_id=wanted.team_id, terms=wanted.terms())
        return {**to_wire(issued.key), "key": issued.raw}

    @get("/{key_id:str}", operation_id="getKey", opt=READ)
    async def retrieve(
        self, request: AdminRequest, admin: NamedDependency[AdminHttp], key_id: FromPath[str]
    ) -> dict[str, Any]:
        """The key without its secret, also a revoked one; raises `NotFound`."""
        admin.query(request, NoQuery)
        return to_wire(await admin.keys.get(key_id))

    @patch("/{key_id:str}", operation_id="changeKey", opt=CHANGE)
    async def change(
        self, request: AdminRequest, admin: NamedDependency[AdminHttp], key_id: FromPath[str]
    ) -> dict[str, Any]:
        """Another name, scope, class, bound, networks or expiry; raises `NotFound`, or `Conflict` if it is revoked."""
        wanted = await admin.body(request, _changed)
        return to_wire(await admin.keys.change(admin.actor(request), key_id, wanted.change()))

    @post("/{key_id:str}/revoke", status_code=200, operation_id="revokeKey", opt=CHANGE)
    async def revoke(
        self, request: AdminRequest, admin: NamedDependency[AdminHttp], key_id: FromPath[str]
    ) -> dict[str, Any]:
        """For good, and once more does nothing; raises `NotFound`."""
        await admin.no_body(request)
        return to_wire(await admin.keys.revoke(admin.actor(request), key_id))
