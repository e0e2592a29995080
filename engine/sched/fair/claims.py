"""Whose turn is it to get a sequence slot: a deal over the tree, one request after another.

At every node the next slot goes to the child that would hold the fewest by its weight, in whole slots of the smallest
weight there; among those that are equal so, to the one with the smallest virtual time. Dealt out slot by slot this is
the weighted max-min share of the slots, whose remainders go round by virtual time.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush, heapreplace
from typing import Protocol

from engine.sched.fair.tree import Entry, Node

_MOST_STALE = 4
"""A heap is made anew when it has so many times more entries than there are children."""


class Claims(Protocol):
    def changed(self, leaf: Node) -> None:
        """A key on the leaf's path may have become smaller: a new seeker, a row or service given back."""
        ...

    def deal(self, root: Node, num: int, look: int) -> list[Entry]:
        """The next seekers, as if each got a slot; those dealt since `start` are passed over.

        Args:
            look: seekers of one leaf that are dealt in one step.
        """
        ...

    def start(self, step: int) -> None:
        """A new step: nothing is dealt."""
        ...

    def rescaled(self, parent: Node) -> None:
        """The smallest weight of its children has changed."""
        ...

    def pass_over(self, entry: Entry) -> None:
        """A seeker that is not to be dealt in this step, having just lost its row."""
        ...

    def seated(self, entry: Entry) -> None:
        """The seeker has got a row; told after the counts on its path have changed."""
        ...


def claim_key(node: Node) -> tuple[bool, int, int, int]:
    """Under a key, who has been parked goes before who has not begun, so that nobody stays parked for ever."""
    is_fresh = bool(node.seekers) and node.seekers[0][0]
    return is_fresh, level_of(node, node.num_rows + node.num_asked + 1), node.v, node.number


def level_of(node: Node, num_rows: int) -> int:
    """So many slots by weight, counted in slots of the sibling with the smallest weight and rounded up: what one has
    more than another within one such slot is for virtual time to decide."""
    assert node.parent is not None, "the root has no siblings"
    return -(-num_rows * node.parent.least_weight // node.weight)


def num_left(node: Node, look: int) -> int:
    """Upper bound of the seekers below the node that can still be dealt in this step; exact for leaves."""
    if node.children:
        return node.num_seekers - node.num_asked
    return min(node.num_seekers, look) - node.num_asked


class HeapClaims:
    """A `Claims` that never visits a node which is not dealt to. No key in its heaps is larger than the true one."""

    def __init__(self) -> None:
        self._step = 0
        self._asked: list[Node] = []

    def changed(self, leaf: Node) -> None:
        for node in leaf.path:
            if node.num_seekers and node.parent is not None:
                self._push(node.parent, node)

    def start(self, step: int) -> None:
        self._step = step
        asked, self._asked = self._asked, []
        for node in asked:
            if node.num_asked:
                node.num_asked = 0
                if node.parent is not None and node.num_seekers:
                    self._push(node.parent, node)

    def rescaled(self, parent: Node) -> None:
        for node in parent.children.values():
            node.claim = claim_key(node) if node.num_seekers else None
        parent.claims[:] = [(node.claim, node) for node in parent.children.values() if node.claim is not None]
        heapify(parent.claims)

    def deal(self, root: Node, num: int, look: int) -> list[Entry]:
        dealt: list[Entry] = []
        while len(dealt) < num:
            node = root
            while node.children:
                child = self._next(node, look)
                if child is None:
                    break
                node = child
            if node.children or node is root:
                if node is root:
                    break
                self._exhaust(node)
                continue
            entry = next(entry for _, _, entry in node.seekers if entry.dealt_at != self._step)
            dealt.append(entry)
            self.pass_over(entry)
        return dealt

    def pass_over(self, entry: Entry) -> None:
        entry.dealt_at = self._step
        for node in entry.leaf.path:
            node.num_asked += 1
            self._asked.append(node)

    def seated(self, entry: Entry) -> None:
        if entry.dealt_at == self._step:
            for node in entry.leaf.path:
                node.num_asked -= 1

    def _exhaust(self, node: Node) -> None:
        """Its seekers are more than may be looked at in one step."""
        node.num_asked = max(node.num_asked, node.num_seekers)
        self._asked.append(node)

    def _next(self, parent: Node, look: int) -> Node | None:
        heap = parent.claims
        while heap:
            key, node = heap[0]
            if key != node.claim or parent.children.get(node.id) is not node or num_left(node, look) <= 0:
                heappop(heap)
                if key == node.claim:
                    node.claim = None
                continue
            current = claim_key(node)
            if current == key:
                return node
            node.claim = current
            heapreplace(heap, (current, node))
        return None

    def _push(self, parent: Node, node: Node) -> None:
        key = claim_key(node)
        if node.claim is not None and node.claim <= key:
            return
        node.claim = key
        heappush(parent.claims, (key, node))
        if len(parent.claims) > _MOST_STALE * (len(parent.children) + 1):
            parent.claims[:] = [each for each in parent.claims if each[0] == each[1].claim]
            heapify(parent.claims)
