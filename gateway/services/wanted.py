"""What an installation is to be like, as a file says it, and what came of that. Values only.

Whatever is left out of a value stays as it is, or has its usual value in what is made. Limits are the exception: those
that are given are all that there are to be.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from gateway.domain.catalog import Alias, Model
from gateway.domain.limits.policy import Limit, Price, Rule
from gateway.domain.tenancy import ApiKey, Organization, Team
from gateway.services.admin_catalog import AliasChange
from gateway.services.admin_keys import KeyChange
from gateway.services.tenants import OrganizationChange, TenantChange

Thing = Organization | Team | ApiKey | Limit | Price | Model | Alias
LeftKind = Literal["organization", "team", "key", "alias"]


class Mistake(msgspec.Struct, frozen=True):
    """Something that cannot be.

    Attributes:
        place: in the file, such as ``organizations.acme.teams.alpha.limits[2]``.
        message: for people.
    """

    place: str
    message: str

    def __str__(self) -> str:
        return f"{self.place}: {self.message}"


class WantedLimit(msgspec.Struct, frozen=True, kw_only=True):
    place: str
    rule: Rule
    model: str | None = None
    is_shadow: bool = False


class WantedKey(msgspec.Struct, frozen=True, kw_only=True):
    """A key is known by its name, among those of its team that are not revoked."""

    place: str
    name: str
    terms: KeyChange
    limits: tuple[WantedLimit, ...] = ()


class WantedTeam(msgspec.Struct, frozen=True, kw_only=True):
    place: str
    name: str
    terms: TenantChange
    limits: tuple[WantedLimit, ...] = ()
    keys: tuple[WantedKey, ...] = ()


class WantedOrganization(msgspec.Struct, frozen=True, kw_only=True):
    place: str
    name: str
    terms: OrganizationChange
    limits: tuple[WantedLimit, ...] = ()
    teams: tuple[WantedTeam, ...] = ()


class WantedPrice(msgspec.Struct, frozen=True, kw_only=True):
    place: str
    price: Price


class WantedModel(msgspec.Struct, frozen=True, kw_only=True):
    """Models are known once they have been served; none is made."""

    place: str
    name: str
    is_disabled: bool


class WantedAlias(msgspec.Struct, frozen=True, kw_only=True):
    """`terms` name the model."""

    place: str
    name: str
    terms: AliasChange


class Mention(msgspec.Struct, frozen=True):
    """A model that something in this place is for."""

    place: str
    model: str


class Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """The whole of it.

    Attributes:
        mentions: of models that must be there; those of other values may be left out.
    """

    mentions: tuple[Mention, ...] = ()
    models: tuple[WantedModel, ...] = ()
    aliases: tuple[WantedAlias, ...] = ()
    prices: tuple[WantedPrice, ...] = ()
    organizations: tuple[WantedOrganization, ...] = ()


class Difference(msgspec.Struct, frozen=True):
    """Something that was made (`before` is None), changed, or removed (`after` is None).

    Attributes:
        owner: names, from the organization down, of what it is or, if it is a limit, belongs to; empty for what belongs
            to no organization.
    """

    owner: tuple[str, ...]
    before: Thing | None
    after: Thing | None

    @property
    def thing(self) -> Thing:
        thing = self.before if self.after is None else self.after
        assert thing is not None, "there is one of the two"
        return thing


class MadeKey(msgspec.Struct, frozen=True):
    """A new key with its raw secret, which nobody can be shown again."""

    owner: tuple[str, ...]
    key: ApiKey
    raw: str

    def __repr__(self) -> str:
        return f"MadeKey({self.key.id})"


class LeftAlone(msgspec.Struct, frozen=True):
    """Something that is there, not in the file, and stays as it is."""

    kind: LeftKind
    owner: tuple[str, ...]


class Applied(msgspec.Struct, frozen=True, kw_only=True):
    """What has become different, in the order in which it was done."""

    differences: tuple[Difference, ...] = ()
    keys: tuple[MadeKey, ...] = ()
    left_alone: tuple[LeftAlone, ...] = ()
