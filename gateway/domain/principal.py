"""Who sends a request, and which fairness nodes it is charged to."""

from __future__ import annotations

from typing import Literal

import msgspec

RequestClass = Literal["interactive", "standard", "batch"]


class FairNode(msgspec.Struct, frozen=True):
    """A node of the fairness tree; its id is unique in the whole tree."""

    id: str
    weight: int


class Principal(msgspec.Struct, frozen=True, kw_only=True):
    """The identity behind a key. Fairness identity comes from here alone, never from the request.

    Attributes:
        organization_weight: share of the organization among organizations; `team_weight` among its teams.
        default_class: the latency class of requests that name none.
    """

    organization: str
    team: str
    key_id: str
    organization_weight: int = 1
    team_weight: int = 1
    default_class: RequestClass = "interactive"

    def path(self, request_class: RequestClass) -> tuple[FairNode, ...]:
        """From the organization down to the key."""
        team = f"{self.organization}/{self.team}"
        return (
            FairNode(f"org:{self.organization}", self.organization_weight),
            FairNode(f"team:{team}", self.team_weight),
            FairNode(f"class:{team}/{request_class}", 1),
            FairNode(f"key:{self.key_id}", 1),
        )

    @property
    def cache_salt(self) -> str:
        """Prompts share cached KV within a team only: hits and their timing would tell one team what another asked."""
        return f"team:{self.organization}/{self.team}"
