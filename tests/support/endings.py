"""How a request of the engine `ends_engine_program` ends: its seed says it, so that a client of the API can."""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

EOS = 2
_NUMBERS = 100_000


class Ending(IntEnum):
    """
    CAP: with as many tokens as it may have.
    STOP: by itself, with an end-of-sequence token.
    FAIL: the engine fails at it.
    STALL: never; it stands still until it is aborted or its deadline passes.
    REJECT: the engine does not take it.
    """

    CAP = 0
    STOP = 1
    FAIL = 2
    STALL = 3
    REJECT = 4


class Plot(NamedTuple):
    """
    Attributes:
        after: output tokens of each choice before it ends so.
        cached: prompt tokens that it finds in the prefix cache.
    """

    ending: Ending = Ending.CAP
    after: int = 0
    cached: int = 0

    @property
    def seed(self) -> int:
        return (self.ending * _NUMBERS + self.after) * _NUMBERS + self.cached


def plot_of(seed: int | None) -> Plot:
    rest, cached = divmod(seed or 0, _NUMBERS)
    ending, after = divmod(rest, _NUMBERS)
    return Plot(Ending(ending), after, cached)
