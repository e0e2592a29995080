"""What each team has in the engine, as metrics: the last answer of the engine, and nothing that is older.

Of several workers all ask the same engine, so their answers are not added up: each writes its own to a file, and who
serves the metrics reads one of them. Not as prometheus_client's gauges, which can be removed only in one process. Knows
nothing of how the engine is asked.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from gateway.domain.principal import TeamNames

OTHER = "other"
"""Organization and team of the teams that have no labels of their own."""
MAX_NAME = 100
"""Most characters of a name in a label."""
STALE_S = 10.0
"""A worker that has written nothing for so long hangs: another one's answer is shown."""

_LABELS = ("organization", "team")
_log = logging.getLogger(__name__)


class TeamLoad(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine says of the team with this fairness node; `engine.standing.TeamShare` has the meanings."""

    node_id: str
    entitled_ppm: int = 0
    served_us: int = 0
    lag_us: int = 0
    num_waiting: int = 0
    num_parked: int = 0
    num_slots: int = 0
    num_borrowed_slots: int = 0
    num_lent_slots: int = 0


class TeamRow(msgspec.Struct):
    """What is shown under one pair of labels.

    Attributes:
        is_present: the engine told of the team; else only its total is shown.
        lag_us: of several teams the largest: of who is furthest behind.
    """

    organization: str
    team: str
    is_present: bool = False
    entitled_ppm: int = 0
    served_us: int = 0
    lag_us: int = 0
    num_waiting: int = 0
    num_parked: int = 0
    num_slots: int = 0
    num_borrowed_slots: int = 0
    num_lent_slots: int = 0

    def add(self, load: TeamLoad) -> None:
        self.lag_us = max(self.lag_us, load.lag_us) if self.is_present else load.lag_us
        self.is_present = True
        self.entitled_ppm += load.entitled_ppm
        self.num_waiting += load.num_waiting
        self.num_parked += load.num_parked
        self.num_slots += load.num_slots
        self.num_borrowed_slots += load.num_borrowed_slots
        self.num_lent_slots += load.num_lent_slots


_GAUGES: tuple[tuple[str, str, Callable[[TeamRow], float]], ...] = (
    (
        "evenhand_team_entitled_ratio",
        "A team's share of the engine by weight among those that have requests now, between 0 and 1.",
        lambda row: row.entitled_ppm / 1e6,
    ),
    (
        "evenhand_team_lag_seconds",
        "Engine time that a team is behind the other teams of its organization; negative: ahead of them.",
        lambda row: row.lag_us / 1e6,
    ),
    (
        "evenhand_team_waiting_requests",
        "Sequences of a team that wait for a slot in the engine, parked ones included.",
        lambda row: row.num_waiting,
    ),
    (
        "evenhand_team_parked_requests",
        "Sequences of a team that have given up their slot and kept their blocks; some of those that wait.",
        lambda row: row.num_parked,
    ),
    ("evenhand_team_slots", "Slots of the engine that a team holds.", lambda row: row.num_slots),
    (
        "evenhand_team_borrowed_slots",
        "Slots that a team holds above its share by weight, rounded up.",
        lambda row: row.num_borrowed_slots,
    ),
    (
        "evenhand_team_lent_slots",
        "Slots of a team's share by weight, rounded down, that others hold.",
        lambda row: row.num_lent_slots,
    ),
)
_SERVED = (
    "evenhand_team_engine_seconds",
    "Engine time that a team was charged since the engine started, without the fixed part of each step.",
)


def nobody_known(node_id: str) -> TeamNames | None:  # noqa: ARG001 - the argument's name is part of it
    """No names for any team."""
    return None


class TeamLabels:
    """Who has labels of his own: the first so many that are seen."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._labels: dict[TeamNames, TeamNames] = {}

    def of(self, names: TeamNames) -> TeamNames:
        labels = self._labels.get(names)
        if labels is None:
            if len(self._labels) >= self._most:
                return OTHER, OTHER
            labels = self._labels[names] = (names[0][:MAX_NAME], names[1][:MAX_NAME])
        return labels


class TeamMetrics(Collector):
    """The metrics of one process.

    Args:
        names: of the team with a fairness node, None if it is not known.
        file: where each answer is written to, for the process that serves the metrics; None if that is this one.
    """

    def __init__(
        self, labels: TeamLabels, names: Callable[[str], TeamNames | None], *, file: Path | None = None
    ) -> None:
        self._labels = labels
        self._names = names
        self._file = file
        self._served_us: dict[str, int] = {}  # by node, of all that were ever told of: totals outlive their teams' rest
        self._rows: Sequence[TeamRow] = ()

    def update(self, teams: Iterable[TeamLoad] | None) -> None:
        """The engine's answer now; None if it gives none."""
        self._rows = () if teams is None else self._rows_of(teams)
        if self._file is not None:
            # Whatever is wrong with the disk, the next answer tries again; meanwhile the file grows stale.
            try:
                _write(self._file, None if teams is None else self._rows)
            except OSError as e:
                _log.warning("metrics of teams could not be written: %s", e.strerror)

    def collect(self) -> Iterator[Metric]:
        return _families(self._rows)

    def _rows_of(self, teams: Iterable[TeamLoad]) -> Sequence[TeamRow]:
        rows: dict[TeamNames, TeamRow] = {}
        for load in teams:
            self._served_us[load.node_id] = load.served_us
            if _is_active(load):
                self._row(rows, load.node_id).add(load)
        for node_id, served_us in self._served_us.items():
            self._row(rows, node_id).served_us += served_us
        return tuple(rows.values())

    def _row(self, rows: dict[TeamNames, TeamRow], node_id: str) -> TeamRow:
        names = self._names(node_id)
        labels = (OTHER, OTHER) if names is None else self._labels.of(names)
        row = rows.get(labels)
        if row is None:
            row = rows[labels] = TeamRow(*labels)
        return row


class SharedTeamMetrics(Collector):
    """The metrics of several workers: of the first one by name that has an answer which is not stale."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def collect(self) -> Iterator[Metric]:
        return _families(self._rows())

    def _rows(self) -> Sequence[TeamRow]:
        for file in sorted(self._folder.glob("teams_*.json")):
            with suppress(FileNotFoundError):  # its worker has just ended
                if time.time() - file.stat().st_mtime <= STALE_S:
                    return msgspec.json.decode(file.read_bytes(), type=list[TeamRow])
        return ()


def teams_file(folder: Path, worker: str) -> Path:
    """What the worker writes and `SharedTeamMetrics` reads."""
    return folder / f"teams_{worker}.json"


def _write(file: Path, rows: Sequence[TeamRow] | None) -> None:
    if rows is None:
        file.unlink(missing_ok=True)
        return
    draft = file.with_suffix(".draft")
    draft.write_bytes(msgspec.json.encode(rows))
    draft.replace(file)


def _is_active(load: TeamLoad) -> bool:
    """Else it was served lately and has nothing now."""
    return bool(load.entitled_ppm or load.num_waiting or load.num_slots or load.lag_us)


def _families(rows: Sequence[TeamRow]) -> Iterator[Metric]:
    served = CounterMetricFamily(*_SERVED, labels=_LABELS)
    for row in rows:
        served.add_metric((row.organization, row.team), row.served_us / 1e6)
    yield served
    for name, documentation, value in _GAUGES:
        gauge = GaugeMetricFamily(name, documentation, labels=_LABELS)
        for row in rows:
            if row.is_present:
                gauge.add_metric((row.organization, row.team), value(row))
        yield gauge
