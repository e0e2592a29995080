"""Who is ahead of whom for a slot: what is divided out must be what a deal, slot by slot, comes to."""

from __future__ import annotations

from collections import Counter

from fair_harness import FairHarness, path_of
from hypothesis import given
from hypothesis import strategies as st

from engine.request import Request
from engine.sched.fair.position import first_seekers, position
from engine.sched.fair.tree import Entry, Node
from engine.sched.fair.virtual_time import SCALE

CLASSES = ("interactive", "standard", "batch")


def dealt_one_by_one(root: Node) -> list[Entry]:
    """All seekers below the node in the order in which they would get slots, by looking at everything each time."""
    asked: Counter[Node] = Counter()
    order: list[Entry] = []
    for _ in range(root.num_seekers):
        node = root
        while node.children:
            open_ones = [child for child in node.children.values() if asked[child] < child.num_seekers]
            node = min(open_ones, key=lambda c: ((c.num_rows + asked[c] + 1) * SCALE // c.weight, c.v, c.number))
            asked[node] += 1
        order.append(node.seekers[asked[node] - 1][2])
    return order


requests = st.lists(
    st.tuples(
        st.sampled_from(["a", "b"]),
        st.sampled_from(["t", "u", "v"]),
        st.sampled_from(["k", "l"]),
        st.sampled_from(["s", "z"]),
        st.sampled_from(CLASSES),
        st.integers(1, 30),
    ),
    min_size=1,
    max_size=60,
)
weights = st.fixed_dictionaries({name: st.integers(1, 5) for name in ("a", "b", "t", "u", "v", "k", "l")})


@given(requests=requests, weights=weights, num_steps=st.integers(0, 12), later=requests)
def test_a_position_is_the_place_in_a_deal(
    requests: list[tuple[str, str, str, str, str, int]],
    weights: dict[str, int],
    num_steps: int,
    later: list[tuple[str, str, str, str, str, int]],
) -> None:
    harness = FairHarness(max_sequences=5)
    for batch in (requests, later):
        for org, team, key, session, request_class, output in batch:
            path = path_of(f"{org}/{team}/{key}/{session}", weights[org], weights[team], weights[key])
            harness.submit(path, 40, output, request_class=request_class)
        harness.run(num_steps if batch is requests else 0)
    tree = harness.policy.tree
    order = dealt_one_by_one(tree.root)
    assert len(order) == tree.root.num_seekers
    for i, entry in enumerate(order):
        found = position(entry)
        assert found.num_ahead == i
        assert found.by_class == dict(Counter(e.request.request_class for e in order[:i]))
        team = entry.leaf.path[1]
        of_team = [e.request for e in order[:i] if e.leaf.path[1] is team]
        assert found.num_ahead_in_team == len(of_team)
        assert first_seekers(team, found.num_ahead_in_team) == of_team


def test_many_slots_at_once_are_dealt_like_one_at_a_time() -> None:
    """So many that the level is raised in one go, with weights and rows that do not divide."""
    harness = FairHarness(max_sequences=7)
    for i in range(900):
        team = f"t{i * i % 7}"
        path = path_of(f"a/{team}/k", 1, 1 + int(team[1]) * 3)
        harness.submit(path, 40, 9, request_class=CLASSES[i % 5 % 3])
        if i == 100:
            harness.run(4)
    last = harness.submit("b/t/k", 40, 9)
    for _ in range(300):
        last = harness.submit("b/t/k", 40, 9)
    order = dealt_one_by_one(harness.policy.tree.root)
    i = next(i for i, entry in enumerate(order) if entry.request is request_of(harness, last))
    assert position(order[i]).num_ahead == i > 500
    assert position(order[i]).by_class == dict(Counter(e.request.request_class for e in order[:i]))


def request_of(harness: FairHarness, request_id: str) -> Request:
    return harness.of(request_id)
