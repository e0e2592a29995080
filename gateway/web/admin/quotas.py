"""/admin/api/quotas: how far quotas are used up, and what they are topped up by. They are set like other limits."""

from typing import Any

from litestar import Controller, get, post
from litestar.di import NamedDependency
from litestar.params import FromPath

from gateway.services.admin_pages import Page
from gateway.web.admin.auth import CHANGE, READ
from gateway.web.admin.http import AdminHttp, AdminRequest
from gateway.web.admin.schema import NewTopUp, NoQuery, PageQuery
from gateway.web.admin.wire import page_to_wire, quota_to_wire, to_wire
from gateway.web.decoding import BodyDecoder

_new = BodyDecoder(NewTopUp)


class QuotasController(Controller):
    """Of an organization, a team or a key, by its id."""

    path = "/quotas"
    tags = ("Quotas",)

    @get("/{scope_id:str}", operation_id="listQuotas", opt=READ)
    async def status(
        self, request: AdminRequest, admin: NamedDependency[AdminHttp], scope_id: FromPath[str]
    ) -> dict[str, Any]:
        """All that its requests count for, in one page; raises `NotFound`."""
        admin.query(request, NoQuery)
        return page_to_wire(Page(await admin.quotas.status(scope_id), None), quota_to_wire)

    @get("/{scope_id:str}/top-ups", operation_id="listTopUps", opt=READ)
    async def top_ups(
        self, request: AdminRequest, admin: NamedDependency[AdminHttp], scope_id: FromPath[str]
    ) -> dict[str, Any]:
        """A page of all that there ever were, the oldest first; raises `NotFound`."""
        query = admin.query(request, PageQuery)
        return page_to_wire(await admin.quotas.top_ups(query.page, scope_id))

    @post("/{scope_id:str}/top-ups", operation_id="topUp", opt=CHANGE)
    async def top_up(
        self, request: AdminRequest, admin: NamedDependency[AdminHttp], scope_id: FromPath[str]
    ) -> dict[str, Any]:
        """More of a quota for one period; raises `NotFound`, or `InvalidRequest` for a period that is over."""
        wanted = await admin.body(request, _new)
        made = await admin.quotas.top_up(
            admin.actor(request),
            scope_id=scope_id,
            model=wanted.model,
            name=wanted.name,
            period_id=wanted.period_id,
            amount=wanted.amount,
            reason=wanted.reason,
        )
        return to_wire(made)
