"""``evenhand alias``, and what ``evenhand model`` does with the catalogue."""

from __future__ import annotations

from typing import Annotated

import typer

from gateway.commands.administer import administer
from gateway.commands.options import AsJson, Config
from gateway.commands.tables import Row, everything, show
from gateway.domain.principal import RequestClass
from gateway.services.administration import Administration
from gateway.services.audit import Actor
from gateway.web.admin.wire import to_wire

alias_app = typer.Typer(help="Other names for models.", no_args_is_help=True)
model_app = typer.Typer(help="Models and their files.", no_args_is_help=True)

Name = Annotated[str, typer.Argument(help="Its name.")]


@alias_app.command("create")
def create_alias(
    name: Name,
    model: Annotated[str, typer.Option(help="Name of the model, as `model list` shows it.")],
    system: Annotated[str | None, typer.Option(help="System message of conversations that bring none.")] = None,
    request_class: Annotated[
        RequestClass | None, typer.Option("--class", help="Highest class of requests under this name.")
    ] = None,
    config: Config = None,
) -> None:
    """Give a model another name."""

    async def work(admin: Administration, actor: Actor) -> None:
        await admin.catalog.create_alias(
            actor, name=name, model=model, system_default=system, request_class=request_class
        )

    administer(config, work)


@alias_app.command("list")
def list_aliases(as_json: AsJson = False, config: Config = None) -> None:
    """List all aliases; their system messages are in the JSON."""

    async def work(admin: Administration, _: Actor) -> list[Row]:
        return [to_wire(each) for each in await everything(admin.catalog.aliases)]

    show(administer(config, work), ("name", "model", "request_class", "created_at"), as_json=as_json)


@alias_app.command("remove")
def remove_alias(name: Name, config: Config = None) -> None:
    """Take a name away; the model stays."""

    async def work(admin: Administration, actor: Actor) -> None:
        await admin.catalog.remove_alias(actor, name)

    administer(config, work)


@model_app.command("list")
def list_models(as_json: AsJson = False, config: Config = None) -> None:
    """List the models that are or were served here."""

    async def work(admin: Administration, _: Actor) -> list[Row]:
        return [to_wire(each) for each in await everything(admin.catalog.models)]

    show(administer(config, work), ("name", "created_at", "disabled_at"), as_json=as_json)


@model_app.command("disable")
def disable_model(name: Name, config: Config = None) -> None:
    """Refuse requests for a model under any name, within two seconds."""
    _set_disabled(name, True, config)


@model_app.command("enable")
def enable_model(name: Name, config: Config = None) -> None:
    """Accept requests for a model again."""
    _set_disabled(name, False, config)


def _set_disabled(name: str, is_disabled: bool, config: Config) -> None:
    async def work(admin: Administration, actor: Actor) -> None:
        await admin.catalog.set_model_disabled(actor, name, is_disabled=is_disabled)

    administer(config, work)
