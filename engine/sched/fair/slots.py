"""Who yields a sequence slot to whom: the weighted max-min share of the slots, kept by comparing pairs.

A child may take a slot from a sibling that afterwards still holds no fewer by its weight than the claimant did get.
So nobody with a claim stays below the whole slots of its max-min share while another is above its own, and no slot
goes to and fro. What is left over when shares are no whole numbers goes by virtual time: a claimant that holds fewer
by its weight takes a slot from a sibling which is ahead of it by more than Θ.
"""

from __future__ import annotations

from collections.abc import Callable

from engine.sched.fair.tree import Entry, Node
from engine.sched.fair.virtual_time import SCALE


def find_yielder(claimant: Entry, lag_us: int, may_yield: Callable[[Entry], bool]) -> Entry | None:
    """The resident request that is to be parked for the claimant, or None if it has no claim.

    Requests of one leaf never yield to each other.

    Args:
        lag_us: Θ.
        may_yield: False for who has only just got its slot.
    """
    for node in claimant.leaf.path:
        parent = node.parent
        assert parent is not None, "the root stands on no path"
        giver = _giver(parent, node, lag_us, may_yield)
        if giver is not None:
            return _yielder(giver, may_yield)
    return None


def _giver(parent: Node, claimant: Node, lag_us: int, may_yield: Callable[[Entry], bool]) -> Node | None:
    weight, num_rows = claimant.weight, claimant.num_rows
    above = [
        node
        for node in parent.holders
        if node is not claimant and node.num_rows * weight > (num_rows + 1) * node.weight
    ]
    above.sort(key=_most_rows)
    for node in above:
        if _yielder(node, may_yield) is not None:
            return node
    v, lag = claimant.v, lag_us * SCALE
    ahead = [
        node
        for node in parent.holders
        if node is not claimant
        and node.num_rows * weight > num_rows * node.weight
        and node.service - v * node.weight > lag
    ]
    ahead.sort(key=_most_served)
    for node in ahead:
        if _yielder(node, may_yield) is not None:
            return node
    return None


def _yielder(node: Node, may_yield: Callable[[Entry], bool]) -> Entry | None:
    """Below the node: of the child with the most slots by weight, the request that came last."""
    if not node.children:
        candidates = [entry for entry in node.residents if may_yield(entry)]
        return max(candidates, key=_arrival, default=None)
    for child in sorted(node.holders, key=_most_rows):
        found = _yielder(child, may_yield)
        if found is not None:
            return found
    return None


def _most_rows(node: Node) -> tuple[int, int, int]:
    return -(node.num_rows * SCALE // node.weight), -node.v, node.number


def _most_served(node: Node) -> tuple[int, int]:
    return -node.v, node.number


def _arrival(entry: Entry) -> int:
    return entry.request.arrival


def is_borrower(entry: Entry, max_sequences: int, spared: set[Node]) -> bool:
    """Some node on its path holds more slots than its share by weight among those present, those spared aside."""
    total, share = max_sequences, 1
    for node in entry.leaf.path:
        parent = node.parent
        assert parent is not None, "the root stands on no path"
        total *= node.weight
        share *= parent.weight_present
        if node not in spared and node.num_rows * share > total:
            return True
    return False
