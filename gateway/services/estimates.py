"""How much output requests like one wrote lately: what is taken from a token rate before it is known.

By team, model and the cap they asked for, in powers of two: who asks for at most 50 tokens writes otherwise than who
asks for 8,000. It is only an estimate: what a request writes beyond it becomes debt of the rate, and quotas never go by
it. Kept in the process, and forgotten with it.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict, deque

from gateway.domain.ids import TeamId

KEPT = 64
"""Latest requests of a kind that count."""
TENTHS = 9
"""Of which this many tenths wrote no more than is expected of the next."""
MOST_KINDS = 10_000
FIRST_TOKENS = 256
"""Expected of a kind that nobody is known of, if its cap allows."""


class OutputEstimates:
    """The estimates of one process."""

    def __init__(self) -> None:
        self._kinds: OrderedDict[tuple[TeamId, str, int], _Kind] = OrderedDict()

    def expected(self, team_id: TeamId, model: str, cap: int) -> int:
        """Tokens of one answer, at most the cap."""
        kind = self._kinds.get((team_id, model, cap.bit_length()))
        return min(cap, FIRST_TOKENS if kind is None else kind.expected())

    def learn(self, team_id: TeamId, model: str, cap: int, output: int) -> None:
        """An answer that was asked for with this cap had so many tokens."""
        key = (team_id, model, cap.bit_length())
        kind = self._kinds.get(key)
        if kind is None:
            kind = self._kinds[key] = _Kind()
            if len(self._kinds) > MOST_KINDS:
                self._kinds.popitem(last=False)
        else:
            self._kinds.move_to_end(key)
        kind.add(output)


class _Kind:
    """The latest of a kind, in the order of their coming and in that of their size."""

    __slots__ = ("_latest", "_sorted")

    def __init__(self) -> None:
        self._latest: deque[int] = deque()
        self._sorted: list[int] = []

    def add(self, output: int) -> None:
        self._latest.append(output)
        insort(self._sorted, output)
        if len(self._latest) > KEPT:
            del self._sorted[bisect_left(self._sorted, self._latest.popleft())]

    def expected(self) -> int:
        return self._sorted[len(self._sorted) * TENTHS // 10] if len(self._sorted) > 1 else self._sorted[0]
