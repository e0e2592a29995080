"""``evenhand org`` and ``evenhand team``."""

from __future__ import annotations

from functools import partial
from typing import Annotated

import typer

from gateway.commands.administer import administer
from gateway.commands.options import AsJson, Config, Organization, Weight
from gateway.commands.tables import Row, everything, show
from gateway.domain.limits.periods import DEFAULT_ZONE
from gateway.services.administration import Administration
from gateway.services.audit import Actor
from gateway.services.tenants import OrganizationChange, TenantChange
from gateway.web.admin.wire import to_wire

org_app = typer.Typer(help="Organizations.", no_args_is_help=True)
team_app = typer.Typer(help="Teams of organizations.", no_args_is_help=True)

Name = Annotated[str, typer.Argument(help="Its name.")]
_ZONE_HELP = "Of its quotas' days, weeks and months, such as Europe/Berlin."
NewWeight = Annotated[int, typer.Argument(help="Share among its siblings, 1 to 1000000.")]


@org_app.command("create")
def create_org(
    name: Name,
    weight: Weight = 1,
    time_zone: Annotated[str, typer.Option(help=_ZONE_HELP)] = DEFAULT_ZONE,
    config: Config = None,
) -> None:
    """Make an organization and print its id."""

    async def work(admin: Administration, actor: Actor) -> str:
        made = await admin.tenants.create_organization(actor, name=name, weight=weight, time_zone=time_zone)
        return made.id

    typer.echo(administer(config, work))


@org_app.command("list")
def list_orgs(as_json: AsJson = False, config: Config = None) -> None:
    """List all organizations."""

    async def work(admin: Administration, _: Actor) -> list[Row]:
        return [to_wire(each) for each in await everything(admin.tenants.organizations)]

    show(administer(config, work), ("id", "name", "weight", "time_zone", "created_at", "disabled_at"), as_json=as_json)


@org_app.command("set-weight")
def weigh_org(name: Name, weight: NewWeight, config: Config = None) -> None:
    """Change an organization's share."""
    _change_org(name, TenantChange(weight=weight), config)


@org_app.command("set-time-zone")
def set_time_zone(
    name: Name, time_zone: Annotated[str, typer.Argument(help=_ZONE_HELP)], config: Config = None
) -> None:
    """Change the time zone that the days, weeks and months of an organization's quotas go by, within two seconds.

    Quotas for which it is another day, week or month in the new zone begin anew at once.
    """
    _change_org(name, OrganizationChange(time_zone=time_zone), config)


@org_app.command("disable")
def disable_org(name: Name, config: Config = None) -> None:
    """Refuse all requests of an organization's keys, within two seconds."""
    _change_org(name, TenantChange(is_disabled=True), config)


@org_app.command("enable")
def enable_org(name: Name, config: Config = None) -> None:
    """Accept requests of an organization's keys again."""
    _change_org(name, TenantChange(is_disabled=False), config)


@team_app.command("create")
def create_team(name: Name, org: Organization, weight: Weight = 1, config: Config = None) -> None:
    """Make a team and print its id."""

    async def work(admin: Administration, actor: Actor) -> str:
        owner = await admin.tenants.organization_named(org)
        return (await admin.tenants.create_team(actor, organization_id=owner.id, name=name, weight=weight)).id

    typer.echo(administer(config, work))


@team_app.command("list")
def list_teams(
    org: Annotated[str | None, typer.Option("--org", help="Name of the organization; unset is all.")] = None,
    as_json: AsJson = False,
    config: Config = None,
) -> None:
    """List the teams of one organization, or all."""

    async def work(admin: Administration, _: Actor) -> list[Row]:
        owner = None if org is None else (await admin.tenants.organization_named(org)).id
        organizations = {each.id: each.name for each in await everything(admin.tenants.organizations)}
        teams = await everything(partial(admin.tenants.teams, organization_id=owner))
        return [{**to_wire(each), "organization": organizations[each.organization_id]} for each in teams]

    columns = ("id", "organization", "name", "weight", "created_at", "disabled_at")
    show(administer(config, work), columns, as_json=as_json)


@team_app.command("set-weight")
def weigh_team(name: Name, weight: NewWeight, org: Organization, config: Config = None) -> None:
    """Change a team's share of its organization."""
    _change_team(org, name, TenantChange(weight=weight), config)


@team_app.command("disable")
def disable_team(name: Name, org: Organization, config: Config = None) -> None:
    """Refuse all requests of a team's keys, within two seconds."""
    _change_team(org, name, TenantChange(is_disabled=True), config)


@team_app.command("enable")
def enable_team(name: Name, org: Organization, config: Config = None) -> None:
    """Accept requests of a team's keys again."""
    _change_team(org, name, TenantChange(is_disabled=False), config)


def _change_org(name: str, wanted: TenantChange, config: Config) -> None:
    async def work(admin: Administration, actor: Actor) -> None:
        organization = await admin.tenants.organization_named(name)
        await admin.tenants.change_organization(actor, organization.id, wanted)

    administer(config, work)


def _change_team(org: str, name: str, wanted: TenantChange, config: Config) -> None:
    async def work(admin: Administration, actor: Actor) -> None:
        team = await admin.tenants.team_named(await admin.tenants.organization_named(org), name)
        await admin.tenants.change_team(actor, team.id, wanted)

    administer(config, work)
