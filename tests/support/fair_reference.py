"""The rules of window and slots once more, slow and obvious: every question looks at everybody, nothing is kept."""

from __future__ import annotations

from fractions import Fraction
from math import ceil

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
        least = 1 << min(sibling.weight for sibling in node.parent.children.values()).bit_length() - 1
        level = ceil(Fraction((node.num_rows + self._num_dealt(node) + 1) * least, node.weight))
        return bool(node.seekers) and node.seekers[0][0], level, node.v, node.number


def slow_fair_share(*args: object, **kwargs: object) -> FairShare:
    return FairShare(*args, claims=SlowClaims(), make_window=SlowWindow, **kwargs)
