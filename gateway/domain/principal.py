"""Who sends a request, and which fairness nodes it is charged to."""

from __future__ import annotations

from typing import Literal

import msgspec

from gateway.domain.ids import KeyId, OrganizationId, TeamId
from gateway.domain.limits.periods import DEFAULT_ZONE
from gateway.domain.limits.policy import Limit, TopUp

RequestClass = Literal["interactive", "standard", "batch"]

CLASSES: tuple[RequestClass, ...] = ("interactive", "standard", "batch")
"""From the highest to the lowest."""


def lowest(*classes: RequestClass | None) -> RequestClass:
    """The lowest of those that are given; a request may lower its class, never raise it."""
    found = CLASSES[0]
    for each in classes:
        if each is not None and each != found and CLASSES.index(each) > CLASSES.index(found):
            found = each
    return found


TeamNames = tuple[str, str]
"""Of an organization and its team, for people."""


def organization_node(organization_id: OrganizationId) -> str:
    return f"org:{organization_id}"


def team_node(team_id: TeamId) -> str:
    return f"team:{team_id}"


NUM_TENANT_LEVELS = 2
"""Nodes of a path whose weights administrators set: organization and team. They come first."""


class FairNode(msgspec.Struct, frozen=True):
    """A node of the fairness tree; its id is unique in the whole tree."""

    id: str
    weight: int


class Principal(msgspec.Struct, frozen=True, kw_only=True):
    """The identity behind a key. What it gets comes from here alone; a request only says which session it belongs to.

    Attributes:
        organization, team: names, for people; they can change. Everything else goes by the ids.
        organization_weight: share of the organization among organizations; `team_weight` among its teams.
        default_class: the latency class of requests that name none, and the highest they may ask for.
        models: the names that may be used; None is all. `endpoints` likewise.
        max_queue_depth: most requests of the key that wait for their first token; None is no bound.
        deadline_ms: of requests that set none.
        limits, top_ups: of the organization, the team and the key; `time_zone` is that of the quotas' periods.
        public_id: of the key, to look it up again.
    """

    organization_id: OrganizationId
    team_id: TeamId
    key_id: KeyId
    organization: str
    team: str
    organization_weight: int = 1
    team_weight: int = 1
    default_class: RequestClass = "interactive"
    models: frozenset[str] | None = None
    endpoints: frozenset[str] | None = None
    max_queue_depth: int | None = None
    deadline_ms: int | None = None
    limits: tuple[Limit, ...] = ()
    top_ups: tuple[TopUp, ...] = ()
    time_zone: str = DEFAULT_ZONE
    public_id: str = ""

    def may_use(self, model: str) -> bool:
        """Whether the key's scope has a model's or alias's name."""
        return self.models is None or model in self.models

    @property
    def path(self) -> tuple[FairNode, ...]:
        """From the organization down to the key. The engine puts the request's class between team and key."""
        return (
            FairNode(organization_node(self.organization_id), self.organization_weight),
            FairNode(team_node(self.team_id), self.team_weight),
            FairNode(f"key:{self.key_id}", 1),
        )

    @property
    def cache_salt(self) -> str:
        """Prompts share cached KV within a team only: hits and their timing would tell one team what another asked."""
        return f"team:{self.team_id}"
