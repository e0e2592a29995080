"""Stop strings in streamed text: what may be released, and where the text ends.

The text ends at the stop string that is complete first; of several complete at the same character, the longest. So the
result does not depend on how the text is cut, and the answer ends with the token that completes a stop string. The
search is an automaton over all stop strings at once (Aho and Corasick 1975): linear in the length of the text.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence


class StopMatcher:
    """Filters one answer's text.

    Attributes:
        stopped: the stop string that ended the text, or None while it goes on. Nothing is released after it.
    """

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        """With `include` the stop string itself is released too. Raises `ValueError` for an empty stop string."""
        if "" in stops:
            raise ValueError("a stop string must not be empty")
        self.stopped: str | None = None
        self._include = include
        self._automaton = _Automaton(stops)
        self._state = 0
        self._held = ""

    def push(self, text: str) -> str:
        """Text that certainly precedes any stop string; held back is only what could be the beginning of one."""
        if self.stopped is not None:
            return ""
        text = self._held + text
        state, automaton = self._state, self._automaton
        for at in range(len(self._held), len(text)):
            state = automaton.step(state, text[at])
            stop = automaton.complete[state]
            if stop is not None:
                self.stopped, self._held = stop, ""
                return text[: at + 1 if self._include else at + 1 - len(stop)]
        released = len(text) - automaton.depth[state]
        self._state, self._held = state, text[released:]
        return text[:released]

    def flush(self) -> str:
        """At the end of the text: what was held back, since no stop string can follow any more."""
        held, self._held, self._state = self._held, "", 0
        return held


class _Automaton:
    """States are the beginnings of stop strings; 0 is the empty one.

    Attributes:
        depth: state → length of the beginning it stands for.
        complete: state → the longest stop string that ends here.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self.depth = [0]
        self.complete: list[str | None] = [None]
        self._next: list[dict[str, int]] = [{}]
        self._shorter = [0]  # state → the longest other beginning that is a suffix of it
        for stop in stops:
            self._add(stop)
        self._link()

    def step(self, state: int, character: str) -> int:
        while state and character not in self._next[state]:
            state = self._shorter[state]
        return self._next[state].get(character, 0)

    def _add(self, stop: str) -> None:
        state = 0
        for character in stop:
            if character not in self._next[state]:
                self._next[state][character] = len(self._next)
                self._next.append({})
                self._shorter.append(0)
                self.complete.append(None)
                self.depth.append(self.depth[state] + 1)
            state = self._next[state][character]
        self.complete[state] = stop

    def _link(self) -> None:
        """Breadth first, so that every shorter state is linked before it is needed."""
        queue = deque(self._next[0].values())
        while queue:
            state = queue.popleft()
            if self.complete[state] is None:
                self.complete[state] = self.complete[self._shorter[state]]
            for character, child in self._next[state].items():
                self._shorter[child] = self.step(self._shorter[state], character)
                queue.append(child)
