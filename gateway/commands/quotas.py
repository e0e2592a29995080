"""``evenhand quota``: amounts for calendar days, weeks and months. Money is decimal text here, micro-USD inside."""

from __future__ import annotations

from functools import partial
from typing import Annotated

import typer

from gateway.commands.administer import administer
from gateway.commands.limits import Shadow, remove
from gateway.commands.options import AsJson, Config, OfModel
from gateway.commands.scopes import OfKey, OfOrganization, OfTeam, Whose, names_of
from gateway.commands.tables import Row, everything, show
from gateway.domain.limits.policy import DEFAULT_ALERTS, QuotaPeriod, QuotaUnit
from gateway.limit_notation import (
    UNITS,
    CliUnit,
    QuotaForm,
    amount_text,
    parse_quota_amount,
    quota_name,
    quota_named,
    quota_text,
    rule_of,
)
from gateway.services.administration import Administration
from gateway.services.audit import Actor
from gateway.web.admin.wire import quota_to_wire, to_wire

quota_app = typer.Typer(
    help="""Quotas of organizations, teams and keys: tokens or USD for a calendar day, week or month.

    evenhand quota set tokens 5000000/month --org acme

    evenhand quota set usd 250.00/week --org acme --team research --soft

    evenhand quota top-up tokens 1000000/month --org acme --reason 'quarterly reports'""",
    no_args_is_help=True,
)

Unit = Annotated[
    CliUnit, typer.Argument(metavar="UNIT", help="tokens (prompt and answer), or usd by the models' prices.")
]


@quota_app.command("set")
def set_quota(
    unit: Unit,
    amount: Annotated[
        str, typer.Argument(metavar="AMOUNT", help="For a calendar day, week or month: 5000000/month, 250.00/month.")
    ],
    org: OfOrganization = None,
    team: OfTeam = None,
    key: OfKey = None,
    model: OfModel = None,
    soft: Annotated[
        bool, typer.Option("--soft", help="Refuse nothing: work beyond it runs in the class batch.")
    ] = False,
    alert: Annotated[
        list[int] | None, typer.Option(help="Percent to tell administrators at; can be repeated; unset is 80 and 100.")
    ] = None,
    no_alerts: Annotated[bool, typer.Option("--no-alerts", help="Tell nobody.")] = False,
    shadow: Shadow = False,
    config: Config = None,
) -> None:
    """Set a quota, in place of the one of its unit and period; what was used of that counts on.

    A quota is never exceeded, by not one token, unless it is --soft. Periods go by the organization's time zone.
    """
    whose = Whose(org, team, key)
    whose.check_one()
    if alert and no_alerts:
        raise typer.BadParameter("--alert and --no-alerts exclude each other")
    units, period = _amount(unit, amount)
    alerts = () if no_alerts else tuple(alert or DEFAULT_ALERTS)
    rule = rule_of(QuotaForm(unit=UNITS[unit], period=period, amount=units, hard=not soft, alerts=alerts))

    async def work(admin: Administration, actor: Actor) -> None:
        await admin.limits.set(actor, scope_id=await whose.id(admin), model=model, rule=rule, is_shadow=shadow)
        if unit == "usd":
            await _note_what_costs_nothing(admin, model)

    administer(config, work)


