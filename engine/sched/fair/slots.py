"""Who yields a sequence slot to whom: the weighted max-min share of the slots, kept by comparing pairs.

A child takes a slot from a sibling in three cases:

- It holds less than the whole slots of its share by weight among those present, and the sibling more than its own.
- The sibling holds as much by weight or more even after the exchange. (So what others leave of their shares is divided,
  too.)
- The sibling holds about as much by weight or more, and is ahead by more than Θ / 4, in service of the heavier one. So
  what is left over when shares are no whole numbers goes round, and who has had bad luck with lengths catches up. (At Θ
  a lag begins to be forgiven.) How far a sibling has come is read once in a step, and again after slots have changed
  hands.

The first two never take what they would have to give back. The third leaves a sibling its whole slots but one, and its
only one. What it has given is left to its taker until it has caught up by half, unless the giver has none: so slots do
not go to and fro.
"""

from __future__ import annotations

from collections.abc import Callable

from engine.sched.fair.tree import KEY_LEVELS, SCALE, Entry, Holdings, Node

Yielders = Callable[[Entry, int, int, int], Entry | None]
"""As `find_yielder`."""


def find_yielder(claimant: Entry, num_slots: int, lag_us: int, step: int) -> Entry | None:
    """The resident request that is to be parked for the claimant, or None if it has no claim.

    Requests of one key never yield to each other, and nobody who got its slot in this very step does.

    Args:
        num_slots: all there are.
        lag_us: Θ.
        step: number of this one.
    """
    for node in claimant.leaf.path[:KEY_LEVELS]:
        parent = node.parent
        assert parent is not None, "the root stands on no path"
        giver = _giver(parent, node, num_slots, lag_us, step)
        if giver is not None:
            return _yielder(giver, step)
        num_slots = node.num_rows
    return None


def _giver(parent: Node, claimant: Node, num_slots: int, lag_us: int, step: int) -> Node | None:
    """
    Args:
        num_slots: that the children hold together.
    """
    weight, num_rows, v = claimant.weight, claimant.num_rows, claimant.v
    share = num_slots * weight // parent.weight_present
    lag = lag_us * SCALE // 4
    most = _holdings(parent, num_slots, step)
    if (
        (share <= num_rows or not most.num_above)
        and most.most_rows < (num_rows + 1) * SCALE // weight
        and (most.highest_v - v) * max(weight, most.largest_weight) <= lag
    ):
        return None
    above: list[Node] = []
    ahead: list[Node] = []
    for node, holder_v in most.v.items():
        if node is claimant:
            continue
        num_below = share - num_rows if node.num_rows * parent.weight_present > num_slots * node.weight else 0
        num_more = _num_more(node, claimant)
        lead = (holder_v - v) * max(weight, node.weight)
        may_take_one = not num_rows or 2 * lead >= -lag
        if num_below > 1 or num_more > 1 or ((num_below > 0 or num_more > 0) and may_take_one):
            above.append(node)
        elif lead > lag and node.num_rows * weight >= (num_rows - 1) * node.weight:
            # Of its whole slots one at most, and never the only one: they would be taken back at once.
            whole = num_slots * node.weight // parent.weight_present
            if node.num_rows > whole or node.num_rows == whole > 1:
                ahead.append(node)
    above.sort(key=_most_rows)
    ahead.sort(key=_most_served)
    return next((node for node in above + ahead if _yielder(node, step) is not None), None)


def _num_more(giver: Node, taker: Node) -> int:
    """How many slots could change hands until the giver holds less by weight; 2 if it is more than one."""
    for num in (2, 1):
        if (giver.num_rows - num) * taker.weight >= (taker.num_rows + num) * giver.weight:
            return num
    return 0


def _holdings(parent: Node, num_slots: int, step: int) -> Holdings:
    """The children's, as of the first time that it is asked in a step or after rows have changed hands."""
    holdings = parent.holdings
    if holdings is None or holdings.step != step or holdings.rows_version != parent.rows_version:
        present = parent.weight_present
        v = {node: node.v for node in parent.holders}
        holdings = parent.holdings = Holdings(
            step=step,
            rows_version=parent.rows_version,
            v=v,
            num_above=sum([node.num_rows * present > num_slots * node.weight for node in v]),
            most_rows=max([(node.num_rows - 1) * SCALE // node.weight for node in v], default=0),
            highest_v=max(v.values(), default=0),
            largest_weight=max([node.weight for node in v], default=1),
        )
    return holdings


def _yielder(node: Node, step: int) -> Entry | None:
    """Below the node: of the child with the most slots by weight, the request that came last."""
    if not node.children:
        candidates = [entry for entry in node.residents if entry.seated_at != step]
        return max(candidates, key=_arrival, default=None)
    for child in sorted(node.holders, key=_most_rows):
        found = _yielder(child, step)
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
    """Some node on its path holds more slots than its share by weight among those present, and more than the one that
    it takes to run at all, those spared aside."""
    total, share = max_sequences, 1
    for node in entry.leaf.path:
        parent = node.parent
        assert parent is not None, "the root stands on no path"
        total *= node.weight
        share *= parent.weight_present
        if node.num_rows > 1 and node.num_rows * share > total and node not in spared:
            return True
    return False
