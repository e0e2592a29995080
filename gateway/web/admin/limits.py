"""/admin/api/limits. A limit's place is its scope's id and its name, and its model, which is in the query."""

from typing import Any

from litestar import Controller, delete, get, put
from litestar.di import NamedDependency
from litestar.params import FromPath

from gateway.limit_notation import rule_of
from gateway.web.admin.auth import CHANGE, READ
from gateway.web.admin.http import AdminHttp, AdminRequest
from gateway.web.admin.schema import LimitsQuery, ModelQuery, NewLimit
from gateway.web.admin.wire import limit_to_wire, page_to_wire
from gateway.web.decoding import BodyDecoder

_new = BodyDecoder(NewLimit)


class LimitsController(Controller):
    """At most one of a name for a scope and model; changing its amounts keeps what was used."""

    path = "/limits"
    tags = ("Limits",)

    @get(operation_id="listLimits", opt=READ)
    async def list_page(self, request: AdminRequest, admin: NamedDependency[AdminHttp]) -> dict[str, Any]:
        """A page of all, of one kind of scope or of one scope; raises `NotFound` if there is no such scope."""
        query = admin.query(request, LimitsQuery)
        page = await admin.limits.page(query.page, scope=query.scope, scope_id=query.scope_id)
        return page_to_wire(page, limit_to_wire)

    @put(operation_id="setLimit", opt=CHANGE)
    async def set(self, request: AdminRequest, admin: NamedDependency[AdminHttp]) -> dict[str, Any]:
        """In place of the one of its name; raises `NotFound` for the scope, `InvalidRequest` for rule or model."""
        wanted = await admin.body(request, _new)
        limit = await admin.limits.set(
            admin.actor(request),
            scope_id=wanted.scope_id,
            model=wanted.model,
            rule=rule_of(wanted.rule),
            is_shadow=wanted.shadow,
        )
        return limit_to_wire(limit)

    @get("/{scope_id:str}/{name:path}", operation_id="getLimit", opt=READ)
    async def retrieve(
        self,
        request: AdminRequest,
        admin: NamedDependency[AdminHttp],
        scope_id: FromPath[str],
        name: FromPath[str],
    ) -> dict[str, Any]:
        """The limit, for all models or the one in the query; raises `NotFound`."""
        query = admin.query(request, ModelQuery)
        return limit_to_wire(await admin.limits.get(scope_id=scope_id, name=name.strip("/"), model=query.model))

    @delete("/{scope_id:str}/{name:path}", operation_id="removeLimit", opt=CHANGE)
    async def remove(
        self,
        request: AdminRequest,
        admin: NamedDependency[AdminHttp],
        scope_id: FromPath[str],
        name: FromPath[str],
    ) -> None:
        """For all models or the one in the query; what was used of it is kept. Raises `NotFound`."""
        query = await admin.query_alone(request, ModelQuery)
        await admin.limits.remove(admin.actor(request), scope_id=scope_id, name=name.strip("/"), model=query.model)
