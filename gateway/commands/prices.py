"""``evenhand price``. Decimal USD for a million tokens here, micro-USD inside."""

from __future__ import annotations

from functools import partial
from typing import Annotated

import typer

from gateway.commands.administer import administer
from gateway.commands.options import AsJson, Config, moment_ms, usd
from gateway.commands.tables import Row, everything, show
from gateway.limit_notation import usd_text
from gateway.services.administration import Administration
from gateway.services.audit import Actor
from gateway.web.admin.wire import price_to_wire

price_app = typer.Typer(help="What models' tokens cost, in USD for a million tokens.", no_args_is_help=True)

TOKENS = ("prompt", "cached", "completion")


@price_app.command("set")
def set_price(
    model: Annotated[str, typer.Argument(help="Name of the model, as `model list` shows it.")],
    prompt: Annotated[int, typer.Option(parser=usd, metavar="USD", help="Of prompt tokens, such as 0.15.")],
    completion: Annotated[int, typer.Option(parser=usd, metavar="USD", help="Of tokens that are written.")],
    cached: Annotated[
        int | None,
        typer.Option(parser=usd, metavar="USD", help="Of prompt tokens found in the cache; unset is as the others."),
    ] = None,
    valid_from: Annotated[
        int | None,
        typer.Option("--from", parser=moment_ms, metavar="TIME", help="Such as 2026-12-01T00:00:00Z; unset is now."),
    ] = None,
    config: Config = None,
) -> None:
    """Set what a million tokens of a model cost from a moment on, until the next price.

    A price cannot be changed or removed afterwards. Only a model's first one may begin in the past.
    """

    async def work(admin: Administration, actor: Actor) -> None:
        await admin.prices.add(
            actor, model=model, prompt=prompt, cached=cached, completion=completion, valid_from_ms=valid_from
        )

    administer(config, work)


@price_app.command("list")
def list_prices(
    model: Annotated[str | None, typer.Option(help="Only of this model.")] = None,
    as_json: AsJson = False,
    config: Config = None,
) -> None:
    """List all prices there were, are and will be; in the JSON in micro-USD."""

    async def work(admin: Administration, _: Actor) -> list[Row]:
        return [price_to_wire(each) for each in await everything(partial(admin.prices.page, model=model))]

    rows = administer(config, work)
    if not as_json:
        rows = [{**row, **{name: usd_text(row[name]) for name in TOKENS}} for row in rows]
    show(rows, ("model", "valid_from", *TOKENS), as_json=as_json)
