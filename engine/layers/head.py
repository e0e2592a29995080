"""The output head: from the last hidden state to logits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kernels.dispatch import Kernels

REFINED_TOKENS = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """Logits of all tokens, the likeliest ones in float32.

    A bfloat16 product rounds a logit of 25 to a multiple of 1/8, which makes ties of tokens that the model tells apart.
    So the product only finds the likeliest tokens, and their logits are computed again in float32.

    Attributes:
        packed: packed [vocab, hidden], the final norm's weight folded in.
        rows: the same weight, unfolded, to look rows up in; the embedding table itself where the two are tied.
        norm: float32 [hidden], the final norm's weight.
    """

    packed: Any
    rows: Tensor
    norm: Tensor

    def logits(self, normed: Tensor, kernels: Kernels) -> Tensor:
        """normed float32 [S, hidden] → float32 [S, vocab]."""
        logits = kernels.linear(normed.to(self.rows.dtype), self.packed).float()
        if self.rows.dtype == torch.float32:
            return logits
        likeliest = logits.topk(min(REFINED_TOKENS, logits.shape[1]), dim=-1).indices  # [S, n]
        rows = self.rows.index_select(0, likeliest.flatten()).view(*likeliest.shape, -1)
        return logits.scatter_(1, likeliest, (rows * (normed * self.norm).unsqueeze(1)).sum(dim=-1))
