"""Metrics of several workers as one: each keeps its own in files of a shared folder, one process sums them up.

This is prometheus_client's multiprocess mode, with one change: a worker's files carry its name and not its process id.
So a worker that is started again counts on where it was, and restarts leave no files behind. The mode is chosen by
environment when prometheus_client is imported, so it is the supervisor that decides.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from prometheus_client import CollectorRegistry, values
from prometheus_client.multiprocess import MultiProcessCollector, mark_process_dead

from gateway.telemetry.metrics import metrics_server
from gateway.telemetry.team_metrics import SharedTeamMetrics, teams_file

FOLDER_VARIABLE = "PROMETHEUS_MULTIPROC_DIR"
WORKER_VARIABLE = "PROMETHEUS_MULTIPROC_WORKER"


def worker_environment(folder: Path, worker: str) -> dict[str, str]:
    """What a worker must have in its environment to keep its metrics in `folder`.

    Args:
        worker: its name, the same after a restart; no underscores.
    """
    assert "_" not in worker, "names of files are split there"
    return {FOLDER_VARIABLE: str(folder), WORKER_VARIABLE: worker}


def join_shared_metrics() -> Path | None:
    """The file for what this process knows of teams, if it keeps its metrics in a shared folder; another one serves
    them then.

    To be called before the first metric is made.
    """
    worker = os.environ.get(WORKER_VARIABLE)
    if worker is None:
        return None
    values.ValueClass = values.MultiProcessValue(lambda: worker)  # type: ignore[no-untyped-call]
    return teams_file(Path(os.environ[FOLDER_VARIABLE]), worker)


@contextmanager
def shared_metrics_server(port: int, folder: Path) -> Iterator[int]:
    """Serve the sums over all workers, living and dead; else like `metrics_server`."""
    registry = CollectorRegistry()
    MultiProcessCollector(registry, str(folder))  # type: ignore[no-untyped-call]
    registry.register(SharedTeamMetrics(folder))
    with metrics_server(port, registry) as port_:
        yield port_


def forget_gauges(folder: Path, worker: str) -> None:
    """A worker has died: what it had in flight and thought of the engine does not count any more. Its counters stay."""
    mark_process_dead(worker, str(folder))  # type: ignore[no-untyped-call]
    teams_file(folder, worker).unlink(missing_ok=True)
