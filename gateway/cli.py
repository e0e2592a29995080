"""The command ``evenhand``: names, options and exit codes. What a command does stands in `gateway.commands`.

Stdout carries only what a script would want; everything said to people goes to stderr. Every command imports what it
needs when it runs, so that ``evenhand version`` does not wait for torch.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from gateway.settings_sources import SettingsError, load_settings
from gateway.supervisor import CONFIG_EXIT

Config = Annotated[
    Path | None, typer.Option("--config", help="Settings file; else EVENHAND_CONFIG, ./evenhand.toml or the home's.")
]
SupervisorPipe = Annotated[int | None, typer.Option("--supervisor-fd", hidden=True)]

app = typer.Typer(
    name="evenhand",
    help="The agent hub a company runs on its own GPUs.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
config_app = typer.Typer(help="Settings: what is in force, and what there is.", no_args_is_help=True)
model_app = typer.Typer(help="Model files.", no_args_is_help=True)
bench_app = typer.Typer(help="Measurements.", no_args_is_help=True)
app.add_typer(config_app, name="config")
app.add_typer(model_app, name="model")
app.add_typer(bench_app, name="bench")


@app.command()
def serve(
    config: Config = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on.")] = None,
    port: Annotated[int | None, typer.Option(help="Port of the API.")] = None,
    model: Annotated[
        str | None, typer.Option(help="Name of the catalogue, GGUF file or folder of safetensors.")
    ] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda.")] = None,
) -> None:
    """Serve a model on this machine: an engine and a gateway, supervised."""
    from gateway.commands import serve as command

    options = {"server.host": host, "server.port": port, "engine.model": model, "engine.device": device}
    raise typer.Exit(command.run(load_settings(config, options), options))


@app.command()
def engine(config: Config = None, supervisor_fd: SupervisorPipe = None) -> None:
    """Run an engine alone, for a gateway that runs elsewhere on this machine."""
    from gateway.commands import engine as command

    raise typer.Exit(command.run(load_settings(config).settings, supervisor_fd))


@app.command()
def gateway(config: Config = None, supervisor_fd: SupervisorPipe = None) -> None:
    """Run a gateway alone, for an engine that runs elsewhere on this machine."""
    from gateway.commands import gateway as command

    raise typer.Exit(command.run(load_settings(config).settings, supervisor_fd))


@app.command()
def doctor(config: Config = None) -> None:
    """Look for what would keep this machine from serving well; exit code 1 if something would."""
    from gateway.commands import doctor as command

    raise typer.Exit(command.run(load_settings(config).settings))


@app.command()
def version() -> None:
    """Print the version."""
    from gateway import __version__

    typer.echo(__version__)


@config_app.command()
def show(config: Config = None) -> None:
    """Print the settings in force as TOML, with where each came from; secrets are hidden."""
    from gateway.commands.config import effective

    typer.echo(effective(load_settings(config)), nl=False)


@config_app.command()
def reference() -> None:
    """Print every setting as Markdown; deploy/SETTINGS.md is this."""
    from gateway.commands.config import reference as text

    typer.echo(text(), nl=False)


@model_app.command()
def fetch(
    name: Annotated[
        str | None, typer.Argument(help="smollm2-135m-instruct; the model of the settings if left out.")
    ] = None,
    config: Config = None,
) -> None:
    """Fetch a model of the catalogue unless it is there, and print its path."""
    from engine.models.fetch import resolve_model

    settings = load_settings(config).settings
    path, _ = resolve_model(name or settings.engine.model, settings.home)
    typer.echo(path)


@bench_app.command()
def batching(
    config: Config = None,
    jobs: Annotated[int, typer.Option(min=1, help="Requests, all submitted at once.")] = 256,
    slots: Annotated[int, typer.Option(min=1, help="Sequence slots, and the size of a static batch.")] = 32,
    seed: Annotated[int, typer.Option(help="Of the workload.")] = 1,
    repeats: Annotated[int, typer.Option(min=1, help="Runs of each, in alternation; the median is shown.")] = 3,
    picture: Annotated[Path, typer.Option(help="Where the picture goes.")] = Path("batching.png"),
) -> None:
    """Static against continuous batching: one workload, one engine. Nothing else should run beside it."""
    from gateway.commands import bench as command

    settings = load_settings(config).settings
    raise typer.Exit(
        command.batching(settings, num_jobs=jobs, num_slots=slots, seed=seed, repeats=repeats, picture=picture)
    )


def main() -> None:
    """Entry point: errors made by people end in one line and an exit code, not in a traceback."""
    from engine.errors import EngineError
    from gateway.bootstrap_key import KeyFileError
    from gateway.ports import PortError

    try:
        app()
    except (SettingsError, EngineError) as e:
        _fail(e, CONFIG_EXIT)
    except (PortError, KeyFileError) as e:
        _fail(e, 1)


def _fail(error: Exception, code: int) -> None:
    for line in str(error).splitlines():
        print(f"evenhand: {line}", file=sys.stderr)
    sys.exit(code)


if __name__ == "__main__":
    main()
