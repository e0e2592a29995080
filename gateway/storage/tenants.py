"""Organizations and teams."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from sqlalchemy import Select, insert, select, update

from gateway.domain.ids import OrganizationId, TeamId
from gateway.domain.tenancy import Organization, RollEntry, Team
from gateway.storage.tables import organizations, teams
from gateway.storage.transaction import Row, Transaction

_ROLL = select(
    teams.c.id.label("team_id"),
    teams.c.name.label("team"),
    teams.c.weight.label("team_weight"),
    organizations.c.id.label("organization_id"),
    organizations.c.name.label("organization"),
    organizations.c.weight.label("organization_weight"),
).join(organizations, organizations.c.id == teams.c.organization_id)


class SqlOrganizations:
    """See `services.stores.OrganizationStore`."""

    def __init__(self, transaction: Transaction) -> None:
        self._transaction = transaction

    async def add(self, organization: Organization) -> None:
        statement = insert(organizations).values(msgspec.structs.asdict(organization))
        await self._transaction.run_unique(statement, _taken(organization))

    async def get(self, organization_id: OrganizationId) -> Organization | None:
        return await self._one(select(organizations).where(organizations.c.id == organization_id))

    async def by_name(self, name: str) -> Organization | None:
        return await self._one(select(organizations).where(organizations.c.name == name))

    async def replace(self, organization: Organization) -> None:
        statement = (
            update(organizations)
            .where(organizations.c.id == organization.id)
            .values(msgspec.structs.asdict(organization))
        )
        num_rows = await self._transaction.run_unique(statement, _taken(organization))
        assert num_rows == 1, "what is replaced was read before, and nothing is ever deleted"

    async def page(self, *, after: str, limit: int) -> Sequence[Organization]:
        statement = select(organizations).where(organizations.c.id > after).order_by(organizations.c.id).limit(limit)
        return [organization_of(row) for row in await self._transaction.rows(statement)]

    async def _one(self, statement: Select[tuple[object, ...]]) -> Organization | None:
        row = await self._transaction.row(self._transaction.locking(statement))
        return None if row is None else organization_of(row)


class SqlTeams:
    """See `services.stores.TeamStore`."""

    def __init__(self, transaction: Transaction) -> None:
        self._transaction = transaction

    async def add(self, team: Team) -> None:
        await self._transaction.run_unique(insert(teams).values(msgspec.structs.asdict(team)), _taken(team))

    async def get(self, team_id: TeamId) -> Team | None:
        return await self._one(select(teams).where(teams.c.id == team_id))

    async def by_name(self, organization_id: OrganizationId, name: str) -> Team | None:
        return await self._one(select(teams).where(teams.c.organization_id == organization_id, teams.c.name == name))

    async def replace(self, team: Team) -> None:
        statement = update(teams).where(teams.c.id == team.id).values(msgspec.structs.asdict(team))
        num_rows = await self._transaction.run_unique(statement, _taken(team))
        assert num_rows == 1, "what is replaced was read before, and nothing is ever deleted"

    async def page(self, *, after: str, limit: int, organization_id: OrganizationId | None = None) -> Sequence[Team]:
        statement = select(teams).where(teams.c.id > after).order_by(teams.c.id).limit(limit)
        if organization_id is not None:
            statement = statement.where(teams.c.organization_id == organization_id)
        return [team_of(row) for row in await self._transaction.rows(statement)]

    async def roll(self) -> Sequence[RollEntry]:
        # Streamed, so that thousands of rows do not hold up the event loop in one piece.
        return [RollEntry(**row) async for row in self._transaction.stream(_ROLL)]

    async def _one(self, statement: Select[tuple[object, ...]]) -> Team | None:
        row = await self._transaction.row(self._transaction.locking(statement))
        return None if row is None else team_of(row)


def organization_of(row: Row) -> Organization:
    return Organization(**row)


def team_of(row: Row) -> Team:
    return Team(**row)


def _taken(value: Organization | Team) -> str:
    kind = "an organization" if isinstance(value, Organization) else "a team"
    return f"There is {kind} named '{value.name}' already."
