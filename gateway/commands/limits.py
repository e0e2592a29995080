"""``evenhand limit``. Quotas are limits too, but set with ``evenhand quota``."""

from __future__ import annotations

import re
from functools import partial
from typing import Annotated, Any, Literal

import msgspec
import typer

from gateway.commands.administer import administer
from gateway.commands.options import AsJson, Config, OfModel, in_options
from gateway.commands.scopes import OfKey, OfOrganization, OfTeam, Whose, names_of
from gateway.commands.tables import Row, everything, show
from gateway.domain.limits.policy import Rule
from gateway.errors import InvalidRequest
from gateway.limit_notation import (
    ConcurrentForm,
    ContextForm,
    OutputForm,
    RequestsForm,
    RuleForm,
    TokensForm,
    rule_of,
    rule_text,
)
from gateway.services.administration import Administration
from gateway.services.audit import Actor
from gateway.web.admin.wire import limit_to_wire

limit_app = typer.Typer(
    help="""Limits of organizations, teams and keys, for all models or one.

    evenhand limit set requests 100/minute --org acme

    evenhand limit set tokens 100000/minute --org acme --team research --model smollm2-135m-instruct

    evenhand limit set concurrent 10 --key key_…""",
    no_args_is_help=True,
)

Kind = Literal["requests", "tokens", "concurrent", "context", "output"]
FORMS: dict[Kind, type[RuleForm]] = {
    "requests": RequestsForm,
    "tokens": TokensForm,
    "concurrent": ConcurrentForm,
    "context": ContextForm,
    "output": OutputForm,
}
_RATES: tuple[Kind, ...] = ("requests", "tokens")
_TOKENS = "Of tokens only"

Shadow = Annotated[bool, typer.Option("--shadow", help="Count and report it, but refuse nothing.")]


@limit_app.command("set")
def set_limit(
    kind: Annotated[Kind, typer.Argument(metavar="KIND", help="What is limited.")],
    amount: Annotated[str, typer.Argument(metavar="AMOUNT", help="How much, as above.")],
    org: OfOrganization = None,
    team: OfTeam = None,
    key: OfKey = None,
    model: OfModel = None,
    burst: Annotated[
        int | None, typer.Option(help="Of requests or tokens: at once; unset is as in the period.")
    ] = None,
    shadow: Shadow = False,
    strict: Annotated[
        bool,
        typer.Option(
            "--strict", help="Make room for all that may be written, not for what is expected.", rich_help_panel=_TOKENS
        ),
    ] = False,
    max_debt: Annotated[
        int | None,
        typer.Option(
            help="How far what was not expected may go below nothing; unset is burst.", rich_help_panel=_TOKENS
        ),
    ] = None,
    prompt_percent: Annotated[
        int | None, typer.Option(help="How much a prompt token counts; unset is 100.", rich_help_panel=_TOKENS)
    ] = None,
    cached_percent: Annotated[
        int | None,
        typer.Option(help="And one found in the cache; unset is as other prompt tokens.", rich_help_panel=_TOKENS),
    ] = None,
    output_percent: Annotated[
        int | None, typer.Option(help="And one that is written; unset is 100.", rich_help_panel=_TOKENS)
    ] = None,
    config: Config = None,
) -> None:
    """Set a limit, in place of the one of its kind and period; what was used of that counts on.

    requests 100/minute: at an even pace, up to --burst at once. Also by second, hour or day.

    tokens 100000/minute: likewise, of prompts and answers.

    concurrent 10: requests at a time, waiting ones included.

    context 8192: tokens of a prompt with its answer; a longer prompt is refused, a longer answer cut.

    output 1024: tokens of an answer, which is cut there.

    Amounts for calendar days, weeks and months are quotas: evenhand quota set.
    """
    whose = Whose(org, team, key)
    whose.check_one()
    rule = _rule(
        kind,
        amount,
        {
            "burst": burst,
            "max_debt": max_debt,
            "prompt_percent": prompt_percent,
            "cached_percent": cached_percent,
            "output_percent": output_percent,
            "strict": strict or None,
        },
    )

    async def work(admin: Administration, actor: Actor) -> None:
        await admin.limits.set(actor, scope_id=await whose.id(admin), model=model, rule=rule, is_shadow=shadow)

    administer(config, work)


@limit_app.command("list")
def list_limits(
    org: OfOrganization = None,
    team: OfTeam = None,
    key: OfKey = None,
    as_json: AsJson = False,
    config: Config = None,
) -> None:
    """List the limits, quotas included, of an organization, a team or a key, or all."""
    whose = Whose(org, team, key)
    is_all = whose.is_all

    async def work(admin: Administration, _: Actor) -> list[Row]:
        scope_id = None if is_all else await whose.id(admin)
        limits = await everything(partial(admin.limits.page, scope_id=scope_id))
        names = await names_of(admin, {each.scope_id for each in limits})
        return [
            {
                **limit_to_wire(each),
                **names[each.scope_id],
                "allows": rule_text(each.rule),
                "mode": "shadow" if each.is_shadow else "enforced",
            }
            for each in limits
        ]

    columns = ("scope", "scope_id", "organization", "team", "key", "model", "name", "allows", "mode", "changed_at")
    show(administer(config, work), columns, as_json=as_json)


@limit_app.command("remove")
def remove_limit(
    name: Annotated[str, typer.Argument(help="As limit list shows it, such as requests/minute or concurrent.")],
    org: OfOrganization = None,
    team: OfTeam = None,
    key: OfKey = None,
    model: OfModel = None,
    config: Config = None,
) -> None:
    """Take a limit away, also a quota. What was used stays on record, should it be set again."""
    whose = Whose(org, team, key)
    whose.check_one()
    remove(name, whose, model, config)


def remove(name: str, whose: Whose, model: str | None, config: Config) -> None:
    """Of somebody's limits the one with this name."""

    async def work(admin: Administration, actor: Actor) -> None:
        await admin.limits.remove(actor, scope_id=await whose.id(admin), name=name, model=model)

    administer(config, work)


def _rule(kind: Kind, amount: str, options: dict[str, Any]) -> Rule:
    """Raises `typer.BadParameter` for what cannot be read, or is not of this kind."""
    form = FORMS[kind]
    given = {name: value for name, value in options.items() if value is not None}
    for name in given.keys() - {field.name for field in msgspec.structs.fields(form)}:
        raise typer.BadParameter(f"--{name.replace('_', '-')} is not for limits of {kind}")
    if kind in _RATES:
        given["rate"] = amount
    elif re.fullmatch("[0-9]{1,18}", amount):
        given["amount"] = int(amount)
    else:
        raise typer.BadParameter(f"AMOUNT must be a whole number, such as {kind} 10")
    try:
        return rule_of(form(**given))
    except InvalidRequest as e:
        raise typer.BadParameter(in_options(e)) from e