@quota_app.command("show")
def show_quotas(
    org: OfOrganization = None,
    team: OfTeam = None,
    key: OfKey = None,
    as_json: AsJson = False,
    config: Config = None,
) -> None:
    """Show how far quotas are used up: of an organization, a team or a key, and of what it belongs to."""
    whose = Whose(org, team, key)
    whose.check_one()

    async def work(admin: Administration, _: Actor) -> list[Row]:
        quotas = await admin.quotas.status(await whose.id(admin))
        names = await names_of(admin, {each.limit.scope_id for each in quotas})
        rows: list[Row] = []
        for each in quotas:
            wire = {**quota_to_wire(each), **names[each.limit.scope_id]}
            amounts = {
                "of": amount_text(each.rule.unit, each.rule.amount),
                "more": amount_text(each.rule.unit, each.topped_up),
                "used": amount_text(each.rule.unit, each.committed),
            }
            kinds = {
                "quota": quota_text(each.limit.name),
                "kind": "hard" if each.rule.is_hard else "soft",
                "mode": "shadow" if each.limit.is_shadow else "enforced",
                "reached": [f"{alert.percent}%" for alert in each.alerts] or None,
            }
            rows.append(wire | amounts | kinds)
        return rows

    columns = ("scope", "organization", "team", "key", "model", "quota", "of", "more", "used", "percent", "kind",
               "mode", "reached", "period_id", "period_end")  # fmt: skip
    show(administer(config, work), columns, as_json=as_json)


@quota_app.command("top-up")
def top_up(
    unit: Unit,
    amount: Annotated[
        str, typer.Argument(metavar="AMOUNT", help="How much more, and of which quota: 1000000/month, 50.00/month.")
    ],
    reason: Annotated[str, typer.Option(help="Why, for whoever reads the audit.")],
    org: OfOrganization = None,
    team: OfTeam = None,
    key: OfKey = None,
    model: OfModel = None,
    period: Annotated[
        str | None, typer.Option(help="Such as 2026-11-30, 2026-W49 or 2026-11; unset is the present one.")
    ] = None,
    config: Config = None,
) -> None:
    """Add to a quota for one period only, within two seconds."""
    whose = Whose(org, team, key)
    whose.check_one()
    units, of_period = _amount(unit, amount)

    async def work(admin: Administration, actor: Actor) -> None:
        await admin.quotas.top_up(
            actor,
            scope_id=await whose.id(admin),
            model=model,
            name=quota_name(unit, of_period),
            amount=units,
            reason=reason,
            period_id=period,
        )

    administer(config, work)


@quota_app.command("top-ups")
def list_top_ups(
    org: OfOrganization = None,
    team: OfTeam = None,
    key: OfKey = None,
    as_json: AsJson = False,
    config: Config = None,
) -> None:
    """List what was added to quotas of an organization, a team or a key, in all periods."""
    whose = Whose(org, team, key)
    whose.check_one()

    async def work(admin: Administration, _: Actor) -> list[Row]:
        scope_id = await whose.id(admin)
        rows: list[Row] = []
        for each in await everything(partial(admin.quotas.top_ups, scope_id=scope_id)):
            unit: QuotaUnit = "microusd" if each.name.startswith("quota-microusd/") else "tokens"
            rows.append({**to_wire(each), "quota": quota_text(each.name), "more": amount_text(unit, each.amount)})
        return rows

    columns = ("id", "model", "quota", "period_id", "more", "reason", "created_at")
    show(administer(config, work), columns, as_json=as_json)


@quota_app.command("remove")
def remove_quota(
    quota: Annotated[str, typer.Argument(help="Such as tokens/month or usd/day.")],
    org: OfOrganization = None,
    team: OfTeam = None,
    key: OfKey = None,
    model: OfModel = None,
    config: Config = None,
) -> None:
    """Take a quota away. What was used stays on record, should it be set again."""
    whose = Whose(org, team, key)
    whose.check_one()
    try:
        name = quota_named(quota)
    except ValueError as e:
        raise typer.BadParameter(str(e)) from e
    remove(name, whose, model, config)


def _amount(unit: CliUnit, text: str) -> tuple[int, QuotaPeriod]:
    try:
        return parse_quota_amount(unit, text)
    except ValueError as e:
        raise typer.BadParameter(f"of AMOUNT: {e}") from e


async def _note_what_costs_nothing(admin: Administration, model: str | None) -> None:
    priced = {each.model for each in await everything(admin.prices.page)}
    models = [model] if model is not None else [each.name for each in await everything(admin.catalog.models)]
    for name in models:
        if name not in priced:
            typer.echo(f"evenhand: note: '{name}' has no price, so it costs nothing (evenhand price set)", err=True)
