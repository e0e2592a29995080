"""Who is ahead of whom for a slot: what is divided out must be what the deal, slot by slot, comes to."""

from __future__ import annotations

from collections import Counter

from fair_harness import FairHarness, path_of
from hypothesis import given
from hypothesis import strategies as st

from engine.sched.fair.claims import claim_key
from engine.sched.fair.position import first_seekers, position
from engine.sched.fair.tree import Entry, Node

CLASSES = ("interactive", "standard", "batch")


def dealt_one_by_one(root: Node) -> list[Entry]:
    """All seekers in the order in which they get slots by the policy's own key, each taken out of the tree."""
    order: list[Entry] = []
    while root.num_seekers:
        node = root
        while node.children:
            node.num_seekers -= 1
            node = min((child for child in node.children.values() if child.num_seekers), key=claim_key)
            node.num_asked += 1
        node.num_seekers -= 1
        order.append(node.seekers.pop(0)[2])
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
    root = harness.policy.tree.root
    seekers = [entry for entry in harness.policy._shop.roster.entries.values() if entry.is_seeking]
    assert len(seekers) == root.num_seekers
    harness.policy._shop.claims.start(1 << 40)
    found = {entry: position(entry) for entry in seekers}
    named = {entry: first_seekers(entry.leaf.path[1], found[entry].num_ahead_in_team) for entry in seekers}
    order = dealt_one_by_one(root)
    for i, entry in enumerate(order):
        assert found[entry].num_ahead == i
        assert found[entry].by_class == dict(Counter(e.request.request_class for e in order[:i]))
        of_team = [e.request for e in order[:i] if e.leaf.path[1] is entry.leaf.path[1]]
        assert named[entry] == of_team


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
    entry = harness.policy._shop.roster.entries[harness.of(last)]
    harness.policy._shop.claims.start(1 << 40)
    found = position(entry)
    order = dealt_one_by_one(harness.policy.tree.root)
    i = order.index(entry)
    assert i > 500
    expected = i, dict(Counter(e.request.request_class for e in order[:i]))
    assert (found.num_ahead, found.by_class) == expected
