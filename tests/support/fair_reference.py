"""The rules of window and slots once more, slow and obvious: every question looks at everybody, nothing is kept."""

from __future__ import annotations

from fractions import Fraction
from math import ceil, floor

from engine.sched.fair.policy import FairShare
from engine.sched.fair.tree import KEY_LEVELS, SCALE, Entry, Node
from engine.sched.fair.virtual_time import forgive


class SlowWindow:
    """Holds the set of those who want something; asks all of them each time."""

    def __init__(self, stamp: int, lag_us: int) -> None:
        self._lag_us = lag_us
        self._wanting: list[Entry] = []
        self._seen: set[Node] = set()

    def add(self, entry: Entry) -> None:
        for node in entry.leaf.path:
            if node not in self._seen:
                self._seen.add(node)
                forgive(node, self._lag_us)
        self._wanting.append(entry)

    def remove(self, entry: Entry) -> None:
        self._wanting.remove(entry)

    def gave_back(self, entry: Entry) -> None:
        """Nothing is kept."""

    def holds(self, entry: Entry, width_us: int) -> bool:
        for level, node in enumerate(entry.leaf.path[:KEY_LEVELS]):
            siblings = {e.leaf.path[level] for e in self._wanting if e.leaf.path[level].parent is node.parent}
            least = min(sibling.v for sibling in siblings)
            if node.service - least * node.weight > width_us * SCALE:
                return False
        return True


class SlowClaims:
    """Deals by looking at all children of every node."""

    def __init__(self) -> None:
        self._step = 0
        self._dealt: list[Entry] = []

    def changed(self, leaf: Node) -> None:
        """Nothing is kept."""

    def rescaled(self, parent: Node) -> None:
        """Nothing is kept."""

    def start(self, step: int) -> None:
        self._step = step
        self._dealt = []

    def pass_over(self, entry: Entry) -> None:
        entry.dealt_at = self._step
        self._dealt.append(entry)

    def seated(self, entry: Entry) -> None:
        if entry in self._dealt:
            self._dealt.remove(entry)

    def deal(self, root: Node, num: int, look: int) -> list[Entry]:
        found: list[Entry] = []
        while len(found) < num:
            node = root
            while node.children:
                able = [child for child in node.children.values() if self._open(child, look)]
                if not able:
                    return found
                node = min(able, key=self._key)
            if node is root:
                return found
            entry = next(e for _, _, e in node.seekers if e.dealt_at != self._step)
            self.pass_over(entry)
            found.append(entry)
        return found

    def _num_dealt(self, node: Node) -> int:
        return sum(node in entry.leaf.path for entry in self._dealt)

    def _open(self, node: Node, look: int) -> bool:
        if node.children:
            return any(self._open(child, look) for child in node.children.values())
        return min(node.num_seekers, look) > self._num_dealt(node)

    def _key(self, node: Node) -> tuple[bool, int, int, int]:
        assert node.parent is not None
        least = min(sibling.weight for sibling in node.parent.children.values())
        level = ceil(Fraction((node.num_rows + self._num_dealt(node) + 1) * least, node.weight))
        return bool(node.seekers) and node.seekers[0][0], level, node.v, node.number


class SlowYielders:
    """The three cases of `slots.py` with fractions, each sibling asked each time."""

    def __init__(self) -> None:
        self._v: dict[Node, tuple[tuple[int, int], dict[Node, Fraction]]] = {}

    def __call__(self, claimant: Entry, num_slots: int, lag_us: int, step: int) -> Entry | None:
        for node in claimant.leaf.path[:KEY_LEVELS]:
            assert node.parent is not None
            siblings = [child for child in node.parent.children.values() if child is not node and child.num_rows]
            v = self._as_read(node.parent, step)
            rich = [s for s in siblings if self._takes_by_rows(node, s, num_slots, lag_us, v)]
            lucky = [s for s in siblings if s not in rich and self._takes_by_time(node, s, num_slots, lag_us, v)]
            rich.sort(key=lambda s: (-Fraction(s.num_rows, s.weight), -s.v, s.number))
            lucky.sort(key=lambda s: (-s.v, s.number))
            for giver in (*rich, *lucky):
                if able := self._able(giver, step):
                    return able
            num_slots = node.num_rows
        return None

    def _as_read(self, parent: Node, step: int) -> dict[Node, Fraction]:
        made_for = step, parent.rows_version
        if parent not in self._v or self._v[parent][0] != made_for:
            self._v[parent] = made_for, {child: Fraction(child.v) for child in parent.children.values()}
        return self._v[parent][1]

    def _takes_by_rows(self, node: Node, sibling: Node, num_slots: int, lag_us: int, v: dict[Node, Fraction]) -> bool:
        present = [child for child in _family(node) if child.num_requests]
        part = Fraction(num_slots, sum(child.weight for child in present))
        lacking = floor(part * node.weight) - node.num_rows if sibling.num_rows > part * sibling.weight else 0
        able = (
            num
            for num in (2, 1)
            if Fraction(sibling.num_rows - num, sibling.weight) >= Fraction(node.num_rows + num, node.weight)
        )
        more = next(able, 0)
        if max(lacking, more) > 1:
            return True
        is_caught_up = 2 * self._lead(node, sibling, v) >= -(lag_us * SCALE // 4)
        return max(lacking, more) == 1 and (node.num_rows == 0 or is_caught_up)

    def _takes_by_time(self, node: Node, sibling: Node, num_slots: int, lag_us: int, v: dict[Node, Fraction]) -> bool:
        part = Fraction(num_slots * sibling.weight, sum(child.weight for child in _family(node) if child.num_requests))
        if sibling.num_rows < max(floor(part), 2 if part >= 1 else 1):
            return False
        is_ahead = self._lead(node, sibling, v) > lag_us * SCALE // 4
        return is_ahead and Fraction(sibling.num_rows, sibling.weight) >= Fraction(node.num_rows - 1, node.weight)

    def _lead(self, node: Node, sibling: Node, v: dict[Node, Fraction]) -> Fraction:
        return (v[sibling] - node.v) * max(node.weight, sibling.weight)

    def _able(self, node: Node, step: int) -> Entry | None:
        if not node.children:
            settled = [entry for entry in node.residents if entry.seated_at != step]
            return max(settled, key=lambda entry: entry.request.arrival, default=None)
        holders = [child for child in node.children.values() if child.num_rows]
        holders.sort(key=lambda child: (-Fraction(child.num_rows, child.weight), -child.v, child.number))
        return next((found for child in holders if (found := self._able(child, step)) is not None), None)


def _family(node: Node) -> list[Node]:
    assert node.parent is not None
    return list(node.parent.children.values())


def slow_fair_share(*args: object, **kwargs: object) -> FairShare:
    return FairShare(*args, claims=SlowClaims(), make_window=SlowWindow, yielders=SlowYielders(), **kwargs)
