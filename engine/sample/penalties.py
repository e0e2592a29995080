"""Everything that changes a row's logits before a token is chosen: penalties, bias, forbidden tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.sampling_params import SamplingParams


@dataclass(slots=True)
class RowHistory:
    """Which tokens a row has seen.

    Attributes:
        seen: bool [vocab], in prompt or output.
        counts: float32 [vocab], times in the output.
    """

    seen: Tensor
    counts: Tensor

    @classmethod
    def of(cls, prompt: Sequence[int], output: Sequence[int], vocab_size: int) -> RowHistory:
        history = cls(torch.zeros(vocab_size, dtype=torch.bool), torch.zeros(vocab_size))
        history.seen[torch.as_tensor(prompt, dtype=torch.int64)] = True
        for token_id in output:
            history.add(token_id)
        return history

    def add(self, token_id: int) -> None:
        self.seen[token_id] = True
        self.counts[token_id] += 1


def needs_history(params: SamplingParams) -> bool:
    return params.repetition_penalty != 1.0 or params.presence_penalty != 0.0 or params.frequency_penalty != 0.0


def adjust(logits: Tensor, params: SamplingParams, history: RowHistory | None, forbidden: Sequence[int]) -> None:
    """Change one row's logits [vocab] in place.

    repetition (Keskar et al. 2019): positive logits of seen tokens are divided by it, negative ones multiplied;
    presence and frequency as in the OpenAI API: logit - presence * (count > 0) - frequency * count.
    """
    if history is not None:
        if params.repetition_penalty != 1.0:
            seen = logits[history.seen]
            penalty = params.repetition_penalty
            logits[history.seen] = torch.where(seen > 0, seen / penalty, seen * penalty)
        logits -= params.frequency_penalty * history.counts
        logits -= params.presence_penalty * (history.counts > 0)
    if params.logit_bias:
        logits[torch.tensor(list(params.logit_bias))] += torch.tensor(list(params.logit_bias.values()))
    if forbidden:
        logits[torch.tensor(forbidden)] = float("-inf")
