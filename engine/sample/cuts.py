"""Top-k, top-p and min-p as one threshold for each row: the least probability that stays.

Equal probabilities at a cut all stay, so no order among equals matters. Sorting a vocabulary is slow, so the likeliest
few are looked at first and more only for the rows that need them; the threshold is the same either way.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.sampling_params import SamplingParams

_LOOKED_AT = (64, 1024)


def thresholds(probs: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Top-k, then top-p of what top-k left, then min-p. probs float32 [R, vocab], rows sum to 1 → float32 [R, 1]."""
    vocab = probs.shape[1]
    least = [0.0] * len(params)
    pending = [i for i, p in enumerate(params) if p.top_p < 1.0 or 0 < p.top_k < vocab]
    for num in (*(n for n in _LOOKED_AT if n < vocab), vocab):
        if not pending:
            break
        ordered = probs[pending].topk(num, dim=-1).values
        cumulative = ordered.double().cumsum(dim=-1)
        undecided = []
        for i, row in enumerate(pending):
            cut = _cut(ordered[i], cumulative[i], params[row], vocab)
            if cut is None:
                undecided.append(row)
            else:
                least[row] = cut
        pending = undecided
    result = torch.tensor(least).unsqueeze(1)
    min_p = torch.tensor([p.min_p for p in params]).unsqueeze(1)
    return torch.maximum(result, min_p * probs.amax(dim=-1, keepdim=True))


def _cut(ordered: Tensor, cumulative: Tensor, params: SamplingParams, vocab: int) -> float | None:
    """One row's threshold from its likeliest probabilities in falling order; None if they are too few to tell."""
    num = ordered.shape[0]
    limited = 0 < params.top_k < vocab
    if limited and params.top_k > num:
        return None
    kept = params.top_k if limited else vocab
    total = float(cumulative[kept - 1]) if limited else 1.0
    least = float(ordered[kept - 1]) if limited else 0.0
    if params.top_p < 1.0:
        wanted = params.top_p * total
        if float(cumulative[-1]) < wanted and num < vocab:
            return None
        at = int(torch.searchsorted(cumulative, wanted))
        least = max(least, float(ordered[min(at, num - 1)]))
    return least
