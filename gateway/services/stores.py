"""What the use cases need to keep, as protocols. `gateway.storage` implements them over SQLAlchemy.

Reads and writes go through a `Work`, one transaction: all of it happens or nothing does. Every method may raise
`StorageDown`. Stores hold no rules: what a name may look like, or who may do what, is decided by the services.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Protocol

from gateway.domain.audit import AuditDraft, AuditEntry
from gateway.domain.catalog import Alias, Model
from gateway.domain.ids import AdminTokenId, KeyId, OrganizationId, TeamId
from gateway.domain.ledger import HourlyUsage, LedgerRow, UsageTotals
from gateway.domain.limits.policy import Limit, Price, Scope, TopUp
from gateway.domain.tenancy import AdminToken, ApiKey, KeyHolder, Organization, RollEntry, Team


class OrganizationStore(Protocol):
    async def add(self, organization: Organization) -> None:
        """Raises `Conflict` if the name is taken."""

    async def get(self, organization_id: OrganizationId) -> Organization | None: ...

    async def by_name(self, name: str) -> Organization | None: ...

    async def replace(self, organization: Organization) -> None:
        """Write a new value of the one with this id. Raises `Conflict` if the name is taken."""

    async def page(self, *, after: str, limit: int) -> Sequence[Organization]:
        """In order of id, those behind `after` (empty: from the first)."""


class TeamStore(Protocol):
    async def add(self, team: Team) -> None:
        """Raises `Conflict` if the organization has a team of that name."""

    async def get(self, team_id: TeamId) -> Team | None: ...

    async def by_name(self, organization_id: OrganizationId, name: str) -> Team | None: ...

    async def replace(self, team: Team) -> None:
        """Raises `Conflict` if the organization has a team of that name."""

    async def page(self, *, after: str, limit: int, organization_id: OrganizationId | None = None) -> Sequence[Team]:
        """As `OrganizationStore.page`; of one organization if it is given."""

    async def roll(self) -> Sequence[RollEntry]:
        """All teams, in any order."""


class ApiKeyStore(Protocol):
    async def add(self, key: ApiKey) -> None: ...

    async def get(self, key_id: KeyId) -> ApiKey | None: ...

    async def holder(self, public_id: str) -> KeyHolder | None:
        """The key with this public id, whatever its state, with its team and organization."""

    async def replace(self, key: ApiKey) -> None: ...

    async def page(self, *, after: str, limit: int, team_id: TeamId | None = None) -> Sequence[ApiKey]: ...


class AdminTokenStore(Protocol):
    async def add(self, token: AdminToken) -> None: ...

    async def get(self, token_id: AdminTokenId) -> AdminToken | None: ...

    async def by_public_id(self, public_id: str) -> AdminToken | None: ...

    async def replace(self, token: AdminToken) -> None: ...

    async def page(self, *, after: str, limit: int) -> Sequence[AdminToken]: ...


class CatalogStore(Protocol):
    """Models and aliases; both are few."""

    async def models(self) -> Sequence[Model]:
        """All, in order of name; `aliases` likewise."""

    async def enter_model(self, model: Model) -> bool:
        """Add it unless its name is there already; whether it was added."""

    async def replace_model(self, model: Model) -> None: ...

    async def aliases(self) -> Sequence[Alias]: ...

    async def add_alias(self, alias: Alias) -> None:
        """Raises `Conflict` if there is an alias of that name."""

    async def replace_alias(self, alias: Alias) -> None: ...

    async def remove_alias(self, name: str) -> None: ...

    async def prices(self) -> Sequence[Price]:
        """All, in order of model and time."""

    async def add_price(self, price: Price) -> None:
        """Raises `Conflict` if the model has another price from that very moment on."""


class LimitPolicyStore(Protocol):
    """What administrators have set (`domain.limits.policy`)."""

    async def set(self, limit: Limit) -> None:
        """Put it in place of the one with its scope, model and name, if there is one."""

    async def remove(self, scope_id: str, model: str | None, name: str) -> bool:
        """Whether there was one."""

    async def get(self, scope_id: str, model: str | None, name: str) -> Limit | None: ...

    async def of(self, scope_ids: Sequence[str]) -> Sequence[Limit]:
        """All limits of these scopes: in the order of the scopes given, then by name, then by model."""

    async def page(self, *, after: tuple[str, str, str], limit: int, scope: Scope | None = None) -> Sequence[Limit]:
        """In order of scope_id, name, and model (empty for all models), those behind `after`."""

    async def add_top_up(self, top_up: TopUp) -> None: ...

    async def top_ups(self, scope_ids: Sequence[str], *, since_ms: int) -> Sequence[TopUp]:
        """Of these scopes, created since then; in order of id."""

    async def alert(self, key: str, percent: int, *, organization_id: OrganizationId, at_ms: int) -> bool:
        """Keep that a quota (by its meter's key) has reached a percentage; whether that was new."""

    async def alerts_of(self, keys: Sequence[str]) -> Mapping[str, Sequence[tuple[int, int]]]:
        """Of each of these quotas that has reached one: percent and at_ms, in any order."""

    async def alerts(self, organization_id: OrganizationId, *, limit: int) -> Sequence[tuple[str, int, int]]:
        """The newest first: key, percent, at_ms."""


class AuditStore(Protocol):
    async def append(self, draft: AuditDraft) -> AuditEntry:
        """Put it behind the last entry. Writers take turns, so the chain has no forks."""

    async def page(self, *, after: int, limit: int) -> Sequence[AuditEntry]:
        """In order of sequence, those behind `after`."""


class LedgerStore(Protocol):
    async def post(self, rows: Sequence[LedgerRow]) -> int:
        """Write rows, leaving out those whose request_id is there already; how many were new."""

    async def present(self, request_ids: Sequence[str]) -> set[str]:
        """Which of these requests have a row."""

    async def rows(self, request_ids: Sequence[str]) -> Sequence[LedgerRow]:
        """Those of these requests that have one, in any order."""

    async def committed(self, organization_id: OrganizationId, *, since_ms: int) -> Mapping[str, int]:
        """Of each quota key of the organization whose period ends at `since_ms` or later: the sum of the charges of
        all rows that are there (those not rolled up yet included)."""

    async def committed_of(self, keys: Sequence[str]) -> Mapping[str, int]:
        """The same of these quota keys; those that no row was charged for are left out."""

    async def roll_up(self, limit: int) -> int:
        """Add up to `limit` rows that are not in the hourly sums yet to them; how many it were.

        One writer at a time over all processes: returns 0 at once if another one is at it.
        """

    async def page(self, *, after: str, limit: int, team_id: TeamId | None = None) -> Sequence[LedgerRow]:
        """The newest first, by `closed_at_ms`, then request_id: those behind the row with the request_id `after`
        (empty: from the newest; of an unknown one: none)."""

    async def hourly(
        self, *, from_ms: int, until_ms: int, team_id: TeamId | None = None, limit: int
    ) -> Sequence[HourlyUsage]:
        """Hours that begin in ``[from_ms, until_ms)``, rows not yet rolled up included; in order of hour, then key."""

    def mismatches(self) -> AsyncIterator[str]:
        """What does not add up, a sentence each: rolled-up sums against their rows, rows that cannot be."""

    async def totals(self) -> UsageTotals:
        """Over all rows."""


class Work(Protocol):
    """One transaction."""

    @property
    def organizations(self) -> OrganizationStore: ...

    @property
    def teams(self) -> TeamStore: ...

    @property
    def keys(self) -> ApiKeyStore: ...

    @property
    def admin_tokens(self) -> AdminTokenStore: ...

    @property
    def catalog(self) -> CatalogStore: ...

    @property
    def limits(self) -> LimitPolicyStore: ...

    @property
    def audit(self) -> AuditStore: ...

    @property
    def ledger(self) -> LedgerStore: ...

    async def version(self) -> int:
        """Counts the changes of organizations, teams, keys, models, aliases, limits and prices. Who read something at a
        version, and sees the same version again, need not read it again."""

    async def count_change(self) -> int:
        """Make the version one higher, when this transaction commits; the new one."""


class Storage(Protocol):
    """Where everything is kept."""

    def reading(self) -> AbstractAsyncContextManager[Work]:
        """A consistent view; leaves nothing behind."""

    def writing(self) -> AbstractAsyncContextManager[Work]:
        """Commits when the block ends well, else rolls back. In SQLite writers take turns from the start of the block;
        a block must therefore not wait for anything but the database."""


class ChangeFeed(Protocol):
    """Tells other gateway processes at once that the version has gone up. Losing a message costs time, nothing else."""

    async def announce(self) -> None:
        """Never raises: whoever does not hear it finds out by asking."""

    def heard(self) -> AsyncIterator[None]:
        """One item for every announcement by anybody; never ends, and goes on after a lost connection."""
