"""Who would get a slot before a request, were they dealt out one by one from now on: `claims.py` without a deal.

A deal of thousands would hold up the engine, and all of it follows from one thing: a child gets its j-th further slot
before another one gets its k-th if it then holds fewer by its weight, or as many and is further behind in virtual time.
So how many a sibling gets before a request is a division. Below a key those that were parked come before all others.
Reads the tree and changes nothing.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from heapq import heapify, heappop, heapreplace
from typing import NamedTuple

from engine.request import Request
from engine.sched.fair.claims import level_of
from engine.sched.fair.tree import Entry, Node

_TEAM_DEPTH = 2
_CLASS_DEPTH = 3
_MOST_RISES = 10
"""How often the level is raised in one go before the rest is dealt one by one; more often gains hardly anything."""


class Place(NamedTuple):
    """The next slots of a node's parent, up to and with the one for the request: the node gets so many of them."""

    node: Node
    num: int


class QueuePosition(NamedTuple):
    """
    Attributes:
        places: for every node from the leaf up.
        num_ahead: seekers that would get a slot before it.
        by_class: how many of them are of which class, choices of its own request left out; only classes with any.
    """

    places: Sequence[Place]
    num_ahead: int
    by_class: dict[str, int]

    @property
    def num_ahead_in_team(self) -> int:
        return next(place.num - 1 for place in self.places if len(place.node.path) == _TEAM_DEPTH)


def position(entry: Entry) -> QueuePosition:
    """Of a request that seeks a slot, among all that do."""
    leaf, request = entry.leaf, entry.request
    num = bisect_left(leaf.seekers, entry.seeker_key, key=lambda seeker: seeker[:2]) + 1
    of_own = sum(seeker[2].request.request_id == request.request_id for seeker in leaf.seekers[: num - 1])
    by_class: Counter[str] = Counter()
    places: list[Place] = []
    for node in reversed(leaf.path):
        if len(node.path) == _CLASS_DEPTH:
            by_class[request.request_class] = num - 1 - of_own
        places.append(Place(node, num))
        before = _siblings_before(node, num)
        num += sum([num_before for _, num_before in before])
        if len(node.path) <= _CLASS_DEPTH:
            for sibling, num_before in before:
                _add_by_class(sibling, num_before, by_class)
    return QueuePosition(places, num - 1, {name: count for name, count in by_class.items() if count})


def first_seekers(node: Node, num: int) -> list[Request]:
    """The first that get a slot below the node, in order, were it dealt to alone."""
    num_dealt: Counter[Node] = Counter()
    heaps: dict[Node, list[tuple[bool, int, int, int, Node]]] = {}
    found: list[Request] = []
    for _ in range(min(num, node.num_seekers)):
        each = node
        while each.children:
            heap = heaps.get(each)
            if heap is None:
                heap = heaps[each] = [_key(child, 1) for child in each.children.values() if child.num_seekers]
                heapify(heap)
            child = heap[0][-1]
            num_dealt[child] += 1
            if num_dealt[child] < child.num_seekers:
                heapreplace(heap, _key(child, num_dealt[child] + 1))
            else:
                heappop(heap)
            each = child
        found.append(each.seekers[num_dealt[each] - 1][2].request)
    return found


def _siblings_before(node: Node, num: int) -> list[tuple[Node, int]]:
    """How many slots each sibling is dealt before the node's num-th further one."""
    parent = node.parent
    assert parent is not None, "the root stands on no path"
    is_fresh, level, v, number, _ = _key(node, num)
    holds: dict[int, tuple[int, int]] = {}  # by weight: the most slots below the level, and at it
    found: list[tuple[Node, int]] = []
    for sibling in parent.children.values():
        if not sibling.num_seekers or sibling is node:
            continue
        weight = sibling.weight
        if weight not in holds:
            holds[weight] = _most_below(sibling, level), _most_below(sibling, level + 1)
        below, at = holds[weight]
        if at > below:
            sibling_v = sibling.service // weight
            if sibling_v < v or (sibling_v == v and sibling.number < number):
                below = at
        num_before = min(below - sibling.num_rows, sibling.num_seekers)
        if not sibling.children:
            num_parked = bisect_left(sibling.seekers, True, key=_is_fresh)
            num_before = max(num_before, num_parked) if is_fresh else min(num_before, num_parked)
        if num_before > 0:
            found.append((sibling, num_before))
    return found


def _add_by_class(node: Node, num: int, by_class: Counter[str]) -> None:
    """The next so many slots of a node at or above the classes, by the class that gets them."""
    if len(node.path) == _CLASS_DEPTH:
        by_class[_class_of(node)] += num
        return
    seeking = [child for child in node.children.values() if child.num_seekers]
    if num == node.num_seekers:
        for child in seeking:
            _add_by_class(child, child.num_seekers, by_class)
    elif len(seeking) == 1:
        _add_by_class(seeking[0], num, by_class)
    else:
        for child, share in _deal(seeking, num):
            _add_by_class(child, share, by_class)


def _deal(children: Sequence[Node], num: int) -> list[tuple[Node, int]]:
    """How the next so many slots go to these children, all of one parent."""
    shares = _deal_most(children, num) if num > 2 * len(children) else [0] * len(children)
    rest = [
        (*_key(child, share + 1)[1:4], i)
        for i, (child, share) in enumerate(zip(children, shares, strict=True))
        if share < child.num_seekers
    ]
    heapify(rest)
    for _ in range(num - sum(shares)):
        _, v, number, i = rest[0]
        child = children[i]
        shares[i] += 1
        if shares[i] < child.num_seekers:
            heapreplace(rest, (level_of(child, child.num_rows + shares[i] + 1), v, number, i))
        else:
            heappop(rest)
    return [(child, share) for child, share in zip(children, shares, strict=True) if share]


def _deal_most(children: Sequence[Node], num: int) -> list[int]:
    """The most of so many slots: all below a level of slots held by weight, which is raised in a few steps."""
    parent = children[0].parent
    assert parent is not None, "the root is nobody's child"
    shares = [0] * len(children)
    level = min([level_of(child, child.num_rows + 1) for child in children])
    for _ in range(_MOST_RISES):
        left = num - sum(shares)
        weight = sum([child.weight for child, share in zip(children, shares, strict=True) if share < child.num_seekers])
        # Never too high: a child gets at most one more than in proportion to its weight.
        rise = (left - len(children)) * parent.least_weight // weight if weight else 0
        if rise <= 0:
            break
        level += rise
        shares = [max(0, min(_most_below(child, level) - child.num_rows, child.num_seekers)) for child in children]
    return shares


def _key(node: Node, num: int) -> tuple[bool, int, int, int, Node]:
    """As `claims.claim_key` of the num-th further slot."""
    is_fresh = not node.children and _is_fresh(node.seekers[num - 1])
    return is_fresh, level_of(node, node.num_rows + num), node.service // node.weight, node.number, node


def _is_fresh(seeker: tuple[bool, int, Entry]) -> bool:
    """It has not been parked."""
    return seeker[0]


def _most_below(node: Node, level: int) -> int:
    """The most slots that the node can hold with `claims.level_of` below the level."""
    assert node.parent is not None, "the root has no siblings"
    return (level - 1) * node.weight // node.parent.least_weight


def _class_of(node: Node) -> str:
    """Of a class node, which `Tree` names ``team:class``."""
    return node.id.rpartition(":")[2]
