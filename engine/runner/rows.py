"""The runner's rows: what it remembers of each resident sequence between steps.

A row is stable: a sequence keeps it as long as it is resident. The planner names rows; the rows hold the token ids
(also the last sampled one, which the planner may not have seen yet), the block table and the sampling state.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from engine.sample.penalties import RowHistory, needs_history
from engine.sample.sampler import RowSampling
from engine.sched.plan import Chunk, NewRow


class Rows:
    """Fixed arrays over max_sequences rows.

    Attributes:
        token_ids: int64 [rows, max_model_len + 1], known tokens.
        block_tables: int64 [rows, blocks of the window].
        sampling: by row; None where no sequence has been.
    """

    def __init__(self, num_rows: int, max_model_len: int, block_tokens: int, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self.token_ids: npt.NDArray[np.int64] = np.zeros((num_rows, max_model_len + 1), dtype=np.int64)
        num_blocks = -(-max_model_len // block_tokens)
        self.block_tables: npt.NDArray[np.int64] = np.zeros((num_rows, num_blocks), dtype=np.int64)
        self._num_blocks = [0] * num_rows
        self.sampling: list[RowSampling | None] = [None] * num_rows

    def occupy(self, new: NewRow) -> None:
        self.token_ids[new.row, : len(new.token_ids)] = new.token_ids
        self._num_blocks[new.row] = 0
        prompt, output = new.token_ids[: new.num_prompt_tokens], new.token_ids[new.num_prompt_tokens :]
        history = RowHistory.of(prompt, output, self._vocab_size) if needs_history(new.sampling) else None
        self.sampling[new.row] = RowSampling(new.sampling, new.choice, len(output), history)

    def extend_table(self, chunk: Chunk) -> None:
        if chunk.new_block_ids:
            start = self._num_blocks[chunk.row]
            end = start + len(chunk.new_block_ids)
            self.block_tables[chunk.row, start:end] = chunk.new_block_ids
            self._num_blocks[chunk.row] = end

    def append(self, row: int, position: int, token_id: int) -> None:
        """A token was sampled for this row."""
        self.token_ids[row, position] = token_id
        sampling = self.sampling[row]
        assert sampling is not None, f"row {row} sampled before it was occupied"
        sampling.num_output_tokens += 1
        if sampling.history is not None:
            sampling.history.add(token_id)
