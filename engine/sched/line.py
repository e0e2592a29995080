"""What a request in a line is told of those before it: how many of which class, and its own team's by name."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from engine.request import Request
from engine.standing import MOST_NAMED, Resource, Standing


def in_line(request: Request, ahead: Iterable[Request], resource: Resource) -> Standing:
    """
    Args:
        ahead: those before it, the first first; choices of its own request are passed over.
    """
    others = [other for other in ahead if other.request_id != request.request_id]
    return Standing(
        resource=resource,
        ahead=dict(Counter(other.request_class for other in others)),
        ahead_of_team=names_of_team(request, others),
    )


def names_of_team(request: Request, ahead: Iterable[Request]) -> tuple[str, ...]:
    """Ids of those of the request's own team, each once."""
    own = _org_and_team(request)
    names = dict.fromkeys(other.request_id for other in ahead if _org_and_team(other) == own)
    names.pop(request.request_id, None)
    return tuple(names)[:MOST_NAMED]


def team_of(request: Request) -> str:
    """The second node of its path, or empty."""
    return request.path[1].id if len(request.path) > 1 else ""


def _org_and_team(request: Request) -> tuple[str, ...]:
    return tuple(node.id for node in request.path[:2])
