"""Who was parked for whom, and how the two stood: noted between scheduler and policy. And what nodes are called."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from engine.request import Request, RequestState
from engine.sched.policy import Policy

NodePath = tuple[str, ...]
"""Ids from the top: org, team, class, key, session."""


@dataclass(frozen=True)
class Parking:
    """A request lost its row to a claimant.

    Attributes:
        step: steps planned before this one.
        num_computed: tokens of the holder by then.
        was_paused: the holder was at its cap.
        num_rows: held below each node just before.
        weights: of each node.
        v: of each node just before, where the policy keeps any.
    """

    step: int
    claimant: Request
    holder: Request
    num_computed: int
    was_paused: bool
    num_rows: Counter[NodePath]
    weights: dict[NodePath, int]
    v: dict[NodePath, int]


class Witness:
    """A `Policy` around another that notes who was parked for whom.

    Args:
        num_rows: held by each node now.
        weights: of each node, kept up to date by the owner.
        step: number of the one being planned.
    """

    def __init__(
        self,
        policy: Policy,
        parkings: list[Parking],
        *,
        num_rows: Callable[[], Counter[NodePath]],
        weights: dict[NodePath, int],
        step: Callable[[], int],
    ) -> None:
        self._policy = policy
        self._parkings = parkings
        self._num_rows = num_rows
        self._weights = weights
        self._step = step
        self._claim: tuple[Request, Counter[NodePath], dict[NodePath, int]] | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._policy, name)

    def yields_row(self, claimant: Request) -> Iterator[Request]:
        for holder in self._policy.yields_row(claimant):
            self._claim = claimant, self._num_rows(), virtual_times(self._policy)
            yield holder

    def parked(self, request: Request) -> None:
        assert self._claim is not None, "parked for nobody"
        claimant, num_rows, v = self._claim
        self._parkings.append(
            Parking(
                step=self._step(),
                claimant=claimant,
                holder=request,
                num_computed=request.num_computed,
                was_paused=request.state is RequestState.AT_CAP,
                num_rows=num_rows,
                weights=dict(self._weights),
                v=v,
            )
        )
        self._policy.parked(request)


def names_of(request: Request) -> NodePath:
    """Org, team, class, key, session; what a path does not name is empty."""
    ids = [node.id for node in request.path]
    org, team, key = (*ids[:3], "", "", "")[:3]
    return org, team, request.request_class, key, "\n".join(ids[3:])


def prefixes(names: NodePath) -> list[NodePath]:
    return [names[: i + 1] for i in range(len(names))]


def virtual_times(policy: Policy) -> dict[NodePath, int]:
    """Of all nodes that the policy keeps, by names; nothing for a policy without a tree."""
    return {names: node.v for names, node in _nodes(policy)}


def node_numbers(policy: Policy) -> dict[NodePath, int]:
    """The same of the numbers that nodes get when they are made: who is made anew has another one."""
    return {names: node.number for names, node in _nodes(policy)}


def _nodes(policy: Policy) -> Iterator[tuple[NodePath, Any]]:
    tree = getattr(policy, "tree", None)
    nodes: list[tuple[NodePath, Any]] = [((), tree.root)] if tree is not None else []
    while nodes:
        above, node = nodes.pop()
        for child in node.children.values():
            # A class has its team's id before its own name; a plain name says more.
            names = (*above, child.id.rpartition(":")[2] if len(above) == 2 else child.id)
            yield names, child
            nodes.append((names, child))
