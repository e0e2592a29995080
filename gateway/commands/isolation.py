"""``evenhand bench isolation``: a quiet team beside a flooding one, over HTTP, on its own server or another."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from gateway.commands.options import Config

if TYPE_CHECKING:
    from pathlib import Path

    from gateway.bench.figures import Isolation, Shares
    from gateway.bench.isolation import Load, Target

_DEFAULT_SLOTS = 16


class Policy(StrEnum):
    """Those that are compared."""

    FAIR = "fair"
    FCFS = "fcfs"


def _weights(text: str) -> tuple[int, int]:
    quiet, colon, flood = text.partition(":")
    if not colon or not (quiet.isascii() and quiet.isdecimal() and flood.isascii() and flood.isdecimal()):
        raise typer.BadParameter("--weights are not two such as 4:1")
    if 0 in (int(quiet), int(flood)):
        raise typer.BadParameter("--weights are 1 at least")
    return int(quiet), int(flood)


def isolation(
    config: Config = None,
    url: Annotated[
        str | None, typer.Option(help="Server to measure, without /v1; a server of its own is started if left out.")
    ] = None,
    quiet_key: Annotated[str | None, typer.Option(help="Key of the quiet team, with --url.")] = None,
    flood_key: Annotated[
        str | None, typer.Option(help="Key of the other team, with --url; several with commas.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="With --url; the first that it lists if left out.")] = None,
    metrics_url: Annotated[
        str | None, typer.Option(help="Of an Evenhand's metrics, with --url; without it engine time is not known.")
    ] = None,
    policy: Annotated[Policy, typer.Option(help="Of the server of its own.")] = Policy.FAIR,
    slots: Annotated[int, typer.Option(min=1, help="Sequence slots of the server of its own.")] = _DEFAULT_SLOTS,
    flood_keys: Annotated[int, typer.Option(min=1, help="Keys of the flood on the server of its own.")] = 1,
    weights: Annotated[
        str | None,
        typer.Option(
            metavar="QUIET:FLOOD",
            help="Both teams flood instead, and their shares are measured. With --url the weights they have.",
        ),
    ] = None,
    flood: Annotated[int, typer.Option(min=1, help="Requests that a flood has under way.")] = 64,
    samples: Annotated[int, typer.Option(min=1, help="Of the quiet team, alone and beside the flood.")] = 200,
    long_tokens: Annotated[int, typer.Option(min=1, help="Of a long prompt.")] = 6000,
    window: Annotated[float, typer.Option(min=1, help="Seconds that a flood's output is measured.")] = 60.0,
    limit: Annotated[float, typer.Option(min=1, help="Most seconds for the samples of a phase.")] = 600.0,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead of a table.")] = False,
) -> None:
    """What a quiet team notices of another one's flood, over HTTP: waiting times, gaps, shares. Some ten minutes;
    with --samples 20 and --window 20 some four.

    Without --url it starts a server of its own, with two teams of equal weight and the model of the settings: compare
    --policy fair with --policy fcfs. Nothing else should run beside it, and nobody else use the server.
    """
    from gateway.bench.isolation import Load, Target
    from gateway.bench.report import as_json as json_line
    from gateway.bench.report import table

    pair = None if weights is None else _weights(weights)
    load = Load(num_flooding=flood, num_samples=samples, long_prompt=long_tokens, window_s=window, limit_s=limit)
    if url is None:
        if any(given is not None for given in (quiet_key, flood_key, model, metrics_url)):
            raise typer.BadParameter("--quiet-key, --flood-key, --model and --metrics-url go with --url")
        quiet_weight, flood_weight = pair or (1, 1)
        teams = {"quiet": (quiet_weight, 1), "flood": (flood_weight, flood_keys)}
        with _own_target(config, policy=policy, num_slots=slots, teams=teams) as target:
            measured = _measure(target, load, pair)
        where = f"own server, policy {policy}, {slots} slots"
    else:
        others = [key.strip() for key in (flood_key or "").split(",") if key.strip()]
        if not quiet_key or not others:
            raise typer.BadParameter("--url goes with --quiet-key and --flood-key")
        target = Target(url=url, quiet_keys=[quiet_key], flood_keys=others, model=model, metrics_url=metrics_url)
        measured = _measure(target, load, pair)
        where = url
    num_keys = len(target.flood_keys)
    if as_json:
        told = {"where": where, "flood": flood, "flood_keys": num_keys, "long_tokens": long_tokens, "weights": pair}
        typer.echo(json_line(told, measured.lines()), nl=False)
        return
    title = f"{where}; a flood is {flood} requests at a time with {num_keys} key{'s' * (num_keys > 1)}"
    typer.echo(table(title, measured.lines()), nl=False)


def _measure(target: Target, load: Load, weights: tuple[int, int] | None) -> Isolation | Shares:
    from gateway.bench.isolation import CannotMeasure, prepared
    from gateway.commands.administer import CommandError

    async def run() -> Isolation | Shares:
        async with prepared(target, load, _say) as bench:
            return await (bench.isolation() if weights is None else bench.shares(weights))

    try:
        measured = asyncio.run(run())
    except CannotMeasure as e:
        raise CommandError(str(e)) from e
    for failure in measured.failures[:3]:
        _say(f"failed: {failure}")
    return measured


@contextmanager
def _own_target(
    config: Path | None, *, policy: Policy, num_slots: int, teams: dict[str, tuple[int, int]]
) -> Iterator[Target]:
    from gateway.bench.isolation import Target
    from gateway.commands.own_server import own_server
    from gateway.settings_sources import load_settings

    _say(f"starting a server: policy {policy}, {num_slots} slots ...")
    with own_server(load_settings(config).settings, policy=policy, num_slots=num_slots, teams=teams) as server:
        yield Target(
            url=server.url,
            quiet_keys=server.keys["quiet"],
            flood_keys=server.keys["flood"],
            metrics_url=server.metrics_url,
        )


def _say(line: str) -> None:
    sys.stderr.write(line + "\n")
    sys.stderr.flush()
