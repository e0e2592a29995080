"""What arrives when: a workload as frozen data. Where workloads come from is in `workloads.py`.

A prompt is a list of segments; two prompts that begin with the same segments begin with the same tokens. The answer of
an arrival is a segment too, with the arrival's own id, so a prompt may go on from an earlier answer.

An arrival may wait for the end of another one (`after`): so there are clients that think, tools that run, and floods
of so many at once, and still nothing but data.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import msgspec

from engine.messages import PathNode, RequestClass
from engine.sched.cost import CostModel

SEGMENT_TOKENS = 1 << 24
"""Tokens that a segment can have at most; a token's id is the segment's id times this, plus its place."""
VOCAB_SIZE = 1 << 62
FIRST_SHARED_ID = 1 << 24
"""Ids of arrivals are below; ids of other segments are not."""

TEAM_DEPTH = 2
"""Nodes of a path down to the team: organization, team."""


class Segment(msgspec.Struct, frozen=True, array_like=True):
    """The first num_tokens tokens of the endless text with this id."""

    id: int
    num_tokens: int

    def token_ids(self) -> range:
        first = self.id * SEGMENT_TOKENS
        return range(first, first + self.num_tokens)


class Arrival(msgspec.Struct, frozen=True, kw_only=True):
    """One request.

    Attributes:
        id: unique in its workload, below `FIRST_SHARED_ID`.
        at_us: when it arrives; with `after`, how long after that one's end.
        path: organization, team, key and perhaps session.
        num_output_tokens: how long its answer is if nobody cancels it.
        cancel_after_us: from arrival; None if it is not canceled.
        after: the id of the arrival whose end it waits for.
    """

    id: int
    at_us: int
    path: tuple[PathNode, ...]
    prompt: tuple[Segment, ...]
    num_output_tokens: int
    request_class: RequestClass = "interactive"
    cancel_after_us: int | None = None
    after: int | None = None

    @property
    def team(self) -> str:
        return self.path[TEAM_DEPTH - 1].id

    @property
    def num_prompt_tokens(self) -> int:
        return sum(segment.num_tokens for segment in self.prompt)

    @property
    def answer(self) -> Segment:
        return Segment(self.id, self.num_output_tokens)

    def token_ids(self) -> list[int]:
        return [token_id for segment in self.prompt for token_id in segment.token_ids()]

    def work_us(self, cost: CostModel) -> int:
        """Charged for the whole request if nothing of it is cached. The last token's own KV is never computed."""
        num_prompt = self.num_prompt_tokens
        return cost.marginal_us(0, num_prompt + self.num_output_tokens - 1, num_prompt)


class Workload(msgspec.Struct, frozen=True, kw_only=True):
    """Arrivals, and what to look at.

    Attributes:
        about: one line for people.
        until_us: when the run is cut off; what has not ended by then stays unfinished.
        measure_from_us: shares and throughput are taken from here to the end.
        greedy: teams that always have more work waiting; their demand has no end.
        watched: teams that are also run alone, to compare.
        max_sequences: slots that it is meant for.
    """

    name: str
    about: str
    seed: int
    until_us: int
    arrivals: tuple[Arrival, ...]
    measure_from_us: int = 0
    greedy: tuple[str, ...] = ()
    watched: tuple[str, ...] = ()
    max_sequences: int = 16

    def only(self, team: str) -> Workload:
        """The same with nobody but this team."""
        arrivals = tuple(arrival for arrival in self.arrivals if arrival.team == team)
        return msgspec.structs.replace(self, arrivals=arrivals)

    def weights(self) -> dict[tuple[str, ...], int]:
        """Of every node, by the ids from the top down to it."""
        return {node: weight for arrival in self.arrivals for node, weight in nodes_of(arrival.path)}

    def teams(self) -> tuple[str, ...]:
        """In the order of their first arrivals' places."""
        return tuple(dict.fromkeys(arrival.team for arrival in self.arrivals))


def nodes_of(path: Iterable[PathNode]) -> Iterator[tuple[tuple[str, ...], int]]:
    """The nodes on a path, each by the ids from the top down to it, with its weight."""
    ids: tuple[str, ...] = ()
    for node in path:
        ids = (*ids, node.id)
        yield ids, node.weight
