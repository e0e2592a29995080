"""``evenhand key`` and ``evenhand admin-token``. What is made is alone on stdout, this once."""

from __future__ import annotations

import time
from functools import partial
from typing import Annotated

import typer

from gateway.commands.administer import administer
from gateway.commands.options import AsJson, Config, ExpiresIn, Networks, Organization, Team
from gateway.commands.tables import Row, everything, show
from gateway.domain.principal import RequestClass
from gateway.domain.tenancy import Role
from gateway.services.admin_keys import KeyChange, KeyTerms
from gateway.services.administration import Administration
from gateway.services.audit import Actor
from gateway.web.admin.wire import to_wire

key_app = typer.Typer(help="API keys of teams.", no_args_is_help=True)
admin_token_app = typer.Typer(help="Tokens for the admin API.", no_args_is_help=True)


KeyName = Annotated[str, typer.Argument(metavar="ID", help="Its id or public id, or the key itself.")]


@key_app.command("create")
def create_key(
    org: Organization,
    team: Team,
    name: Annotated[str, typer.Option(help="What the key is for.")],
    default_class: Annotated[
        RequestClass, typer.Option("--class", help="Of its requests that name none, and the highest they may ask for.")
    ] = "interactive",
    model: Annotated[
        list[str] | None, typer.Option(help="Model or alias it may use; can be repeated; unset is all.")
    ] = None,
    endpoint: Annotated[
        list[str] | None, typer.Option(help="chat or completions; can be repeated; unset is all.")
    ] = None,
    expires_in: ExpiresIn = None,
    max_queue_depth: Annotated[int | None, typer.Option(help="Most requests that wait at a time.")] = None,
    deadline_ms: Annotated[int | None, typer.Option(help="Of its requests that set none.")] = None,
    network: Networks = None,
    config: Config = None,
) -> None:
    """Make a key and print it. It cannot be shown again."""
    terms = KeyTerms(
        name=name,
        default_class=default_class,
        models=model or None,
        endpoints=endpoint or None,
        max_queue_depth=max_queue_depth,
        deadline_ms=deadline_ms,
        networks=network or None,
        expires_at_ms=_from_now(expires_in),
    )

    async def work(admin: Administration, actor: Actor) -> str:
        owner = await admin.tenants.team_named(await admin.tenants.organization_named(org), team)
        issued = await admin.keys.create(actor, team_id=owner.id, terms=terms)
        known = {each.name for each in await everything(admin.catalog.models)}
        known.update(each.name for each in await everything(admin.catalog.aliases))
        for unknown in (each for each in issued.key.models or () if each not in known):
            typer.echo(f"evenhand: note: there is no model or alias '{unknown}' today", err=True)
        return issued.raw

    typer.echo(administer(config, work))


@key_app.command("list")
def list_keys(
    org: Annotated[str | None, typer.Option("--org", help="Name of the organization; unset is all.")] = None,
    team: Annotated[str | None, typer.Option("--team", help="Name of the team, with --org.")] = None,
    as_json: AsJson = False,
    config: Config = None,
) -> None:
    """List the keys of a team, of an organization, or all; never the keys themselves."""
    if team is not None and org is None:
        raise typer.BadParameter("--team needs --org")

    async def work(admin: Administration, _: Actor) -> list[Row]:
        organizations = {each.id: each.name for each in await everything(admin.tenants.organizations)}
        owner = None if org is None else (await admin.tenants.organization_named(org))
        if owner is not None and team is not None:
            teams = [await admin.tenants.team_named(owner, team)]
        else:
            owner_id = None if owner is None else owner.id
            teams = await everything(partial(admin.tenants.teams, organization_id=owner_id))
        rows: list[Row] = []
        for each in teams:
            names = {"organization": organizations[each.organization_id], "team": each.name}
            keys = await everything(partial(admin.keys.page, team_id=each.id))
            rows.extend({**to_wire(key), **names} for key in keys)
        return rows

    columns = (
        "id",
        "organization",
        "team",
        "name",
        "public_id",
        "pepper_id",
        "default_class",
        "models",
        "networks",
        "created_at",
        "expires_at",
        "revoked_at",
    )
    show(administer(config, work), columns, as_json=as_json)


@key_app.command("set-networks")
def set_networks(
    key: KeyName,
    network: Networks = None,
    everywhere: Annotated[bool, typer.Option("--everywhere", help="Let it be used from everywhere again.")] = False,
    config: Config = None,
) -> None:
    """Let a key be used from these networks only, in place of those it had; others are refused within two seconds."""
    if bool(network) == everywhere:
        raise typer.BadParameter("name each network with --network, or say --everywhere")

    async def work(admin: Administration, actor: Actor) -> None:
        wanted = KeyChange(networks=None if everywhere else network)
        await admin.keys.change(actor, (await admin.keys.find(key)).id, wanted)

    administer(config, work)


@key_app.command("revoke")
def revoke_key(key: KeyName, config: Config = None) -> None:
    """Refuse a key for good, within two seconds."""

    async def work(admin: Administration, actor: Actor) -> None:
        await admin.keys.revoke(actor, (await admin.keys.find(key)).id)

    administer(config, work)


@admin_token_app.command("create")
def create_token(
    role: Annotated[Role, typer.Option(help="A viewer reads everything and changes nothing.")] = "admin",
    name: Annotated[str, typer.Option(help="What the token is for.")] = "command line",
    expires_in: ExpiresIn = None,
    config: Config = None,
) -> None:
    """Make an admin token and print it. It cannot be shown again."""

    async def work(admin: Administration, actor: Actor) -> str:
        return (await admin.tokens.create(actor, name=name, role=role, expires_at_ms=_from_now(expires_in))).raw

    typer.echo(administer(config, work))


@admin_token_app.command("list")
def list_tokens(as_json: AsJson = False, config: Config = None) -> None:
    """List all admin tokens; never the tokens themselves."""

    async def work(admin: Administration, _: Actor) -> list[Row]:
        return [to_wire(each) for each in await everything(admin.tokens.page)]

    columns = ("id", "name", "role", "public_id", "pepper_id", "created_at", "expires_at", "revoked_at")
    show(administer(config, work), columns, as_json=as_json)


@admin_token_app.command("revoke")
def revoke_token(
    token: Annotated[str, typer.Argument(metavar="ID", help="Its id or public id, or the token itself.")],
    config: Config = None,
) -> None:
    """Refuse an admin token for good, at once."""

    async def work(admin: Administration, actor: Actor) -> None:
        await admin.tokens.revoke(actor, (await admin.tokens.find(token)).id)

    administer(config, work)


def _from_now(duration_ms: int | None) -> int | None:
    return None if duration_ms is None else int(time.time() * 1000) + duration_ms
