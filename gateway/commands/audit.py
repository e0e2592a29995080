"""``evenhand audit``."""

from __future__ import annotations

import asyncio

import typer

from gateway.commands.administer import opened
from gateway.commands.options import Config
from gateway.services.audit import breaks
from gateway.settings import Settings
from gateway.settings_sources import load_settings

audit_app = typer.Typer(help="The audit trail.", no_args_is_help=True)


@audit_app.command()
def verify(config: Config = None) -> None:
    """Check that the audit's chain is whole; a line for each break, and exit code 1 if there is one."""
    raise typer.Exit(asyncio.run(_verify(load_settings(config).settings)))


async def _verify(settings: Settings) -> int:
    num_breaks = 0
    async with opened(settings) as (database, _):
        async for each in breaks(database):
            typer.echo(each)
            num_breaks += 1
    if num_breaks == 0:
        typer.echo("The audit's chain is whole.", err=True)
    return min(num_breaks, 1)
