"""Organizations, their teams, the teams' keys, and the tokens of administrators.

All values are frozen: a change is a new value. Nothing is ever deleted, since the ledger and the audit name it; it is
disabled or revoked, and the time of that is kept. Knows nothing of where it is stored, or of raw secrets.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from gateway.domain.ids import AdminTokenId, KeyId, OrganizationId, TeamId
from gateway.domain.limits.periods import DEFAULT_ZONE
from gateway.domain.limits.policy import Limit, TopUp
from gateway.domain.principal import RequestClass
from gateway.domain.request import Endpoint

Role = Literal["admin", "viewer"]
"""``admin`` reads and changes everything, ``viewer`` reads everything and changes nothing."""


class Organization(msgspec.Struct, frozen=True, kw_only=True):
    """A customer of the hub. `weight` is its share among organizations; the name is unique.

    Attributes:
        time_zone: that the days, weeks and months of its quotas go by.
    """

    id: OrganizationId
    name: str
    weight: int = 1
    time_zone: str = DEFAULT_ZONE
    created_at_ms: int
    disabled_at_ms: int | None = None


class Team(msgspec.Struct, frozen=True, kw_only=True):
    """A part of an organization. `weight` is its share among the organization's teams; the name is unique there."""

    id: TeamId
    organization_id: OrganizationId
    name: str
    weight: int = 1
    created_at_ms: int
    disabled_at_ms: int | None = None


class RollEntry(msgspec.Struct, frozen=True):
    """What is to be known of every team at all times: its name and weight, and its organization's."""

    team_id: TeamId
    team: str
    team_weight: int
    organization_id: OrganizationId
    organization: str
    organization_weight: int


class Secret(msgspec.Struct, frozen=True):
    """What is kept of a raw secret.

    Attributes:
        public_id: the part that may be shown; unique.
        digest: HMAC-SHA-256 of the whole raw secret under the pepper with `pepper_id`.
    """

    public_id: str
    digest: bytes
    pepper_id: str


class ApiKey(msgspec.Struct, frozen=True, kw_only=True):
    """A key of a team.

    Attributes:
        default_class: of requests that name none, and the highest they may ask for.
        models: names it may use, as ``/v1/models`` lists them (aliases included); None is all.
        endpoints: what it may call; None is all.
        max_queue_depth: most requests of it that wait for their first token at a time in one gateway process; None is
            no bound.
        deadline_ms: of requests that set none; None is no deadline.
        networks: addresses it may be used from, in CIDR notation; None is from everywhere.
    """

    id: KeyId
    team_id: TeamId
    name: str
    secret: Secret
    default_class: RequestClass = "interactive"
    models: tuple[str, ...] | None = None
    endpoints: tuple[Endpoint, ...] | None = None
    max_queue_depth: int | None = None
    deadline_ms: int | None = None
    networks: tuple[str, ...] | None = None
    created_at_ms: int
    expires_at_ms: int | None = None
    revoked_at_ms: int | None = None


class KeyHolder(msgspec.Struct, frozen=True):
    """A key with those it belongs to, and what they may use.

    Attributes:
        limits: of the organization, the team and the key, in this order.
        top_ups: of their quotas, those of past periods left out.
    """

    key: ApiKey
    team: Team
    organization: Organization
    limits: tuple[Limit, ...] = ()
    top_ups: tuple[TopUp, ...] = ()


class AdminToken(msgspec.Struct, frozen=True, kw_only=True):
    """What an administrator, or a program of theirs, shows to ``/admin/api``."""

    id: AdminTokenId
    name: str
    role: Role
    secret: Secret
    created_at_ms: int
    expires_at_ms: int | None = None
    revoked_at_ms: int | None = None
