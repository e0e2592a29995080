"""Virtual time: service by weight, exact for the usual weights, and the clock of each family of siblings."""

from __future__ import annotations

from engine.sched.fair.tree import SCALE, Node


def charge(leaf: Node, cost_us: int) -> None:
    """The cost, or a negative one that gives back, is booked on the whole path: the same at all levels."""
    scaled = cost_us * SCALE
    for node in leaf.path:
        node.service += scaled


def forgive(node: Node, lag_us: int) -> None:
    """A child with requests that is not backlogged keeps at most so much service of lag behind its siblings' clock."""
    assert node.parent is not None, "the root has no siblings"
    if not node.is_backlogged:
        node.service = max(node.service, node.parent.clock * node.weight - lag_us * SCALE)


def advance(parent: Node, v: int) -> None:
    """Move the children's clock to the smallest backlogged child, or, with nobody backlogged, to each one served.

    It never goes back.
    """
    if v > parent.clock:
        parent.clock = v
