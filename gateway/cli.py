"""The command ``evenhand``: names, options and exit codes. What a command does stands in `gateway.commands`.

Stdout carries only what a script would want; everything said to people goes to stderr. Every command imports what it
needs when it runs, so that ``evenhand version`` does not wait for torch.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer
import typer.core

from gateway.commands.administer import CommandError
from gateway.commands.apply import apply
from gateway.commands.audit import audit_app
from gateway.commands.catalog import alias_app, model_app
from gateway.commands.isolation import isolation
from gateway.commands.keys import admin_token_app, key_app
from gateway.commands.limits import limit_app
from gateway.commands.options import Config
from gateway.commands.prices import price_app
from gateway.commands.quotas import quota_app
from gateway.commands.tenancy import org_app, team_app
from gateway.domain.credential import hide_credentials
from gateway.errors import EvenhandError
from gateway.settings_sources import SettingsError, load_settings
from gateway.supervisor import CONFIG_EXIT

SupervisorPipe = Annotated[int | None, typer.Option("--supervisor-fd", hidden=True)]


class _RootCommand(typer.core.TyperGroup):
    """Usage errors repeat what was given; here they do so without what looks like a credential."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except Exception as e:
            # By its shape: the errors of command lines are typer's own copy of click's, which it does not export.
            message = getattr(e, "message", None)
            if isinstance(message, str):
                e.message = hide_credentials(message)  # type: ignore[attr-defined]  # it has been read there
            raise


app = typer.Typer(
    name="evenhand",
    cls=_RootCommand,
    context_settings={"help_option_names": ["-h", "--help"]},
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
config_app = typer.Typer(help="Settings: what is in force, and what there is.", no_args_is_help=True)
ledger_app = typer.Typer(help="The usage ledger.", no_args_is_help=True)
bench_app = typer.Typer(help="Measurements.", no_args_is_help=True)
app.add_typer(org_app, name="org")
app.add_typer(team_app, name="team")
app.add_typer(key_app, name="key")
app.add_typer(admin_token_app, name="admin-token")
app.add_typer(limit_app, name="limit")
app.add_typer(quota_app, name="quota")
app.add_typer(price_app, name="price")
app.add_typer(model_app, name="model")
app.add_typer(alias_app, name="alias")
app.add_typer(audit_app, name="audit")
app.add_typer(ledger_app, name="ledger")
app.add_typer(config_app, name="config")
app.add_typer(bench_app, name="bench")
app.command()(apply)
bench_app.command()(isolation)


def _print_version(is_asked: bool) -> None:
    if is_asked:
        version()
        raise typer.Exit


@app.callback()
def root(
    _: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """The agent hub a company runs on its own GPUs."""


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
    """Run an engine alone, for a gateway that runs elsewhere."""
    from gateway.commands import engine as command

    raise typer.Exit(command.run(load_settings(config).settings, supervisor_fd))


@app.command()
def gateway(config: Config = None, supervisor_fd: SupervisorPipe = None) -> None:
    """Run a gateway alone, for an engine that runs elsewhere."""
    from gateway.commands import gateway as command

    raise typer.Exit(command.run(load_settings(config).settings, supervisor_fd))


@app.command()
def doctor(config: Config = None) -> None:
    """Look for what would keep this machine from serving well; exit code 1 if something would."""
    from gateway.commands import doctor as command

    raise typer.Exit(command.run(load_settings(config).settings))


@app.command()
def health(config: Config = None) -> None:
    """Ask the server of these settings, on this machine, whether it answers; exit code 1 if it does not."""
    from gateway.commands import health as command

    raise typer.Exit(command.run(load_settings(config).settings))


@app.command()
def migrate(
    revision: Annotated[str, typer.Argument(help="Where to: a revision, or head for the newest.")] = "head",
    config: Config = None,
    yes: Annotated[bool, typer.Option("--yes", help="Go down, too, and lose what is deleted.")] = False,
) -> None:
    """Bring the database's tables to a revision. Every start brings them to the newest.

    Going down deletes what an earlier revision has no room for; `base` has no tables, so all keys, the ledger and the
    audit are lost. It is refused without --yes. Stop all servers and make a backup first.
    """
    from gateway.commands import migrate as command

    raise typer.Exit(command.run(load_settings(config).settings, revision, may_lose=yes))


@app.command("curve-keys")
def curve_keys() -> None:
    """Make a pair of CURVE keys, for an engine and gateways on different machines."""
    from gateway.commands import curve as command

    raise typer.Exit(command.run())


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


@ledger_app.command("verify")
def verify_ledger(config: Config = None) -> None:
    """Check that the ledger adds up; a line for each mismatch, and exit code 1 if there is one."""
    from gateway.commands import ledger as command

    raise typer.Exit(command.verify(load_settings(config).settings))


@app.command()
def sim(
    workloads: Annotated[list[str] | None, typer.Argument(help="Names of workloads; all if left out.")] = None,
    policy: Annotated[list[str] | None, typer.Option(help="A policy to run; repeat for more; all if left out.")] = None,
    profile: Annotated[str, typer.Option(help="What steps cost: cpu, gpu8b, or a file of bench calibrate.")] = "cpu",
    seed: Annotated[int, typer.Option(help="Of the workloads.")] = 1,
    plot: Annotated[Path | None, typer.Option(help="A folder for a picture of each workload.")] = None,
    replay: Annotated[Path | None, typer.Option(help="An engine's recording, to replay instead of workloads.")] = None,
) -> None:
    """Simulate the scheduler and others under named workloads, without a model, and print what each team gets.

    With --replay: exit code 1 if the recorded plans do not come out again.
    """
    from gateway.commands import sim as command

    if replay is not None:
        raise typer.Exit(command.run_replay(replay))
    raise typer.Exit(command.run(workloads or [], policies=policy or [], profile=profile, seed=seed, plot_folder=plot))


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


@bench_app.command()
def calibrate(
    config: Config = None,
    output: Annotated[Path | None, typer.Option(help="Where the file goes; where engines look, if left out.")] = None,
    repeats: Annotated[int, typer.Option(min=3, help="Times that each step is measured; medians count.")] = 5,
) -> None:
    """Measure what steps cost here, which fair share plans with, and print the file's path. Some 40 s on two cores.

    Nothing else should run beside it: a busy machine looks slower than it is.
    """
    from gateway.commands import bench as command

    raise typer.Exit(command.calibrate(load_settings(config).settings, output=output, repeats=repeats))


def main() -> None:
    """Entry point: errors made by people end in one line and an exit code, not in a traceback."""
    try:
        app()
    except Exception as e:
        code = _exit_code(e)
        if code is None:
            raise
        _fail(e, code)


def _exit_code(error: Exception) -> int | None:
    """For what people can put right; None for a bug of ours."""
    # Here, since importing these takes longer than most commands.
    from engine.errors import EngineError
    from gateway.pepper_file import PepperError
    from gateway.ports import PortError
    from gateway.storage.errors import UnusableDatabase

    if isinstance(error, SettingsError | EngineError | PepperError | UnusableDatabase):
        return CONFIG_EXIT
    return 1 if isinstance(error, PortError | CommandError | EvenhandError) else None


def _fail(error: Exception, code: int) -> None:
    for line in str(error).splitlines():
        print(f"evenhand: {hide_credentials(line)}", file=sys.stderr)
    sys.exit(code)


if __name__ == "__main__":
    main()
