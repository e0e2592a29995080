"""Whom something is set for: an organization, a team or a key, told apart by their ids alone."""

from __future__ import annotations

import msgspec

from gateway.domain.limits.policy import Scope
from gateway.domain.tenancy import ApiKey, Organization, Team
from gateway.errors import NotFound
from gateway.services.admin_keys import require_key
from gateway.services.stores import Work
from gateway.services.tenants import require_organization, require_team


class Scoped(msgspec.Struct, frozen=True, kw_only=True):
    """One of them, with those it belongs to."""

    organization: Organization
    team: Team | None = None
    key: ApiKey | None = None

    @property
    def scope(self) -> Scope:
        if self.key is not None:
            return "key"
        return "organization" if self.team is None else "team"

    @property
    def chain(self) -> tuple[str, ...]:
        """Their ids, from the organization down."""
        return tuple(each.id for each in (self.organization, self.team, self.key) if each is not None)


async def require_scope(work: Work, scope_id: str) -> Scoped:
    """The one with this id, also a disabled or revoked one. Raises `NotFound`."""
    kind = scope_id.partition("_")[0]
    if kind == "org":
        return Scoped(organization=await require_organization(work, scope_id))
    if kind == "team":
        return await _of_team(work, await require_team(work, scope_id))
    if kind == "key":
        key = await require_key(work, scope_id)
        return msgspec.structs.replace(await _of_team(work, await require_team(work, key.team_id)), key=key)
    raise NotFound("There is no organization, team or key with this id.")


async def _of_team(work: Work, team: Team) -> Scoped:
    return Scoped(organization=await require_organization(work, team.organization_id), team=team)
