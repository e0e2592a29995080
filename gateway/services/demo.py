"""What a hub that has nobody yet gets at its first start, so that a newcomer has two keys to try it with."""

from __future__ import annotations

import msgspec

from gateway.domain.credential import Peppers
from gateway.services.admin_changes import Changes
from gateway.services.admin_keys import KeyTerms, add_key
from gateway.services.audit import SYSTEM, Actor
from gateway.services.ports import Clock
from gateway.services.stores import ChangeFeed, Storage
from gateway.services.tenants import add_organization, add_team

ORGANIZATION = "demo"
TEAM_WEIGHTS = {"alpha": 3, "beta": 1}
KEY_NAME = "first key"


class FirstKey(msgspec.Struct, frozen=True):
    """A key that nobody can be shown again."""

    team: str
    raw: str

    def __repr__(self) -> str:
        return f"FirstKey({self.team})"


async def first_start(
    storage: Storage, feed: ChangeFeed | None, peppers: Peppers, clock: Clock
) -> tuple[FirstKey, ...] | None:
    """Make the organization `demo` with its teams and a key for each, if there is no organization at all.

    Of several processes at once one makes them.

    Returns:
        The keys in the order of the teams; None if there was an organization already.
    """
    async with Changes(storage, feed, clock).begin(Actor(SYSTEM)) as change:
        if await change.work.organizations.page(after="", limit=1):
            return None
        organization = await add_organization(change, name=ORGANIZATION, weight=1)
        keys = []
        for name, weight in TEAM_WEIGHTS.items():
            change.now_ms += 1  # ids of one millisecond are in no order, and lists are in order of id
            team = await add_team(change, organization, name=name, weight=weight)
            issued = await add_key(change, peppers, organization, team, KeyTerms(name=KEY_NAME))
            keys.append(FirstKey(name, issued.raw))
    return tuple(keys)
