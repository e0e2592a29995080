"""A step plan: everything the runner may know about the next step. Frozen data, serialisable, a delta.

The runner keeps a stable row for each resident sequence: its token ids, its block table, its sampling state. A plan
tells it only what is new. A row's last sampled token is known to the runner before anybody else, so a plan may name
positions whose tokens the planner has not seen yet (planning ahead).
"""

from __future__ import annotations

import msgspec

from engine.messages import TokenLogprobs
from engine.sampling_params import SamplingParams


class NewRow(msgspec.Struct, frozen=True, kw_only=True):
    """A sequence that becomes resident in this step (first admission, or back after preemption).

    Attributes:
        row: its row in the runner; whatever was in that row before is gone.
        token_ids: all tokens known so far: prompt, and output if it is coming back.
        num_prompt_tokens: how many of them are prompt.
        sampling: with a seed that is never None.
        choice: which of the request's answers; part of the random key.
    """

    row: int
    token_ids: tuple[int, ...]
    num_prompt_tokens: int
    sampling: SamplingParams
    choice: int = 0


class Chunk(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens of one row to compute in this step: positions start .. start + num_tokens - 1.

    Attributes:
        new_block_ids: appended to the row's block table before the step (on a `NewRow` this is its whole table, cached
            blocks included). The table then covers every position of the chunk.
        samples: the chunk reaches the row's last known token, so the step samples the token at start + num_tokens.
    """

    row: int
    start: int
    num_tokens: int
    new_block_ids: tuple[int, ...] = ()
    samples: bool = False


class StepPlan(msgspec.Struct, frozen=True, kw_only=True):
    """One step. `chunks` hold each row at most once; `num_tokens` is their sum and never above the step budget."""

    step_id: int
    new_rows: tuple[NewRow, ...] = ()
    chunks: tuple[Chunk, ...] = ()

    @property
    def num_tokens(self) -> int:
        return sum(chunk.num_tokens for chunk in self.chunks)


class StepResult(msgspec.Struct, frozen=True, kw_only=True):
    """What a step sampled: for every chunk with `samples`, in the plan's order, row, token and log probabilities.

    Attributes:
        logprobs: parallel to `rows`; None where the row did not ask for any.
        elapsed_us: device time of the step.
    """

    step_id: int
    rows: tuple[int, ...] = ()
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs | None, ...] = ()
    elapsed_us: int = 0
