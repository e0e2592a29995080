"""Bring an installation into a wanted state, in one change: all of it, or nothing and every mistake that there is.

What is so already is not touched, so that doing it once more does nothing, and writes nothing into the audit. Nothing
is known by anything but its name. Knows nothing of files.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import msgspec
from msgspec import UNSET, UnsetType

from gateway.domain.catalog import Alias
from gateway.domain.credential import Peppers
from gateway.domain.limits.periods import DEFAULT_ZONE
from gateway.domain.limits.policy import Limit, Scope
from gateway.domain.tenancy import ApiKey, Organization, Team
from gateway.errors import Conflict, EvenhandError, StorageDown
from gateway.services.admin_catalog import add_alias, change_alias, change_model, check_model, require_model
from gateway.services.admin_changes import Change, Changes
from gateway.services.admin_keys import KeyTerms, add_key, change_key
from gateway.services.admin_limits import remove_limit, set_limit
from gateway.services.admin_prices import add_price
from gateway.services.audit import Actor
from gateway.services.tenants import add_organization, add_team, change_organization, change_team
from gateway.services.wanted import (
    Applied,
    Difference,
    LeftAlone,
    LeftKind,
    MadeKey,
    Mistake,
    Thing,
    Wanted,
    WantedKey,
    WantedLimit,
    WantedOrganization,
    WantedTeam,
)

T = TypeVar("T")
Named = TypeVar("Named", Organization, Team, ApiKey)
Owner = tuple[str, ...]

_PAGE = 1000
_SCOPES_AT_A_TIME = 500


class NotApplied(Exception):
    """Nothing has been changed, because of mistakes."""

    def __init__(self, mistakes: Sequence[Mistake]) -> None:
        super().__init__("\n".join(map(str, mistakes)))
        self.mistakes = mistakes


class Application:
    """The use case."""

    def __init__(self, changes: Changes, peppers: Peppers) -> None:
        self._changes = changes
        self._peppers = peppers

    async def apply(self, actor: Actor, wanted: Wanted, *, is_trial: bool = False) -> Applied:
        """
        Args:
            is_trial: tell what would become different, and leave everything as it is.

        Raises:
            NotApplied: there are mistakes.
            StorageDown: the database does not answer.
        """
        work: _Work | None = None
        with contextlib.suppress(_Undone):
            async with self._changes.begin(actor) as change:
                work = _Work(change, self._peppers)
                await work.all(wanted)
                if work.mistakes or is_trial:
                    raise _Undone
        assert work is not None, "a change that begins is done, or raises"
        if work.mistakes:
            raise NotApplied(work.mistakes)
        return Applied(differences=tuple(work.differences), keys=tuple(work.keys), left_alone=tuple(work.left_alone))


class _Undone(Exception):
    """Rolls back the change."""


class _Work:
    """The change under way, and what came of it so far. A mistake ends what it is in, and the rest goes on."""

    def __init__(self, change: Change, peppers: Peppers) -> None:
        self.mistakes: list[Mistake] = []
        self.differences: list[Difference] = []
        self.keys: list[MadeKey] = []
        self.left_alone: list[LeftAlone] = []
        self._change = change
        self._stores = change.work
        self._peppers = peppers

    async def all(self, wanted: Wanted) -> None:
        for mention in wanted.mentions:
            with self._at(mention.place):
                await check_model(self._stores, mention.model)
        await self._models(wanted)
        await self._aliases(wanted)
        await self._prices(wanted)
        for organization in wanted.organizations:
            await self._organization(organization)
        named = {each.name for each in wanted.organizations}
        there = await _pages(lambda after: self._stores.organizations.page(after=after, limit=_PAGE))
        self._leave("organization", ((each.name,) for each in there if each.name not in named))

    async def _models(self, wanted: Wanted) -> None:
        for each in wanted.models:
            with self._at(each.place):
                before = await require_model(self._stores, each.name)
                self._tell((), before, await change_model(self._change, before, is_disabled=each.is_disabled))

    async def _aliases(self, wanted: Wanted) -> None:
        there = {each.name: each for each in await self._stores.catalog.aliases()}
        for each in wanted.aliases:
            with self._at(each.place):
                before = there.pop(each.name, None)
                if before is None:
                    fields = {"name": each.name, "created_at_ms": self._change.now_ms, **_given(each.terms)}
                    after = await add_alias(self._change, Alias(**fields))
                else:
                    after = await change_alias(self._change, before, each.terms)
                self._tell((), before, after)
        self._leave("alias", ((name,) for name in there))

    async def _prices(self, wanted: Wanted) -> None:
        priced = {each.model for each in await self._stores.catalog.prices()}
        for each in sorted(wanted.prices, key=lambda each: each.price.valid_from_ms):
            with self._at(each.place):
                after = await add_price(self._change, each.price, may_be_past=each.price.model not in priced)
                if after is each.price:
                    self._tell((), None, after)

    async def _organization(self, wanted: WantedOrganization) -> None:
        owner, terms = (wanted.name,), wanted.terms
        before = after = await self._stores.organizations.by_name(wanted.name)
        with self._at(wanted.place):
            if after is None:
                weight, zone = _given_or(terms.weight, 1), _given_or(terms.time_zone, DEFAULT_ZONE)
                after = await add_organization(self._change, name=wanted.name, weight=weight, time_zone=zone)
            after = await change_organization(self._change, after, terms)
            self._tell(owner, before, after)
        if after is None:
            return
        organization = after
        teams = {
            each.name: each
            for each in await _pages(
                lambda after: self._stores.teams.page(after=after, limit=_PAGE, organization_id=organization.id)
            )
        }
        keys = {each.name: await self._keys_of(teams.get(each.name)) for each in wanted.teams}
        limits = await self._limits_of(organization, wanted, teams, keys)
        await self._set_limits("organization", organization.id, owner, wanted.limits, limits)
        for team in wanted.teams:
            await self._team(organization, teams.pop(team.name, None), team, keys[team.name], limits)
        self._leave("team", ((*owner, name) for name in teams))

    async def _team(
        self,
        organization: Organization,
        before: Team | None,
        wanted: WantedTeam,
        keys: dict[str, list[ApiKey]],
        limits: Mapping[str, Sequence[Limit]],
    ) -> None:
        owner, after = (organization.name, wanted.name), before
        with self._at(wanted.place):
            if after is None:
                weight = _given_or(wanted.terms.weight, 1)
                after = await add_team(self._change, _enabled(organization), name=wanted.name, weight=weight)
            after = await change_team(self._change, after, wanted.terms)
            self._tell(owner, before, after)
        if after is None:
            return
        await self._set_limits("team", after.id, owner, wanted.limits, limits)
        for key in wanted.keys:
            await self._key(organization, after, keys.pop(key.name, []), key, limits)
        self._leave("key", ((*owner, each.name) for each in itertools.chain.from_iterable(keys.values())))

    async def _key(
        self,
        organization: Organization,
        team: Team,
        there: Sequence[ApiKey],
        wanted: WantedKey,
        limits: Mapping[str, Sequence[Limit]],
    ) -> None:
        owner, key = (organization.name, team.name, wanted.name), None
        with self._at(wanted.place):
            if len(there) > 1:
                ids = ", ".join(each.id for each in there)
                raise Conflict(f"The team has {len(there)} keys of this name, so that none can be meant: {ids}.")
            if there:
                key = await change_key(self._change, there[0], wanted.terms)
                self._tell(owner, there[0], key)
            else:
                # The file says of a disabled team which keys it has, as of any other.
                terms = KeyTerms(**{**_given(wanted.terms), "name": wanted.name})
                owners = _enabled(organization), _enabled(team)
                issued = await add_key(self._change, self._peppers, *owners, terms)
                key = issued.key
                self._tell(owner, None, key)
                self.keys.append(MadeKey(owner, key, issued.raw))
        if key is not None:
            await self._set_limits("key", key.id, owner, wanted.limits, limits)

    async def _set_limits(
        self,
        scope: Scope,
        scope_id: str,
        owner: Owner,
        wanted: Sequence[WantedLimit],
        limits: Mapping[str, Sequence[Limit]],
    ) -> None:
        """Of one scope, which is to have these and no others."""
        there = {(each.name, each.model): each for each in limits.get(scope_id, ())}
        for each in wanted:
            with self._at(each.place):
                before = there.pop((each.rule.name, each.model), None)
                after = Limit(
                    scope=scope,
                    scope_id=scope_id,
                    model=each.model,
                    rule=each.rule,
                    is_shadow=each.is_shadow,
                    changed_at_ms=self._change.now_ms,
                )
                if before is None or after != msgspec.structs.replace(before, changed_at_ms=after.changed_at_ms):
                    self._tell(owner, before, await set_limit(self._change, after))
        for limit in there.values():
            await remove_limit(self._change, limit)
            self._tell(owner, limit, None)

    async def _keys_of(self, team: Team | None) -> dict[str, list[ApiKey]]:
        """By name those that are not revoked."""
        found: dict[str, list[ApiKey]] = {}
        if team is not None:
            keys = await _pages(lambda after: self._stores.keys.page(after=after, limit=_PAGE, team_id=team.id))
            for key in keys:
                if key.revoked_at_ms is None:
                    found.setdefault(key.name, []).append(key)
        return found

    async def _limits_of(
        self,
        organization: Organization,
        wanted: WantedOrganization,
        teams: Mapping[str, Team],
        keys: Mapping[str, Mapping[str, Sequence[ApiKey]]],
    ) -> Mapping[str, Sequence[Limit]]:
        """By the id of the scope, of all that are wanted and there."""
        ids: list[str] = [organization.id]
        for team in wanted.teams:
            ids += [teams[team.name].id] if team.name in teams else []
            ids += [key.id for each in team.keys for key in keys[team.name].get(each.name, ())]
        found: dict[str, list[Limit]] = {}
        for start in range(0, len(ids), _SCOPES_AT_A_TIME):
            for limit in await self._stores.limits.of(ids[start : start + _SCOPES_AT_A_TIME]):
                found.setdefault(limit.scope_id, []).append(limit)
        return found

    @contextlib.contextmanager
    def _at(self, place: str) -> Iterator[None]:
        """Where a mistake is that is made within."""
        try:
            yield
        except StorageDown:
            raise
        except EvenhandError as e:
            self.mistakes.append(mistake_at(place, e))

    def _tell(self, owner: Owner, before: Thing | None, after: Thing | None) -> None:
        if before != after:
            self.differences.append(Difference(owner, before, after))

    def _leave(self, kind: LeftKind, owners: Iterable[Owner]) -> None:
        self.left_alone += [LeftAlone(kind, owner) for owner in owners]


def mistake_at(place: str, error: EvenhandError) -> Mistake:
    """What an error says, about something in this place: the field it is about is a part of the place then."""
    field = (error.param or "").removeprefix("rule.")
    if not field:
        return Mistake(place, error.message)
    quoted = f"'{error.param}' "
    if field == "name":
        return Mistake(place, error.message.replace(quoted, "its name ", 1))
    message = error.message.removeprefix(quoted).replace(quoted, f"'{field}' ")
    return Mistake(f"{place}.{field}", message)


def _enabled(tenant: Named) -> Named:
    """As it would be if it were not disabled."""
    return msgspec.structs.replace(tenant, disabled_at_ms=None)


def _given(terms: msgspec.Struct) -> dict[str, Any]:
    return {name: value for name, value in msgspec.structs.asdict(terms).items() if value is not UNSET}


def _given_or(value: T | UnsetType, usual: T) -> T:
    return usual if value is UNSET else value


async def _pages(fetch: Callable[[str], Awaitable[Sequence[Named]]]) -> list[Named]:
    """All that there are."""
    found: list[Named] = []
    while page := await fetch(found[-1].id if found else ""):
        found += page
        if len(page) < _PAGE:
            break
    return found
