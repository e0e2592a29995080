"""The keys of teams: make, change, revoke, look up. A raw key is returned once, by what makes it, and kept nowhere."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from msgspec import UNSET, UnsetType

from gateway.domain.credential import API_KEY, Peppers, issue, public_id_in
from gateway.domain.ids import KeyId, new_key_id
from gateway.domain.principal import RequestClass
from gateway.domain.tenancy import ApiKey, Organization, Secret, Team
from gateway.errors import Conflict, NotFound
from gateway.services.admin_changes import Change, Changes
from gateway.services.admin_pages import Page, PageRequest, fetch_page
from gateway.services.admin_rules import (
    check_deadline,
    check_endpoints,
    check_expiry,
    check_models,
    check_name,
    check_networks,
    check_queue_depth,
    is_id,
)
from gateway.services.audit import Actor
from gateway.services.stores import Storage, Work
from gateway.services.tenants import require_organization, require_team


class KeyTerms(msgspec.Struct, frozen=True, kw_only=True):
    """What a key is to be like; see `ApiKey`."""

    name: str
    default_class: RequestClass = "interactive"
    models: Sequence[str] | None = None
    endpoints: Sequence[str] | None = None
    max_queue_depth: int | None = None
    deadline_ms: int | None = None
    networks: Sequence[str] | None = None
    expires_at_ms: int | None = None


class KeyChange(msgspec.Struct, frozen=True, kw_only=True):
    """What is to become different of a key."""

    name: str | UnsetType = UNSET
    default_class: RequestClass | UnsetType = UNSET
    models: Sequence[str] | UnsetType | None = UNSET
    endpoints: Sequence[str] | UnsetType | None = UNSET
    max_queue_depth: int | UnsetType | None = UNSET
    deadline_ms: int | UnsetType | None = UNSET
    networks: Sequence[str] | UnsetType | None = UNSET
    expires_at_ms: int | UnsetType | None = UNSET


class Issued(msgspec.Struct, frozen=True):
    """A new key with its raw secret, which nobody can be shown again."""

    key: ApiKey
    raw: str

    def __repr__(self) -> str:
        return f"Issued({self.key.id})"


class Keys:
    """The use cases; they raise `InvalidRequest`, `NotFound` or `Conflict`."""

    def __init__(self, storage: Storage, changes: Changes, peppers: Peppers) -> None:
        self._storage = storage
        self._changes = changes
        self._peppers = peppers

    async def create(self, actor: Actor, *, team_id: str, terms: KeyTerms) -> Issued:
        """Raises `Conflict` if the team or its organization is disabled."""
        async with self._changes.begin(actor) as change:
            team = await require_team(change.work, team_id)
            organization = await require_organization(change.work, team.organization_id)
            return await add_key(change, self._peppers, organization, team, terms)

    async def change(self, actor: Actor, key_id: str, wanted: KeyChange) -> ApiKey:
        """Raises `Conflict` for a revoked key."""
        async with self._changes.begin(actor) as change:
            return await change_key(change, await require_key(change.work, key_id), wanted)

    async def revoke(self, actor: Actor, key_id: str) -> ApiKey:
        """For good. Once more does nothing."""
        async with self._changes.begin(actor) as change:
            before = await require_key(change.work, key_id)
            if before.revoked_at_ms is not None:
                return before
            after = msgspec.structs.replace(before, revoked_at_ms=change.now_ms)
            await change.work.keys.replace(after)
            change.record("key.revoke", after.id, before=before, after=after)
            return after

    async def get(self, key_id: str) -> ApiKey:
        async with self._storage.reading() as work:
            return await require_key(work, key_id)

    async def find(self, named: str) -> ApiKey:
        """By its id, its public id, or itself; of a raw key only the public id is looked at."""
        public_id = public_id_in(named, API_KEY)
        async with self._storage.reading() as work:
            holder = None if public_id is None else await work.keys.holder(public_id)
            return await require_key(work, named) if holder is None else holder.key

    async def page(self, page: PageRequest, *, team_id: str | None = None) -> Page[ApiKey]:
        """All, or those of one team, which must be there."""
        after = page.after_id("key_")
        async with self._storage.reading() as work:
            owner = None if team_id is None else (await require_team(work, team_id)).id
            return await fetch_page(
                page,
                lambda limit: work.keys.page(after=after, limit=limit, team_id=owner),
                lambda each: each.id,
            )


async def add_key(change: Change, peppers: Peppers, organization: Organization, team: Team, terms: KeyTerms) -> Issued:
    """Part of a larger change. Raises what `Keys.create` raises."""
    if team.disabled_at_ms is not None or organization.disabled_at_ms is not None:
        whose = "team" if team.disabled_at_ms is not None else "organization"
        raise Conflict(f"The {whose} is disabled; enable it first.", param="team_id")
    raw, public_id = issue(API_KEY)
    digest, pepper_id = peppers.digest(raw)
    made = ApiKey(
        id=new_key_id(change.now_ms),
        team_id=team.id,
        name=check_name(terms.name),
        secret=Secret(public_id, digest, pepper_id),
        default_class=terms.default_class,
        models=check_models(terms.models),
        endpoints=check_endpoints(terms.endpoints),
        max_queue_depth=check_queue_depth(terms.max_queue_depth),
        deadline_ms=check_deadline(terms.deadline_ms),
        networks=check_networks(terms.networks),
        created_at_ms=change.now_ms,
        expires_at_ms=check_expiry(terms.expires_at_ms, change.now_ms),
    )
    await change.work.keys.add(made)
    change.record("key.create", made.id, after=made)
    return Issued(made, raw)


async def change_key(change: Change, before: ApiKey, wanted: KeyChange) -> ApiKey:
    """Part of a larger change. Raises what `Keys.change` raises."""
    after = _changed(before, wanted, change.now_ms)
    if after != before:
        if before.revoked_at_ms is not None:
            raise Conflict("The key is revoked, for good.")
        await change.work.keys.replace(after)
        change.record("key.change", after.id, before=before, after=after)
    return after


async def require_key(work: Work, key_id: str) -> ApiKey:
    """Raises `NotFound`."""
    if is_id(key_id, "key_"):
        found = await work.keys.get(KeyId(key_id))
        if found is not None:
            return found
    raise NotFound("There is no key with this id.")


def _changed(before: ApiKey, wanted: KeyChange, now_ms: int) -> ApiKey:
    """Only what is given is checked: a key that has expired may still get another name."""
    after = before
    if wanted.name is not UNSET:
        after = msgspec.structs.replace(after, name=check_name(wanted.name))
    if wanted.default_class is not UNSET:
        after = msgspec.structs.replace(after, default_class=wanted.default_class)
    if wanted.models is not UNSET:
        after = msgspec.structs.replace(after, models=check_models(wanted.models))
    if wanted.endpoints is not UNSET:
        after = msgspec.structs.replace(after, endpoints=check_endpoints(wanted.endpoints))
    if wanted.max_queue_depth is not UNSET:
        after = msgspec.structs.replace(after, max_queue_depth=check_queue_depth(wanted.max_queue_depth))
    if wanted.deadline_ms is not UNSET:
        after = msgspec.structs.replace(after, deadline_ms=check_deadline(wanted.deadline_ms))
    if wanted.networks is not UNSET:
        after = msgspec.structs.replace(after, networks=check_networks(wanted.networks))
    if wanted.expires_at_ms is not UNSET and wanted.expires_at_ms != before.expires_at_ms:
        after = msgspec.structs.replace(after, expires_at_ms=check_expiry(wanted.expires_at_ms, now_ms))
    return after
