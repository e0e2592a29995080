"""The tree org → team → class → key → session, made from the paths of requests, and who is present where.

Knows weights and counts; what service means is said in `virtual_time.py`, who gets a slot in `slots.py`. Nodes without
requests are dropped as soon as nothing would be forgotten: when the siblings' clock has reached their virtual time.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from heapq import heappop, heappush

from engine.messages import PathNode, RequestClass
from engine.request import Request

SCALE = 144_403_552_893_600
"""Parts of a microsecond: the least common multiple of 1 .. 32, so that service divides by the usual weights without a
rest, and twice the weights give the very same order."""
DEPTH = 5
TEAM_LEVEL = 1
KEY_LEVELS = 4
"""Levels above the session."""
NOT_NEW = KEY_LEVELS


@dataclass(slots=True, eq=False)
class Node:
    """One node. Compared by identity; `number` breaks ties.

    Attributes:
        path: from below the root to this node itself.
        service: virtual time times weight, in `virtual_time.SCALE` parts of a microsecond.
        clock: V of its children.
        is_backlogged: resident work below it was left ungranted by the last step.
        is_behind: and that was the prompt of a request which is not new.
        new_us: work of the new requests below it, as they came.
        num_requests: known requests below it, whatever their state.
        num_seekers: those that want a row.
        num_new_seekers: those of them that are new.
        num_rows: rows held below it.
        weight_present: of the children with requests.
        weights: how many children have which weight.
        least_weight: of the children.
        holders: the children with rows.
        seekers: of a leaf: (not parked, arrival, entry), sorted.
        residents: of a leaf, in the order in which they got their rows.
    """

    id: str
    weight: int
    number: int
    parent: Node | None
    path: tuple[Node, ...] = ()
    children: dict[str, Node] = field(default_factory=dict)

    service: int = 0
    clock: int = 0
    is_backlogged: bool = False
    is_behind: bool = False
    new_us: int = 0
    num_requests: int = 0
    num_seekers: int = 0
    num_new_seekers: int = 0
    num_rows: int = 0
    weight_present: int = 0
    weights: dict[int, int] = field(default_factory=dict)
    least_weight: int = 1
    holders: dict[Node, None] = field(default_factory=dict)
    sleepers: list[tuple[int, int, Node]] = field(default_factory=list)
    seekers: list[tuple[bool, int, Entry]] = field(default_factory=list)
    residents: dict[Entry, None] = field(default_factory=dict)

    # Scratch of one step (`window.py`), of the claims for slots (`claims.py`) and of `slots.py`.
    stamp: int = 0
    moved_at: int = 0
    demand: int = 0
    heap: list[tuple[int, int, Node]] = field(default_factory=list)
    num_asked: int = 0
    claims: list[tuple[tuple[bool, int, int, int], Node]] = field(default_factory=list)
    claim: tuple[bool, int, int, int] | None = None
    rows_version: int = 0
    holdings: Holdings | None = None

    @property
    def v(self) -> int:
        """Virtual time: service by weight."""
        return self.service // self.weight


@dataclass(frozen=True, slots=True)
class Holdings:
    """What the children of a node hold, at a glance (`slots.py`).

    Attributes:
        step, rows_version: what it was made for.
        v: of those with slots, as it was then.
        num_above: children that hold more than their share.
        most_rows: by weight, of all but one of a child's slots.
    """

    step: int
    rows_version: int
    v: dict[Node, int]
    num_above: int
    most_rows: int
    highest_v: int
    largest_weight: int


@dataclass(slots=True, eq=False)
class Entry:
    """What the policy keeps of a request.

    Attributes:
        new_level: rule R1: of the node in which it is new (organizations count as teams); `NOT_NEW` if it is not.
        new_us: its work when it came, while it is new.
        due_us: when it came, and as much later as it and the new ones before it have work, in its team or in that node.
        served_us: charged so far.
        num_sat_out: steps in a row in which its decode was left out.
        seated_at, dealt_at: the steps in which it got its row, and was last dealt a chance of one (`claims.py`).
        step, start, left, granted, charged_us: of the step being planned.
    """

    request: Request
    leaf: Node
    new_level: int = NOT_NEW
    new_us: int = 0
    due_us: int = 0
    served_us: int = 0
    num_sat_out: int = 0
    is_seeking: bool = False
    is_resident: bool = False
    seated_at: int = 0
    dealt_at: int = 0

    step: int = 0
    start: int = 0
    left: int = 0
    granted: int = 0
    charged_us: int = 0
    is_decode: bool = False
    is_pooled: bool = False

    @property
    def is_new(self) -> bool:
        return self.new_level != NOT_NEW

    @property
    def seeker_key(self) -> tuple[bool, int]:
        return self.request.table is None, self.request.arrival


class Tree:
    """Nodes by path; counts kept up to date on the whole path."""

    def __init__(self, class_weights: tuple[tuple[RequestClass, int], ...], forgotten_us: int) -> None:
        """
        Args:
            forgotten_us: debt between siblings that is forgotten once their whole family has no requests.
        """
        self.root = Node("", 1, 0, None)
        self._forgotten = forgotten_us * SCALE
        self._class_weights = dict(class_weights)
        self._num_nodes = 0
        self._by_id: dict[str, dict[Node, None]] = {}
        # Leaves with seekers; who was asked for a claim in its turn goes last.
        self.waiting: OrderedDict[Node, None] = OrderedDict()
        self.rescaled: dict[Node, None] = {}  # those whose least weight has changed; taken by who keeps such keys

    def enter(self, request: Request) -> Entry:
        """Count the request in; nodes on its path are made, and take the path's weights, and wake up.

        One that wakes from having no requests starts at its siblings' clock if it is not ahead of it.
        """
        node = self.root
        for part in self._full_path(request.path, request.request_class):
            child = node.children.get(part.id)
            if child is None:
                child = self._grow(node, part)
            elif child.weight != part.weight:
                self._weigh(child, part.weight)
            if not child.num_requests:
                child.service = max(child.service, node.clock * child.weight)
                node.weight_present += child.weight
            child.num_requests += 1
            node = child
        self.root.num_requests += 1
        return Entry(request, node)

    def leave(self, entry: Entry) -> None:
        self.root.num_requests -= 1
        for node in entry.leaf.path:
            node.num_requests -= 1
            if not node.num_requests and node.parent is not None:
                node.parent.weight_present -= node.weight
                heappush(node.parent.sleepers, (node.v, node.number, node))
        for node in reversed(entry.leaf.path):
            if node.parent is not None:
                self.drop_sleepers(node.parent)

    def drop_sleepers(self, parent: Node) -> None:
        """Forget children without requests whose virtual time the clock has reached.

        Who has children that owe something stays. In a family without requests the clock stands still, and small debts
        are forgotten.
        """
        sleepers = parent.sleepers
        slack = 0 if parent.num_requests else self._forgotten
        while sleepers:
            v, _, node = sleepers[0]
            if v > parent.clock and (v - parent.clock) * node.weight > slack:
                return
            heappop(sleepers)
            if node.num_requests or node.children or parent.children.get(node.id) is not node:
                continue
            if node.v > v:
                heappush(sleepers, (node.v, node.number, node))
                continue
            del parent.children[node.id]
            self._reckon(parent, node.weight, None)
            same = self._by_id[node.id]
            del same[node]
            if not same:
                del self._by_id[node.id]

    def set_weight(self, node_id: str, weight: int) -> None:
        """From now on; virtual times stay. An id that no request has brought is ignored."""
        for node in self._by_id.get(node_id, ()):
            self._weigh(node, weight)

    def named(self, node_id: str) -> Iterator[Node]:
        return iter(self._by_id.get(node_id, ()))

    def seek(self, entry: Entry) -> None:
        """The request wants a row, and has none."""
        entry.is_seeking = True
        insort(entry.leaf.seekers, (*entry.seeker_key, entry), key=lambda s: s[:2])
        self.waiting.setdefault(entry.leaf)
        self.root.num_seekers += 1
        for node in entry.leaf.path:
            node.num_seekers += 1
            node.num_new_seekers += entry.is_new

    def stop_seeking(self, entry: Entry) -> None:
        """Called before its table changes."""
        entry.is_seeking = False
        seekers = entry.leaf.seekers
        for key in ((False, entry.request.arrival), (True, entry.request.arrival)):
            i = bisect_left(seekers, key, key=lambda s: s[:2])
            if i < len(seekers) and seekers[i][2] is entry:
                del seekers[i]
                break
        if not seekers:
            del self.waiting[entry.leaf]
        self.root.num_seekers -= 1
        for node in entry.leaf.path:
            node.num_seekers -= 1
            node.num_new_seekers -= entry.is_new

    def greet(self, entry: Entry, work_us: int, most_us: int, lead_us: int) -> bool:
        """Whether the request, not seeking yet, is new (rule R1); it is until `ignore`.

        It is at the highest node from org to key where nobody but new ones waits or is behind, if its work with theirs
        is within Θ and no node from there to the key is ahead. A session is no place to be new in: anybody can open as
        many as he likes.
        """
        level = NOT_NEW
        for i in reversed(range(KEY_LEVELS)):
            node = entry.leaf.path[i]
            if is_ahead(node, lead_us):
                break
            if _is_quiet(node, work_us, most_us):
                level = i
        if level == NOT_NEW:
            return False
        node = entry.leaf.path[max(level, TEAM_LEVEL)]  # nobody is later for what another team brings
        entry.new_level, entry.new_us = max(level, TEAM_LEVEL), work_us
        entry.due_us = entry.request.arrival_us + node.new_us + work_us
        for node in entry.leaf.path:
            node.new_us += work_us
        return True

    def ignore(self, entry: Entry) -> None:
        """The request is new no more."""
        for node in entry.leaf.path:
            node.new_us -= entry.new_us
            node.num_new_seekers -= entry.is_seeking
        entry.new_level, entry.new_us = NOT_NEW, 0

    def take_row(self, entry: Entry) -> None:
        entry.is_resident = True
        entry.leaf.residents[entry] = None
        self._add_row(entry, 1)

    def give_row(self, entry: Entry) -> None:
        entry.is_resident = False
        del entry.leaf.residents[entry]
        self._add_row(entry, -1)

    def _add_row(self, entry: Entry, num: int) -> None:
        self.root.num_rows += num
        for node in entry.leaf.path:
            node.num_rows += num
            parent = node.parent
            assert parent is not None, "the root stands on no path"
            parent.rows_version += 1
            if node.num_rows:
                parent.holders[node] = None
            else:
                del parent.holders[node]

    def _grow(self, parent: Node, part: PathNode) -> Node:
        self._num_nodes += 1
        node = Node(part.id, part.weight, self._num_nodes, parent)
        node.path = (*parent.path, node)
        parent.children[part.id] = node
        self._reckon(parent, None, part.weight)
        self._by_id.setdefault(part.id, {})[node] = None
        return node

    def _weigh(self, node: Node, weight: int) -> None:
        if node.num_requests and node.parent is not None:
            node.parent.weight_present += weight - node.weight
            node.parent.rows_version += 1
        if node.parent is not None:
            self._reckon(node.parent, node.weight, weight)
        node.service = node.service * weight // node.weight
        node.weight = weight

    def _reckon(self, parent: Node, old: int | None, new: int | None) -> None:
        """A child has another weight, or is new, or gone."""
        weights = parent.weights
        if new is not None:
            weights[new] = weights.get(new, 0) + 1
        if old is not None:
            weights[old] -= 1
            if not weights[old]:
                del weights[old]
        least = min(weights, default=1)
        if least != parent.least_weight:
            parent.least_weight = least
            self.rescaled[parent] = None

    def _full_path(self, path: tuple[PathNode, ...], request_class: RequestClass) -> tuple[PathNode, ...]:
        """Always org, team, class, key, session; what a path does not name has an empty id."""
        org, team, key = (path[i] if i < len(path) else PathNode("") for i in range(3))
        session = PathNode("\n".join([each.id for each in path[3:]]), path[-1].weight if len(path) > 3 else 1)
        of_class = PathNode(f"{team.id}:{request_class}", self._class_weights[request_class])
        return org, team, of_class, key, session


def _is_quiet(node: Node, work_us: int, most_us: int) -> bool:
    """Nobody but new ones waits or is behind below it, and the work of new ones is not more than may be new at once."""
    if node.num_seekers > node.num_new_seekers or node.is_behind:
        return False
    return node.new_us + work_us <= most_us


def is_ahead(node: Node, lead_us: int) -> bool:
    """It was served more than Λ ahead of its siblings' clock."""
    assert node.parent is not None, "the root has no siblings"
    return node.service - node.parent.clock * node.weight > lead_us * SCALE
