"""What a running request tells: text and ends, free of any wire format.

For every choice: any number of `TextDelta`, then one `ChoiceFinished`. The text of a choice is the sum of its deltas;
how it is cut carries no meaning.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from gateway.domain.usage import FinishReason


class TokenChance(msgspec.Struct, frozen=True, gc=False):
    """A token and its log probability.

    Attributes:
        utf8: the token's bytes; `token` is these as text, with replacement characters where they are not whole.
    """

    token: str
    logprob: float
    utf8: bytes


class TokenLogprob(msgspec.Struct, frozen=True):
    """The log probability of a token of the answer, and the likeliest tokens at its place in falling order."""

    chosen: TokenChance
    top: tuple[TokenChance, ...] = ()


class TextDelta(msgspec.Struct, frozen=True):
    """More text of one choice.

    Attributes:
        text: may be empty if log probabilities are left to tell.
        num_tokens: tokens that became known since the choice's last delta.
        logprobs: one for each token of the answer but a closing stop token, if they were asked for.
    """

    choice: int
    text: str
    num_tokens: int
    logprobs: tuple[TokenLogprob, ...] = ()


Cause = Literal["quota_exceeded", "limits_unavailable"]
"""A quota has no more, or for some time nobody could tell whether it has."""


class ChoiceFinished(msgspec.Struct, frozen=True):
    """A choice is complete.

    Attributes:
        cause: why it was cut, if it was for something that the caller did not ask for.
    """

    choice: int
    reason: FinishReason
    cause: Cause | None = None


GenerationEvent = TextDelta | ChoiceFinished
