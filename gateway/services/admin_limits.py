"""The limits of organizations, teams and keys, quotas among them: set, remove, look up.

Who changes how much a limit allows keeps what was used of it: a meter's key has no amount in it (`meter_key`).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import msgspec

from gateway.domain.limits.meters import MOST_QUOTA
from gateway.domain.limits.policy import (
    Limit,
    QuotaRule,
    RequestRate,
    Rule,
    Scope,
    TokenRate,
    check_rule,
    meter_key,
)
from gateway.errors import Conflict, InvalidRequest, NotFound
from gateway.services.admin_catalog import check_model
from gateway.services.admin_changes import Change, Changes
from gateway.services.admin_pages import Page, PageRequest, bad_cursor, fetch_page
from gateway.services.admin_rules import can_be_kept, is_id
from gateway.services.admin_scopes import require_scope
from gateway.services.audit import Actor
from gateway.services.stores import Storage, Work


class Limits:
    """The use cases; they raise `InvalidRequest`, `NotFound` or `Conflict`."""

    def __init__(self, storage: Storage, changes: Changes) -> None:
        self._storage = storage
        self._changes = changes

    async def set(
        self, actor: Actor, *, scope_id: str, rule: Rule, model: str | None = None, is_shadow: bool = False
    ) -> Limit:
        """Put a limit in place of the one with its scope, model and name. What is so already writes nothing.

        Raises:
            NotFound: there is nobody with this id.
            InvalidRequest: the rule cannot be, or the model is not in the catalogue.
            Conflict: the key is revoked.
        """
        async with self._changes.begin(actor) as change:
            of = await require_scope(change.work, scope_id)
            if of.key is not None and of.key.revoked_at_ms is not None:
                raise Conflict("The key is revoked, for good.", param="scope_id")
            wanted = Limit(
                scope=of.scope,
                scope_id=scope_id,
                model=model,
                rule=rule,
                is_shadow=is_shadow,
                changed_at_ms=change.now_ms,
            )
            return await set_limit(change, wanted)

    async def remove(self, actor: Actor, *, scope_id: str, name: str, model: str | None = None) -> None:
        """Usage and top-ups of a quota stay, should it be set again. Raises `NotFound` if there is no such limit."""
        async with self._changes.begin(actor) as change:
            await remove_limit(change, await require_limit(change.work, scope_id, model, name))

    async def get(self, *, scope_id: str, name: str, model: str | None = None) -> Limit:
        async with self._storage.reading() as work:
            return await require_limit(work, scope_id, model, name)

    async def page(self, page: PageRequest, *, scope: Scope | None = None, scope_id: str | None = None) -> Page[Limit]:
        """All, those of one kind of scope, or those of one scope, which must be there."""
        if scope is not None and scope_id is not None:
            raise InvalidRequest("'scope' must be left out beside 'scope_id'.", param="scope")
        after = _place_of(page.after)
        async with self._storage.reading() as work:

            async def fetch(limit: int) -> Sequence[Limit]:
                if scope_id is None:
                    return await work.limits.page(after=after, limit=limit, scope=scope)
                of_one = sorted(await work.limits.of([scope_id]), key=_place)
                return list(itertools.islice((each for each in of_one if _place(each) > after), limit))

            if scope_id is not None:
                await require_scope(work, scope_id)
            return await fetch_page(page, fetch, lambda each: ":".join(_place(each)))


async def set_limit(change: Change, wanted: Limit) -> Limit:
    """Part of a larger change. Raises what `Limits.set` raises, but for whose it is."""
    check_limit(wanted.rule)
    if wanted.model is not None:
        await check_model(change.work, wanted.model)
    before = await change.work.limits.get(wanted.scope_id, wanted.model, wanted.name)
    if before is not None and wanted == msgspec.structs.replace(before, changed_at_ms=wanted.changed_at_ms):
        return before
    if isinstance(wanted.rule, QuotaRule):
        await _check_room(change.work, wanted, wanted.rule)
    await change.work.limits.set(wanted)
    change.record("limit.set", meter_key(wanted), before=before, after=wanted)
    return wanted


async def remove_limit(change: Change, limit: Limit) -> None:
    """Part of a larger change."""
    await change.work.limits.remove(limit.scope_id, limit.model, limit.name)
    change.record("limit.remove", meter_key(limit), before=limit)


async def require_limit(work: Work, scope_id: str, model: str | None, name: str) -> Limit:
    """Raises `NotFound`."""
    of = await require_scope(work, scope_id)
    can_be = model != "" and can_be_kept(name + (model or ""))
    found = await work.limits.get(scope_id, model, name) if can_be else None
    if found is None:
        models = "for all models" if model is None else "for this model"
        raise NotFound(f"The {of.scope} has no limit of this name {models}.")
    return found


def check_total(amount: int, other: int, param: str) -> None:
    """Of a quota with its top-ups in one period. Raises `InvalidRequest` if it is more than can be counted."""
    if amount + other > MOST_QUOTA:
        raise InvalidRequest(
            f"'{param}' must be at most {MOST_QUOTA - other}: with {other} more it would be too much to be counted.",
            param=param,
        )


def check_limit(rule: Rule) -> None:
    """Raises `InvalidRequest` if the rule cannot be."""
    try:
        check_rule(rule)
    except ValueError as e:
        field, _, rest = str(e).partition(" ")
        if field == "amount" and isinstance(rule, RequestRate | TokenRate):
            field = "rate"  # which is the amount with its period
        param = f"rule.{field}"
        raise InvalidRequest(f"'{param}' {rest}.", param=param) from e


async def _check_room(work: Work, limit: Limit, rule: QuotaRule) -> None:
    top_ups = [
        each
        for each in await work.limits.top_ups([limit.scope_id], since_ms=0)
        if (each.model, each.name) == (limit.model, limit.name)
    ]
    for period_id in {each.period_id for each in top_ups}:
        check_total(rule.amount, sum(each.amount for each in top_ups if each.period_id == period_id), "rule.amount")


def _place(limit: Limit) -> tuple[str, str, str]:
    """In lists. No id or name of a limit has a colon; a model's name may."""
    return limit.scope_id, limit.name, limit.model or ""


def _place_of(cursor: str) -> tuple[str, str, str]:
    if not cursor:
        return "", "", ""
    scope_id, name, model = (*cursor.split(":", 2), "", "")[:3]
    if not any(is_id(scope_id, prefix) for prefix in ("org_", "team_", "key_")) or not name or not can_be_kept(cursor):
        raise bad_cursor()
    return scope_id, name, model
