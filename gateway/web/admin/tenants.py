"""/admin/api/organizations and /admin/api/teams."""

from typing import Any

from litestar import Controller, get, patch, post
from litestar.di import NamedDependency
from litestar.params import FromPath

from gateway.web.admin.auth import CHANGE, READ
from gateway.web.admin.http import AdminHttp, AdminRequest
from gateway.web.admin.schema import (
    ChangedOrganization,
    ChangedTenant,
    NewOrganization,
    NewTeam,
    NoQuery,
    PageQuery,
    TeamsQuery,
)
from gateway.web.admin.wire import page_to_wire, to_wire
from gateway.web.decoding import BodyDecoder

_new_organization = BodyDecoder(NewOrganization)
_new_team = BodyDecoder(NewTeam)
_changed_organization = BodyDecoder(ChangedOrganization)
_changed_team = BodyDecoder(ChangedTenant)


class OrganizationsController(Controller):
    """Organizations are disabled, never removed: the ledger names them."""

    path = "/organizations"
    tags = ("Organizations",)

    @get(operation_id="listOrganizations", opt=READ)
    async def list_page(self, request: AdminRequest, admin: NamedDependency[AdminHttp]) -> dict[str, Any]:
        """A page of all, the oldest first; raises `InvalidRequest` for a bad cursor."""
        query = admin.query(request, PageQuery)
        return page_to_wire(await admin.tenants.organizations(query.page))

    @post(operation_id="createOrganization", opt=CHANGE)
    async def create(self, request: AdminRequest, admin: NamedDependency[AdminHttp]) -> dict[str, Any]:
        """An organization without teams; raises `Conflict` if the name is taken."""
        wanted = await admin.body(request, _new_organization)
        made = await admin.tenants.create_organization(
            admin.actor(request), name=wanted.name, weight=wanted.weight, time_zone=wanted.time_zone
        )
        return to_wire(made)

    @get("/{organization_id:str}", operation_id="getOrganization", opt=READ)
    async def retrieve(
        self, request: AdminRequest, admin: NamedDependency[AdminHttp], organization_id: FromPath[str]
    ) -> dict[str, Any]:
        """The organization, also a disabled one; raises `NotFound`."""
        admin.query(request, NoQuery)
        return to_wire(await admin.tenants.organization(organization_id))

    @patch("/{organization_id:str}", operation_id="changeOrganization", opt=CHANGE)
    async def change(
        self, request: AdminRequest, admin: NamedDependency[AdminHttp], organization_id: FromPath[str]
    ) -> dict[str, Any]:
        """Another name, weight or time zone, disabled or not; raises `NotFound`, or `Conflict` for a taken name."""
        wanted = await admin.body(request, _changed_organization)
        return to_wire(await admin.tenants.change_organization(admin.actor(request), organization_id, wanted.change()))


class TeamsController(Controller):
    """A team belongs to one organization, for good; it is disabled, never removed."""

    path = "/teams"
    tags = ("Teams",)

    @get(operation_id="listTeams", opt=READ)
    async def list_page(self, request: AdminRequest, admin: NamedDependency[AdminHttp]) -> dict[str, Any]:
        """A page of all, the oldest first, or of one organization's; raises `NotFound` if there is no such one."""
        query = admin.query(request, TeamsQuery)
        return page_to_wire(await admin.tenants.teams(query.page, organization_id=query.organization_id))

    @post(operation_id="createTeam", opt=CHANGE)
    async def create(self, request: AdminRequest, admin: NamedDependency[AdminHttp]) -> dict[str, Any]:
        """A team without keys; raises `NotFound` for the organization, `Conflict` for its state or a taken name."""
        wanted = await admin.body(request, _new_team)
        made = await admin.tenants.create_team(
            admin.actor(request), organization_id=wanted.organization_id, name=wanted.name, weight=wanted.weight
        )
        return to_wire(made)

    @get("/{team_id:str}", operation_id="getTeam", opt=READ)
    async def retrieve(
        self, request: AdminRequest, admin: NamedDependency[AdminHttp], team_id: FromPath[str]
    ) -> dict[str, Any]:
        """The team, also a disabled one; raises `NotFound`."""
        admin.query(request, NoQuery)
        return to_wire(await admin.tenants.team(team_id))

    @patch("/{team_id:str}", operation_id="changeTeam", opt=CHANGE)
    async def change(
        self, request: AdminRequest, admin: NamedDependency[AdminHttp], team_id: FromPath[str]
    ) -> dict[str, Any]:
        """Another name or weight, disabled or not; raises `NotFound`, or `Conflict` if the name is taken."""
        wanted = await admin.body(request, _changed_team)
        return to_wire(await admin.tenants.change_team(admin.actor(request), team_id, wanted.change()))
