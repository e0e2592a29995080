"""From logits to the next token, for all sampling rows of a step.

A row's token depends on its own logits, parameters and random key only: every operation here works row by row, and a
draw is keyed by (seed, choice, position). Knows nothing of requests, batches or text.

Order, as in the implementations users compare with: penalties and bias, forbidden end tokens, temperature, top-k,
top-p, min-p, draw. Equal values at a cut are all kept, so that a cut is a threshold and no order among equals matters.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.messages import TokenLogprobs
from engine.sample.cuts import thresholds
from engine.sample.penalties import RowHistory, adjust
from engine.sample.random import uniform
from engine.sampling_params import SamplingParams

_TINY = torch.finfo(torch.float32).tiny
_RUN = 128  # ids whose probabilities are summed first when a draw is looked up


@dataclass(slots=True)
class RowSampling:
    """What the sampler keeps for one resident row.

    Attributes:
        params: with a seed that is not None.
        history: token counts, kept only if a penalty needs them.
        num_output_tokens: sampled so far.
    """

    params: SamplingParams
    choice: int
    num_output_tokens: int
    history: RowHistory | None

    @property
    def plain(self) -> bool:
        """Logits are used as they are."""
        p = self.params
        return self.history is None and not p.logit_bias and self.num_output_tokens >= p.min_tokens


class Sampler:
    """Samples one token for each row; stateless but for the model's end tokens."""

    def __init__(self, eos_token_ids: tuple[int, ...]) -> None:
        self._eos_token_ids = eos_token_ids

    def sample(
        self, logits: Tensor, rows: Sequence[RowSampling], positions: Sequence[int]
    ) -> tuple[list[int], list[TokenLogprobs | None]]:
        """logits [S, vocab] of any float dtype; rows[i] is sampled at position positions[i]."""
        wide = logits.float()
        raw = wide
        if not all(row.plain for row in rows):
            wide = wide.clone()
            for i, row in enumerate(rows):
                if not row.plain:
                    adjust(wide[i], row.params, row.history, self._forbidden(row))
        tokens = wide.argmax(dim=-1).tolist()
        drawn = [i for i, row in enumerate(rows) if not row.params.greedy]
        if drawn:
            picked = self._draw(wide[drawn], [rows[i] for i in drawn], [positions[i] for i in drawn])
            for i, token in zip(drawn, picked, strict=True):
                tokens[i] = token
        return tokens, [self._logprobs(raw[i], token, rows[i].params) for i, token in enumerate(tokens)]

    def _forbidden(self, row: RowSampling) -> tuple[int, ...]:
        if row.num_output_tokens >= row.params.min_tokens:
            return ()
        return self._eos_token_ids + row.params.stop_token_ids

    def _draw(self, logits: Tensor, rows: Sequence[RowSampling], positions: Sequence[int]) -> list[int]:
        """Invert the cumulative distribution over ids at one uniform number for each row. logits [R, vocab]."""
        # The largest is subtracted first, so a tiny temperature makes infinities of the others only. It must not become
        # 0 in float32: 0 / 0 is no number.
        temperature = torch.tensor([row.params.temperature for row in rows]).clamp_(min=_TINY).unsqueeze(1)
        probs = torch.softmax((logits - logits.amax(dim=-1, keepdim=True)) / temperature, dim=-1)
        probs = torch.where(probs >= thresholds(probs, [row.params for row in rows]), probs, 0.0)
        draws = [
            uniform(row.params.seed or 0, row.choice, position) for row, position in zip(rows, positions, strict=True)
        ]
        return _invert(probs, torch.tensor(draws, dtype=torch.float64).unsqueeze(1))

    def _logprobs(self, logits: Tensor, token: int, params: SamplingParams) -> TokenLogprobs | None:
        if params.num_logprobs is None:
            return None
        logprobs = torch.log_softmax(logits, dim=-1)
        values, ids = logprobs.topk(params.num_logprobs)
        top = sorted(zip(ids.tolist(), values.tolist(), strict=True), key=lambda pair: (-pair[1], pair[0]))
        return TokenLogprobs(float(logprobs[token]), tuple(top))


def _invert(probs: Tensor, draws: Tensor) -> list[int]:
    """The first id at which the cumulative sum exceeds draw * total. probs [R, vocab] >= 0, draws float64 [R, 1].

    In two levels, runs of ids and then ids in one run: a cumulative sum over the whole vocabulary is ten times slower.
    """
    num_rows, vocab = probs.shape
    runs = torch.nn.functional.pad(probs, (0, -vocab % _RUN)).view(num_rows, -1, _RUN)
    totals = runs.sum(dim=-1).double().cumsum(dim=-1)
    target = draws * totals[:, -1:]
    run = torch.searchsorted(totals, target, right=True).clamp_(max=runs.shape[1] - 1)
    before = torch.where(run > 0, totals.gather(1, (run - 1).clamp(min=0)), 0.0)
    inside = runs[torch.arange(num_rows), run.squeeze(1)]
    at = torch.searchsorted(inside.double().cumsum(dim=-1), target - before, right=True)
    tokens: list[int] = (run * _RUN + at).squeeze(1).tolist()
    # Rounding can carry a draw past the last possible id of its run; that id is then the one meant.
    return [
        token if at_i < _RUN and float(inside[i, at_i]) > 0 else int(run_i) * _RUN + int(inside[i].nonzero()[-1])
        for i, (token, at_i, run_i) in enumerate(
            zip(tokens, at.squeeze(1).tolist(), run.squeeze(1).tolist(), strict=True)
        )
    ]
