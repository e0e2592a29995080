"""``evenhand apply``: bring the installation into the state that a file says."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from gateway.commands.administer import CommandError, administer
from gateway.commands.options import Config
from gateway.commands.tenant_file import read_tenants
from gateway.domain.catalog import Alias, Model
from gateway.domain.limits.policy import DEFAULT_ALERTS, Limit, Price, QuotaRule
from gateway.domain.tenancy import ApiKey, Organization, Team
from gateway.limit_notation import rule_text, usd_text
from gateway.services.admin_apply import NotApplied
from gateway.services.administration import Administration
from gateway.services.audit import Actor
from gateway.services.wanted import Applied, Difference, LeftAlone, MadeKey, Mistake, Thing, Wanted
from gateway.web.admin.times import to_iso

WOULD_CHANGE = 2
"""Exit code of a trial that would change something."""
MOST_LEFT = 20
"""Things of a kind that are named as left alone; further ones are counted."""
MAX_TEXT = 60
"""Most characters of a value that are shown."""

_KINDS: dict[type[Thing], str] = {
    Organization: "organization",
    Team: "team",
    ApiKey: "key",
    Limit: "limit",
    Price: "price",
    Model: "model",
    Alias: "alias",
}
_NOT_SHOWN = frozenset({"id", "name", "organization_id", "team_id", "secret", "created_at_ms", "revoked_at_ms"})


def apply(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Tenants as TOML; deploy/tenants.toml is an example.")],
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print what would become different; exit code 2 if anything would.")
    ] = False,
    config: Config = None,
) -> None:
    """Bring organizations, teams, keys, limits, prices and aliases into the state that a file says, all or nothing.

    Keys that are missing are made, and printed on stdout as organization, team, name and key with tabs between; they
    cannot be shown again. What has become different is told on stderr. A second time changes nothing.

    Limits that the file does not have are removed from organizations, teams and keys that it has. Organizations, teams,
    keys and aliases that it does not have stay as they are, and so do settings that it leaves out.
    """
    wanted, mistakes = read_tenants(file)
    applied = administer(config, lambda admin, actor: _applied(admin, actor, wanted, mistakes, file, dry_run))
    try:
        _show(applied.keys if not dry_run else ())  # first: all else can be told again
    finally:
        _tell(applied, dry_run)
    if dry_run:
        raise typer.Exit(WOULD_CHANGE if applied.differences else 0)


async def _applied(
    admin: Administration, actor: Actor, wanted: Wanted, mistakes: Sequence[Mistake], file: Path, dry_run: bool
) -> Applied:
    """Raises `CommandError` for mistakes, those in the file and those that only the database can tell."""
    try:
        applied = await admin.application.apply(actor, wanted, is_trial=dry_run or bool(mistakes))
    except NotApplied as e:
        mistakes = [*mistakes, *e.mistakes]
    if not mistakes:
        return applied
    lines = list(dict.fromkeys(_on_one_line(str(each)) for each in mistakes))
    count = "1 mistake" if len(lines) == 1 else f"{len(lines)} mistakes"
    raise CommandError("\n".join([f"{file}: {count}; nothing was changed", *lines]))


def _tell(applied: Applied, dry_run: bool) -> None:
    for line in _notes(applied.left_alone):
        typer.echo(f"evenhand: note: {line}", err=True)
    for line in map(difference_line, applied.differences):
        typer.echo(line, err=not dry_run)
    typer.echo(_summary(applied, dry_run), err=True)


def _on_one_line(text: str) -> str:
    """Messages repeat what is in the file."""
    return "".join(each if each.isprintable() else repr(each)[1:-1] for each in text)


def difference_line(difference: Difference) -> str:
    """For people, on one line: ``+`` is made, ``~`` changed, ``-`` removed."""
    before, after = difference.before, difference.after
    sign = "+" if before is None else "-" if after is None else "~"
    name = _name(difference)
    if before is None or after is None:
        shown = {field: value for field, value in _fields(difference.thing).items() if value is not None}
        told = ", ".join(f"{field} {value}" if field else value for field, value in shown.items())
        return f"{sign} {name}: {told}" if told else f"{sign} {name}"
    old, new = _fields(before), _fields(after)
    changed = [field for field in old | new if old.get(field) != new.get(field)]
    told = ", ".join(f"{field} {_word(old.get(field))} → {_word(new.get(field))}".lstrip() for field in changed)
    return f"{sign} {name}: {told}"


def _name(difference: Difference) -> str:
    thing, owner = difference.thing, "/".join(difference.owner)
    kind = _KINDS[type(thing)]
    match thing:
        case Limit():
            models = "" if thing.model is None else f" for {thing.model}"
            return f"{kind} {thing.name} of {thing.scope} {owner}{models}"
        case Price():
            return f"{kind} of {thing.model} from {to_iso(thing.valid_from_ms)}"
        case Model() | Alias():
            return f"{kind} {thing.name}"
        case Organization() | Team() | ApiKey():
            return f"{kind} {owner}"


def _fields(thing: Thing) -> dict[str, str | None]:
    """What can differ, as text; None is what is usual, and a field without a name needs none."""
    if isinstance(thing, Limit):
        fields: dict[str, str | None] = {"": rule_text(thing.rule) + (", shadow" if thing.is_shadow else "")}
        if isinstance(thing.rule, QuotaRule) and thing.rule.alerts != DEFAULT_ALERTS:
            fields["alerts"] = ",".join(f"{each}%" for each in thing.rule.alerts) or "none"
        return fields
    if isinstance(thing, Price):
        return {name: f"{usd_text(getattr(thing, name))} USD" for name in ("prompt", "cached", "completion")}
    fields = {}
    for field in msgspec.structs.fields(thing):
        if field.name not in _NOT_SHOWN:
            value = getattr(thing, field.name)
            name = field.name.removesuffix("_at_ms")
            fields[name] = None if value == field.default else _text(field.name, value)
    return fields


def _text(field: str, value: Any) -> str:
    if field == "disabled_at_ms":
        return "yes"
    if field == "expires_at_ms":
        return str(to_iso(value))
    if isinstance(value, tuple):
        text = ",".join(value)
    elif field == "system_default":
        text = msgspec.json.encode(value).decode()
    else:
        text = str(value)
    return text if len(text) <= MAX_TEXT else f"{text[:MAX_TEXT]}…"


def _word(text: str | None) -> str:
    return "unset" if text is None else text


def _notes(left: Iterable[LeftAlone]) -> Iterator[str]:
    for kind, group in itertools.groupby(sorted(left, key=lambda each: each.kind), key=lambda each: each.kind):
        owners = ["/".join(each.owner) for each in group]
        for owner in owners[:MOST_LEFT]:
            yield f"{kind} {owner} is not in the file, and left alone"
        if len(owners) > MOST_LEFT:
            yield f"{len(owners) - MOST_LEFT} more of kind {kind} are not in the file, and left alone"


def _summary(applied: Applied, dry_run: bool) -> str:
    if not applied.differences:
        return "Nothing would change." if dry_run else "Nothing has changed: everything is as the file says."
    made = sum(each.before is None for each in applied.differences)
    removed = sum(each.after is None for each in applied.differences)
    changed = len(applied.differences) - made - removed
    tense = "would be " if dry_run else ""
    return f"{made} {tense}made, {changed} {tense}changed, {removed} {tense}removed."


def _show(keys: Sequence[MadeKey]) -> None:
    """Raises `CommandError` if they cannot be shown, since nobody can do that later."""
    try:
        for each in keys:
            typer.echo("\t".join([*each.owner, each.raw]))
    except OSError as e:
        ids = ", ".join(each.key.id for each in keys)
        raise CommandError(f"keys were made and could not be shown ({e.strerror}); revoke them: {ids}") from e
