"""The window of one step: which requests stand where their siblings have not been left too far behind.

Among the children of a node that want something in this step, those whose virtual time is close to the smallest may be
served: the distance is measured in the child's own service, so that scaling all weights changes nothing.
"""

from __future__ import annotations

from heapq import heappop, heappush, heapreplace
from typing import Protocol

from engine.sched.fair.tree import KEY_LEVELS, SCALE, Entry, Node
from engine.sched.fair.virtual_time import forgive


class Window(Protocol):
    def add(self, entry: Entry) -> None:
        """The request wants something in this step."""
        ...

    def remove(self, entry: Entry) -> None:
        """It does no more."""
        ...

    def gave_back(self, entry: Entry) -> None:
        """Some of what was charged in this step was given back."""
        ...

    def holds(self, entry: Entry, width_us: int) -> bool:
        """At every node from org to key it is within the width of the sibling that is furthest behind."""
        ...


class HeapWindow:
    """A `Window` that touches the paths of those who want something, and no other node.

    Args:
        stamp: number of this step; the scratch fields of nodes with another one are stale.
        lag_us: Θ.
    """

    def __init__(self, stamp: int, lag_us: int) -> None:
        self._stamp = stamp
        self._lag_us = lag_us

    def add(self, entry: Entry) -> None:
        for node in reversed(entry.leaf.path):
            self._open(node)
            node.demand += 1
            if node.demand > 1:
                return
            parent = node.parent
            assert parent is not None, "the root stands on no path"
            self._open(parent)
            heappush(parent.heap, (node.v, node.number, node))

    def remove(self, entry: Entry) -> None:
        for node in reversed(entry.leaf.path):
            node.demand -= 1
            if node.demand:
                return

    def gave_back(self, entry: Entry) -> None:
        for node in entry.leaf.path:
            if node.parent is not None and node.stamp == self._stamp and node.demand:
                heappush(node.parent.heap, (node.v, node.number, node))

    def holds(self, entry: Entry, width_us: int) -> bool:
        width = width_us * SCALE
        for node in entry.leaf.path[:KEY_LEVELS]:
            parent = node.parent
            assert parent is not None, "the root stands on no path"
            if node.service - self._least(parent) * node.weight > width:
                return False
        return True

    def _open(self, node: Node) -> None:
        if node.stamp == self._stamp:
            return
        node.stamp, node.demand = self._stamp, 0
        node.heap.clear()
        if node.parent is not None:
            forgive(node, self._lag_us)

    def _least(self, parent: Node) -> int:
        heap = parent.heap
        while True:
            v, number, node = heap[0]
            if not node.demand:
                heappop(heap)
            elif v == node.v:
                return v
            else:
                heapreplace(heap, (node.v, number, node))
