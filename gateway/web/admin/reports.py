"""/admin/api/audit, /admin/api/ledger and /admin/api/usage: to look at only."""

from typing import Any

from litestar import Controller, get
from litestar.di import NamedDependency

from gateway.web.admin.auth import READ
from gateway.web.admin.http import AdminHttp, AdminRequest
from gateway.web.admin.schema import OfTeamQuery, PageQuery, UsageQuery
from gateway.web.admin.wire import audit_to_wire, ledger_to_wire, page_to_wire, usage_to_wire


class ReportsController(Controller):
    """What happened."""

    tags = ("Reports",)

    @get("/audit", operation_id="listAudit", opt=READ)
    async def audit(self, request: AdminRequest, admin: NamedDependency[AdminHttp]) -> dict[str, Any]:
        """Changes by administrators, the oldest first."""
        return page_to_wire(await admin.reports.audit(admin.query(request, PageQuery).page), audit_to_wire)

    @get("/ledger", operation_id="listLedger", opt=READ)
    async def ledger(self, request: AdminRequest, admin: NamedDependency[AdminHttp]) -> dict[str, Any]:
        """Settled requests, of all or of one team, the newest first."""
        query = admin.query(request, OfTeamQuery)
        return page_to_wire(await admin.reports.ledger(query.page, team_id=query.team_id), ledger_to_wire)

    @get("/usage", operation_id="listUsage", opt=READ)
    async def usage(self, request: AdminRequest, admin: NamedDependency[AdminHttp]) -> dict[str, Any]:
        """Sums by hour, key and model, of all or of one team; of the last 24 hours if nothing is said."""
        query = admin.query(request, UsageQuery)
        from_ms, until_ms = query.range_ms(admin.now_ms())
        page = await admin.reports.usage(query.page, from_ms=from_ms, until_ms=until_ms, team_id=query.team_id)
        return page_to_wire(page, usage_to_wire)
