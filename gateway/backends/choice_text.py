"""The text of one choice, from pieces of text to deltas: stop strings, hold-back, counts and log probabilities.

A piece is what one token adds. Pieces whose text is held back (it could begin a stop string, or is half a character)
keep their token and log probability until text is told or the choice ends, so that sums do not depend on the cuts.
Knows nothing of token ids.
"""

from __future__ import annotations

from collections.abc import Sequence

from engine.text.stop_strings import StopMatcher
from gateway.domain.events import TextDelta, TokenLogprob


class ChoiceText:
    """One choice while it runs.

    Attributes:
        num_tokens: tokens that count, through the one that completed a stop string.
        stopped: a stop string ended the text; what comes later is not part of the answer.
    """

    __slots__ = ("_choice", "_logprobs", "_matcher", "_num_told", "_texts", "num_tokens", "stopped")

    def __init__(self, choice: int, stops: Sequence[str]) -> None:
        self._choice = choice
        self._matcher = StopMatcher(stops) if stops else None
        self._texts: list[str] = []
        self._logprobs: list[TokenLogprob] = []
        self._num_told = 0
        self.num_tokens = 0
        self.stopped = False

    def push(self, piece: str, logprob: TokenLogprob | None = None) -> None:
        """One more token; not called once `stopped`."""
        self.num_tokens += 1
        if logprob is not None:
            self._logprobs.append(logprob)
        self._add(piece)

    def push_silent(self) -> None:
        """One more token that counts but is not told: what ended the answer."""
        self.num_tokens += 1

    def end(self, piece: str = "") -> None:
        """No more tokens come; `piece` is what the detokenizer still held."""
        if self.stopped:
            return
        if piece:
            self._add(piece)
        if self._matcher is not None and not self.stopped:
            self._texts.append(self._matcher.flush())

    def take(self, *, last: bool) -> TextDelta | None:
        """What can be told now; with `last` also log probabilities that have no text left to go with."""
        text = "".join(self._texts)
        if not text and not (last and self._logprobs):
            return None
        delta = TextDelta(self._choice, text, self.num_tokens - self._num_told, tuple(self._logprobs))
        self._texts.clear()
        self._logprobs.clear()
        self._num_told = self.num_tokens
        return delta

    def _add(self, piece: str) -> None:
        if self._matcher is None:
            self._texts.append(piece)
            return
        self._texts.append(self._matcher.push(piece))
        self.stopped = self._matcher.stopped is not None
