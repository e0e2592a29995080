"""What each team has at the moment, and what it was charged since the engine started.

Reads the tree and the roster and changes neither. Virtual time cannot tell a total, since it is lifted when a team
wakes or is forgiven its lag, and forgotten when a team has no requests; so charges are added up here, once a step.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.sched.fair.round import Round
from engine.sched.fair.shop import Shop
from engine.sched.fair.tree import SCALE, Node
from engine.standing import TeamShare

RECENT_US = 10_000_000
"""A team that was served within the last so much time on the engine's clock is told of though it has no requests: who
asks more often than that misses nothing of what anybody was charged."""

TeamIds = tuple[str, str]
"""Organization, team."""


MOST_US = 2**62
"""Of what is told: more does not fit into a message."""


@dataclass(slots=True)
class _Slots:
    """A team's part of the sequence slots.

    Attributes:
        num_lacking: whole slots of its share that it does not hold.
    """

    num_borrowed: int
    num_lacking: int
    num_lent: int = 0


@dataclass(slots=True)
class _Served:
    """Microseconds by team: settled ones, and those of the present and the last `RECENT_US`."""

    settled: dict[TeamIds, int] = field(default_factory=dict)
    last: dict[TeamIds, int] = field(default_factory=dict)
    present: dict[TeamIds, int] = field(default_factory=dict)
    since_us: int = 0

    def turn(self, now_us: int) -> None:
        self.since_us = now_us
        for team, served_us in self.last.items():
            self.settled[team] = self.settled.get(team, 0) + served_us
        self.last, self.present = self.present, {}

    def total_us(self, team: TeamIds) -> int:
        return self.settled.get(team, 0) + self.last.get(team, 0) + self.present.get(team, 0)


class TeamBooks:
    """A running total for each team that was ever served, and the answer to `Policy.teams`.

    Work done elsewhere (`charge_external`) is in nobody's total: the engine that did it has it in its own.
    """

    def __init__(self, shop: Shop) -> None:
        self._shop = shop
        self._served = _Served()
        self._lag_us = 0

    def sealed(self, done: Round) -> None:
        """Add what the step was charged for."""
        if done.now_us - self._served.since_us >= RECENT_US:
            self._served.turn(done.now_us)
        self._lag_us = done.lag_us
        present = self._served.present
        for entry in done.granted:
            path = entry.leaf.path
            ids = path[0].id, path[1].id
            present[ids] = present.get(ids, 0) + entry.charged_us

    def shares(self) -> tuple[TeamShare, ...]:
        """Every team that has requests, or is ahead of its siblings, or was served lately; the oldest nodes first.

        A team's share is the product of weight by weight present over its levels. Of the slots it makes a fraction:
        rounded up for what is borrowed and down for what is lent, so that a remainder, which goes now to one team and
        now to another, is neither. Slots that nobody holds are not lent.
        """
        root = self._shop.tree.root
        teams = [team for org in root.children.values() for team in org.children.values()]
        slots = self._slots(teams)
        parked: dict[Node, int] = {}
        for entry in self._shop.roster.parked:
            team = entry.leaf.path[1]
            parked[team] = parked.get(team, 0) + 1
        shares = []
        told: set[TeamIds] = set()
        for team in teams:
            lag_us = self._lag(team)
            if not team.num_requests and lag_us >= 0:
                continue
            org, _ = team.path
            ids = org.id, team.id
            told.add(ids)
            shares.append(
                TeamShare(
                    org_id=org.id,
                    team_id=team.id,
                    entitled_ppm=_part_of(1_000_000, team)[0],
                    served_us=self._served.total_us(ids),
                    lag_us=max(-MOST_US, min(MOST_US, lag_us)),
                    num_waiting=team.num_requests - team.num_rows,
                    num_parked=parked.get(team, 0),
                    num_slots=team.num_rows,
                    num_borrowed_slots=slots[team].num_borrowed,
                    num_lent_slots=slots[team].num_lent,
                )
            )
        lately = (ids for ids in {**self._served.last, **self._served.present} if ids not in told)
        shares += [TeamShare(org_id=ids[0], team_id=ids[1], served_us=self._served.total_us(ids)) for ids in lately]
        return tuple(shares)

    def _lag(self, team: Node) -> int:
        """Behind the clock of its organization's teams.

        Without backlog it has a claim to Θ at most (`virtual_time.forgive`), and without requests to nothing.
        """
        assert team.parent is not None, "a team has an organization"
        behind = team.parent.clock * team.weight - team.service
        lag_us = behind // SCALE if behind >= 0 else -(-behind // SCALE)
        if not team.num_requests:
            return min(lag_us, 0)
        return lag_us if team.is_backlogged else min(lag_us, self._lag_us)

    def _slots(self, teams: list[Node]) -> dict[Node, _Slots]:
        slots = {}
        for team in teams:
            whole, rest = _part_of(self._shop.max_sequences, team)
            slots[team] = _Slots(max(0, team.num_rows - whole - bool(rest)), max(0, whole - team.num_rows))
        num_borrowed = sum(each.num_borrowed for each in slots.values())
        num_lacking = sum(each.num_lacking for each in slots.values())
        if num_lacking:
            # What others hold is divided among those who lack it; the rest of what is lacking is free.
            num_taken = min(num_borrowed, num_lacking)
            so_far = 0
            for each in slots.values():
                before = num_taken * so_far // num_lacking
                so_far += each.num_lacking
                each.num_lent = num_taken * so_far // num_lacking - before
        return slots


def _part_of(total: int, team: Node) -> tuple[int, int]:
    """The team's share by weight of a total, and what is left over by the division; nothing without requests."""
    org = team.parent
    assert org is not None, "a team has an organization"
    assert org.parent is not None, "an organization has a root"
    if not team.num_requests:
        return 0, 0
    return divmod(total * org.weight * team.weight, org.parent.weight_present * org.weight_present)
