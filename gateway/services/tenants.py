"""Organizations and their teams: make, change, disable, look up."""

from __future__ import annotations

from typing import TypeVar

import msgspec
from msgspec import UNSET, UnsetType

from gateway.domain.ids import OrganizationId, TeamId, new_organization_id, new_team_id
from gateway.domain.limits.periods import DEFAULT_ZONE
from gateway.domain.tenancy import Organization, Team
from gateway.errors import Conflict, NotFound
from gateway.services.admin_changes import Change, Changes
from gateway.services.admin_pages import Page, PageRequest, fetch_page
from gateway.services.admin_rules import check_name, check_time_zone, check_weight, is_id
from gateway.services.audit import Actor
from gateway.services.stores import Storage, Work

Tenant = TypeVar("Tenant", Organization, Team)


class TenantChange(msgspec.Struct, frozen=True, kw_only=True):
    """What is to become different of an organization or a team, as far as both have it."""

    name: str | UnsetType = UNSET
    weight: int | UnsetType = UNSET
    is_disabled: bool | UnsetType = UNSET


class OrganizationChange(TenantChange, frozen=True, kw_only=True):
    """What is to become different of an organization."""

    time_zone: str | UnsetType = UNSET


class Tenants:
    """The use cases.

    Changes raise `InvalidRequest`, `NotFound`, or `Conflict` if the name is taken; one that changes nothing writes
    nothing. Look-ups raise `NotFound`.
    """

    def __init__(self, storage: Storage, changes: Changes) -> None:
        self._storage = storage
        self._changes = changes

    async def create_organization(
        self, actor: Actor, *, name: str, weight: int = 1, time_zone: str = DEFAULT_ZONE
    ) -> Organization:
        async with self._changes.begin(actor) as change:
            return await add_organization(change, name=name, weight=weight, time_zone=time_zone)

    async def change_organization(self, actor: Actor, organization_id: str, wanted: TenantChange) -> Organization:
        async with self._changes.begin(actor) as change:
            return await change_organization(change, await require_organization(change.work, organization_id), wanted)

    async def create_team(self, actor: Actor, *, organization_id: str, name: str, weight: int = 1) -> Team:
        """Raises `Conflict` for a disabled organization too."""
        async with self._changes.begin(actor) as change:
            organization = await require_organization(change.work, organization_id)
            return await add_team(change, organization, name=name, weight=weight)

    async def change_team(self, actor: Actor, team_id: str, wanted: TenantChange) -> Team:
        async with self._changes.begin(actor) as change:
            return await change_team(change, await require_team(change.work, team_id), wanted)

    async def organization(self, organization_id: str) -> Organization:
        async with self._storage.reading() as work:
            return await require_organization(work, organization_id)

    async def organization_named(self, name: str) -> Organization:
        async with self._storage.reading() as work:
            found = await work.organizations.by_name(check_name(name))
        if found is None:
            raise NotFound(f"There is no organization '{name}'.")
        return found

    async def organizations(self, page: PageRequest) -> Page[Organization]:
        after = page.after_id("org_")
        async with self._storage.reading() as work:
            return await fetch_page(
                page, lambda limit: work.organizations.page(after=after, limit=limit), lambda each: each.id
            )

    async def team(self, team_id: str) -> Team:
        async with self._storage.reading() as work:
            return await require_team(work, team_id)

    async def team_named(self, organization: Organization, name: str) -> Team:
        async with self._storage.reading() as work:
            found = await work.teams.by_name(organization.id, check_name(name))
        if found is None:
            raise NotFound(f"There is no team '{name}' in the organization '{organization.name}'.")
        return found

    async def teams(self, page: PageRequest, *, organization_id: str | None = None) -> Page[Team]:
        """All, or those of one organization, which must be there."""
        after = page.after_id("team_")
        async with self._storage.reading() as work:
            owner = None if organization_id is None else (await require_organization(work, organization_id)).id
            return await fetch_page(
                page,
                lambda limit: work.teams.page(after=after, limit=limit, organization_id=owner),
                lambda each: each.id,
            )


async def add_organization(change: Change, *, name: str, weight: int, time_zone: str = DEFAULT_ZONE) -> Organization:
    """Part of a larger change."""
    made = Organization(
        id=new_organization_id(change.now_ms),
        name=check_name(name),
        weight=check_weight(weight),
        time_zone=check_time_zone(time_zone),
        created_at_ms=change.now_ms,
    )
    await change.work.organizations.add(made)
    change.record("organization.create", made.id, after=made)
    return made


async def change_organization(change: Change, before: Organization, wanted: TenantChange) -> Organization:
    """Part of a larger change."""
    after = _changed(before, wanted, change.now_ms)
    if isinstance(wanted, OrganizationChange) and wanted.time_zone is not UNSET:
        after = msgspec.structs.replace(after, time_zone=check_time_zone(wanted.time_zone))
    if after != before:
        await change.work.organizations.replace(after)
        change.record(f"organization.{_verb(before, after)}", after.id, before=before, after=after)
    return after


async def add_team(change: Change, organization: Organization, *, name: str, weight: int) -> Team:
    """Part of a larger change. Raises `Conflict` if the organization is disabled."""
    if organization.disabled_at_ms is not None:
        raise Conflict("The organization is disabled; enable it first.", param="organization_id")
    made = Team(
        id=new_team_id(change.now_ms),
        organization_id=organization.id,
        name=check_name(name),
        weight=check_weight(weight),
        created_at_ms=change.now_ms,
    )
    await change.work.teams.add(made)
    change.record("team.create", made.id, after=made)
    return made


async def change_team(change: Change, before: Team, wanted: TenantChange) -> Team:
    """Part of a larger change."""
    after = _changed(before, wanted, change.now_ms)
    if after != before:
        await change.work.teams.replace(after)
        change.record(f"team.{_verb(before, after)}", after.id, before=before, after=after)
    return after


async def require_organization(work: Work, organization_id: str) -> Organization:
    """Raises `NotFound`."""
    if is_id(organization_id, "org_"):
        found = await work.organizations.get(OrganizationId(organization_id))
        if found is not None:
            return found
    raise NotFound("There is no organization with this id.")


async def require_team(work: Work, team_id: str) -> Team:
    """Raises `NotFound`."""
    if is_id(team_id, "team_"):
        found = await work.teams.get(TeamId(team_id))
        if found is not None:
            return found
    raise NotFound("There is no team with this id.")


def _changed(before: Tenant, wanted: TenantChange, now_ms: int) -> Tenant:
    after = before
    if wanted.name is not UNSET:
        after = msgspec.structs.replace(after, name=check_name(wanted.name))
    if wanted.weight is not UNSET:
        after = msgspec.structs.replace(after, weight=check_weight(wanted.weight))
    if wanted.is_disabled is not UNSET and wanted.is_disabled != (before.disabled_at_ms is not None):
        after = msgspec.structs.replace(after, disabled_at_ms=now_ms if wanted.is_disabled else None)
    return after


def _verb(before: Organization | Team, after: Organization | Team) -> str:
    """What an audit reader looks for first is who was cut off, and when."""
    if (before.disabled_at_ms is None) == (after.disabled_at_ms is None):
        return "change"
    return "enable" if after.disabled_at_ms is None else "disable"
