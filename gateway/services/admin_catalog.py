"""Models and aliases as administrators see them. Models enter the catalogue by being served, not here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import msgspec
from msgspec import UNSET, UnsetType

from gateway.domain.catalog import Alias, Model
from gateway.domain.credential import hide_credentials
from gateway.domain.principal import RequestClass
from gateway.errors import Conflict, InvalidRequest, NotFound
from gateway.services.admin_changes import Change, Changes
from gateway.services.admin_pages import Page, PageRequest, fetch_page
from gateway.services.admin_rules import MAX_MODEL_NAME, check_alias_name, check_system_default
from gateway.services.audit import Actor
from gateway.services.stores import Storage, Work

Named = TypeVar("Named", Model, Alias)


class AliasChange(msgspec.Struct, frozen=True, kw_only=True):
    """What is to become different of an alias."""

    model: str | UnsetType = UNSET
    system_default: str | UnsetType | None = UNSET
    request_class: RequestClass | UnsetType | None = UNSET


class CatalogAdministration:
    """The use cases; they raise `InvalidRequest`, `NotFound` or `Conflict`."""

    def __init__(self, storage: Storage, changes: Changes) -> None:
        self._storage = storage
        self._changes = changes

    async def enter_models(self, actor: Actor, names: Sequence[str]) -> None:
        """Enter models that are served now, unless they are in the catalogue already."""
        async with self._changes.begin(actor) as change:
            for name in names:
                model = Model(name=name, created_at_ms=change.now_ms)
                if await change.work.catalog.enter_model(model):
                    change.record("model.enter", name, after=model)

    async def set_model_disabled(self, actor: Actor, name: str, *, is_disabled: bool) -> Model:
        async with self._changes.begin(actor) as change:
            return await change_model(change, await require_model(change.work, name), is_disabled=is_disabled)

    async def create_alias(
        self,
        actor: Actor,
        *,
        name: str,
        model: str,
        system_default: str | None = None,
        request_class: RequestClass | None = None,
    ) -> Alias:
        """Raises `Conflict` if there is an alias or a model of that name."""
        async with self._changes.begin(actor) as change:
            return await add_alias(
                change,
                Alias(
                    name=name,
                    model=model,
                    system_default=system_default,
                    request_class=request_class,
                    created_at_ms=change.now_ms,
                ),
            )

    async def change_alias(self, actor: Actor, name: str, wanted: AliasChange) -> Alias:
        async with self._changes.begin(actor) as change:
            return await change_alias(change, await _require_alias(change.work, name), wanted)

    async def remove_alias(self, actor: Actor, name: str) -> None:
        async with self._changes.begin(actor) as change:
            before = await _require_alias(change.work, name)
            await change.work.catalog.remove_alias(name)
            change.record("alias.remove", name, before=before)

    async def model(self, name: str) -> Model:
        async with self._storage.reading() as work:
            return await require_model(work, name)

    async def alias(self, name: str) -> Alias:
        async with self._storage.reading() as work:
            return await _require_alias(work, name)

    async def models(self, page: PageRequest) -> Page[Model]:
        async with self._storage.reading() as work:
            return await _page_of_few(page, await work.catalog.models())

    async def aliases(self, page: PageRequest) -> Page[Alias]:
        async with self._storage.reading() as work:
            return await _page_of_few(page, await work.catalog.aliases())


async def change_model(change: Change, before: Model, *, is_disabled: bool) -> Model:
    """Part of a larger change."""
    if is_disabled == (before.disabled_at_ms is not None):
        return before
    after = msgspec.structs.replace(before, disabled_at_ms=change.now_ms if is_disabled else None)
    await change.work.catalog.replace_model(after)
    change.record(f"model.{'disable' if is_disabled else 'enable'}", after.name, before=before, after=after)
    return after


async def add_alias(change: Change, wanted: Alias) -> Alias:
    """Part of a larger change. Raises what `CatalogAdministration.create_alias` raises."""
    check_alias_name(wanted.name)
    check_system_default(wanted.system_default)
    await check_model(change.work, wanted.model)
    if any(each.name == wanted.name for each in await change.work.catalog.models()):
        raise Conflict("There is a model of this name, which wins over an alias.", param="name")
    await change.work.catalog.add_alias(wanted)
    change.record("alias.create", wanted.name, after=wanted)
    return wanted


async def change_alias(change: Change, before: Alias, wanted: AliasChange) -> Alias:
    """Part of a larger change. Raises what `CatalogAdministration.change_alias` raises."""
    after = before
    if wanted.model is not UNSET:
        after = msgspec.structs.replace(after, model=await check_model(change.work, wanted.model))
    if wanted.system_default is not UNSET:
        after = msgspec.structs.replace(after, system_default=check_system_default(wanted.system_default))
    if wanted.request_class is not UNSET:
        after = msgspec.structs.replace(after, request_class=wanted.request_class)
    if after != before:
        await change.work.catalog.replace_alias(after)
        change.record("alias.change", after.name, before=before, after=after)
    return after


async def require_model(work: Work, name: str) -> Model:
    for each in await work.catalog.models():
        if each.name == name:
            return each
    raise NotFound("There is no model of this name in the catalogue.")


async def _require_alias(work: Work, name: str) -> Alias:
    for each in await work.catalog.aliases():
        if each.name == name:
            return each
    raise NotFound("There is no alias of this name.")


async def check_model(work: Work, model: str) -> str:
    """The name of a model of the catalogue. Raises `InvalidRequest`."""
    if all(each.name != model for each in await work.catalog.models()):
        raise InvalidRequest(
            f"There is no model '{hide_credentials(model[:MAX_MODEL_NAME])}' in the catalogue; "
            "a model is known once it has been served (evenhand model list).",
            param="model",
        )
    return model


async def _page_of_few(page: PageRequest, everything: Sequence[Named]) -> Page[Named]:
    behind = sorted((each for each in everything if each.name > page.after), key=lambda each: each.name)

    async def fetch(limit: int) -> Sequence[Named]:
        return behind[:limit]

    return await fetch_page(page, fetch, lambda each: each.name)
