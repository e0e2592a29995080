"""A row that comes back is the row that went: sampling state does not depend on preemption."""

from __future__ import annotations

import torch

from engine.runner.rows import Rows
from engine.sampling_params import SamplingParams
from engine.sched.plan import Chunk, NewRow

PENALIZED = SamplingParams(seed=1, repetition_penalty=1.3, frequency_penalty=0.5, min_tokens=3)
PROMPT, OUTPUT = (5, 6, 7), (8, 9, 8)


def _occupied(token_ids: tuple[int, ...]) -> Rows:
    rows = Rows(4, 64, 16, vocab_size=20)
    rows.occupy(NewRow(row=2, token_ids=token_ids, num_prompt_tokens=len(PROMPT), sampling=PENALIZED, choice=1))
    return rows


def test_output_sampled_here_and_output_brought_back_are_the_same() -> None:
    stayed, came_back = _occupied(PROMPT), _occupied(PROMPT + OUTPUT)
    for i, token_id in enumerate(OUTPUT):
        stayed.append(2, len(PROMPT) + i, token_id)

    one, other = stayed.sampling[2], came_back.sampling[2]
    assert one is not None
    assert other is not None
    assert (one.num_output_tokens, one.choice) == (other.num_output_tokens, other.choice) == (3, 1)
    assert one.history is not None
    assert other.history is not None
    assert torch.equal(one.history.counts, other.history.counts)
    assert torch.equal(one.history.seen, other.history.seen)
    assert one.history.counts[8] == 2
    assert one.history.counts[5] == 0
    assert one.history.seen[5]
    assert stayed.token_ids[2, :6].tolist() == came_back.token_ids[2, :6].tolist() == [*PROMPT, *OUTPUT]


def test_a_new_sequence_starts_its_table_anew() -> None:
    rows = _occupied(PROMPT)
    rows.extend_table(Chunk(row=2, start=0, num_tokens=3, new_block_ids=(7,)))
    rows.extend_table(Chunk(row=2, start=16, num_tokens=1, new_block_ids=(9,)))
    assert rows.block_tables[2, :2].tolist() == [7, 9]

    rows.occupy(NewRow(row=2, token_ids=PROMPT, num_prompt_tokens=3, sampling=PENALIZED))
    rows.extend_table(Chunk(row=2, start=0, num_tokens=3, new_block_ids=(4,)))

    assert rows.block_tables[2, 0] == 4
