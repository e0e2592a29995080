"""Whom a limit is for, as the command line says it: ``--org``, ``--org`` with ``--team``, or ``--key``."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, NamedTuple

import typer

from gateway.commands.tables import everything
from gateway.services.administration import Administration

OfOrganization = Annotated[str | None, typer.Option("--org", help="Name of the organization.")]
OfTeam = Annotated[str | None, typer.Option("--team", help="Name of its team.")]
OfKey = Annotated[
    str | None, typer.Option("--key", metavar="ID", help="Instead of both: a key's id or public id, or the key itself.")
]


class Names(NamedTuple):
    """For people; None where there is none."""

    organization: str
    team: str | None = None
    key: str | None = None


class Whose(NamedTuple):
    """What the options said. Raises `typer.BadParameter` where one cannot be meant."""

    org: str | None
    team: str | None
    key: str | None

    @property
    def is_all(self) -> bool:
        """Whether nobody was named."""
        self._check()
        return self.org is None and self.key is None

    def check_one(self) -> None:
        """Somebody must be named."""
        if self.is_all:
            raise typer.BadParameter("say whose: --org NAME, --org NAME --team NAME, or --key ID")

    def _check(self) -> None:
        if self.team is not None and self.org is None:
            raise typer.BadParameter("--team needs --org")
        if self.key is not None and self.org is not None:
            raise typer.BadParameter("--key stands alone: a key's team and organization are known")

    async def id(self, admin: Administration) -> str:
        """Raises `NotFound`."""
        if self.key is not None:
            return (await admin.keys.find(self.key)).id
        assert self.org is not None, "checked before"
        organization = await admin.tenants.organization_named(self.org)
        return organization.id if self.team is None else (await admin.tenants.team_named(organization, self.team)).id


async def names_of(admin: Administration, scope_ids: Iterable[str]) -> dict[str, dict[str, str | None]]:
    """Columns `organization`, `team` and `key` for each of the ids."""
    organizations = {each.id: each.name for each in await everything(admin.tenants.organizations)}
    teams = {each.id: each for each in await everything(admin.tenants.teams)}
    names: dict[str, Names] = {id_: Names(name) for id_, name in organizations.items()}
    names |= {id_: Names(organizations[team.organization_id], team.name) for id_, team in teams.items()}
    found = {}
    for scope_id in scope_ids:
        if scope_id not in names:
            key = await admin.keys.get(scope_id)
            names[scope_id] = names[key.team_id]._replace(key=key.name)
        found[scope_id] = names[scope_id]._asdict()
    return found
