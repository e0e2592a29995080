"""A runner without a model, which proves on every chunk that the planner's books are true.

It plays the KV tensors: each (block, offset) remembers which token was written there, at which position, behind which
history. Before a chunk is computed its row's whole context is read back through the block table and compared with the
row's tokens; so a mixed-up table, a stale cache hit, a block given away too early or written by two rows is found in
the step in which it happens. The next token is a function of context, seed and choice alone, so chunking, caching,
preemption and batch mates cannot change it unless something is wrong.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from engine.messages import TokenLogprobs
from engine.sampling_params import SamplingParams
from engine.sched.plan import Chunk, NewRow, StepPlan, StepResult

VOCAB_SIZE = 1000
EOS = 0
STEP_US = 1000
_MASK = (1 << 64) - 1


def extend_chain(chain: int, token_id: int) -> int:
    """The history's fingerprint after one more token."""
    chain = ((chain ^ (token_id + 0x9E3779B97F4A7C15)) * 0xBF58476D1CE4E5B9) & _MASK
    return chain ^ (chain >> 29)


def next_token(chain: int, sampling: SamplingParams, choice: int, eos_every: int) -> int:
    """The token after a history: end-of-sequence in about one of eos_every cases (0: never)."""
    assert sampling.seed is not None
    drawn = extend_chain(extend_chain(chain, sampling.seed), choice)
    if eos_every and drawn % eos_every == 0:
        return EOS
    return 1 + (drawn >> 8) % (VOCAB_SIZE - 1)


def reference_tokens(
    prompt: list[int], sampling: SamplingParams, choice: int, num_tokens: int, eos_every: int
) -> list[int]:
    """The first tokens that the request samples when it is alone, stops not regarded."""
    chain = 0
    for token_id in prompt:
        chain = extend_chain(chain, token_id)
    tokens = []
    for _ in range(num_tokens):
        tokens.append(next_token(chain, sampling, choice, eos_every))
        chain = extend_chain(chain, tokens[-1])
    return tokens


@dataclass
class _Row:
    token_ids: list[int]
    sampling: SamplingParams
    choice: int
    num_computed: int | None = None  # unknown until the first chunk: a cached prefix may come before it
    block_ids: list[int] = field(default_factory=list)


@dataclass
class _Pending:
    """Computes when it is waited for; steps are computed in the order of their submission."""

    runner: FakeRunner
    step_id: int

    def wait(self) -> StepResult:
        return self.runner.finish(self.step_id)


class FakeRunner:
    """A `Runner`.

    Args:
        on_wait: called when a step is waited for, before it is computed.

    Attributes:
        plans: every plan submitted.
        fail_at: the step whose wait raises.
        most_in_flight: most steps that were submitted and not waited for at one time.
    """

    def __init__(
        self,
        num_blocks: int,
        *,
        max_sequences: int,
        max_step_tokens: int,
        block_tokens: int = 16,
        eos_every: int = 0,
        on_wait: Callable[[], None] = lambda: None,
    ) -> None:
        self.vocab_size = VOCAB_SIZE
        self.num_blocks = num_blocks
        self.plans: list[StepPlan] = []
        self.fail_at: int | None = None
        self.most_in_flight = 0
        self._max_sequences = max_sequences
        self._max_step_tokens = max_step_tokens
        self._block_tokens = block_tokens
        self._eos_every = eos_every
        self._on_wait = on_wait
        self._rows: dict[int, _Row] = {}
        self._cells: dict[tuple[int, int], tuple[int, int, int]] = {}  # → token, position, chain before it
        self._queue: list[StepPlan] = []

    def submit(self, plan: StepPlan) -> _Pending:
        assert not self.plans or plan.step_id == self.plans[-1].step_id + 1
        self.plans.append(plan)
        self._queue.append(plan)
        self.most_in_flight = max(self.most_in_flight, len(self._queue))
        return _Pending(self, plan.step_id)

    def close(self) -> None:
        self._queue.clear()

    def finish(self, step_id: int) -> StepResult:
        plan = self._queue.pop(0)
        assert plan.step_id == step_id, "steps are waited for in order, each once"
        self._on_wait()
        if step_id == self.fail_at:
            raise RuntimeError("the device is gone")
        return self._compute(plan)

    def _compute(self, plan: StepPlan) -> StepResult:
        assert plan.chunks, "an empty plan"
        assert plan.num_tokens <= self._max_step_tokens, f"{plan.num_tokens} tokens in a step"
        rows = [chunk.row for chunk in plan.chunks]
        assert len(set(rows)) == len(rows), f"a row twice in one step: {rows}"
        assert all(0 <= row < self._max_sequences for row in rows)
        for new in plan.new_rows:
            self._occupy(new, rows)
        writers: dict[int, int] = {}
        sampled = [(chunk, self._run_chunk(chunk, writers)) for chunk in plan.chunks]
        samples = [(chunk.row, token_id) for chunk, token_id in sampled if token_id is not None]
        return StepResult(
            step_id=plan.step_id,
            rows=tuple(row for row, _ in samples),
            token_ids=tuple(token_id for _, token_id in samples),
            logprobs=tuple(self._logprobs(row, token_id) for row, token_id in samples),
            elapsed_us=STEP_US,
        )

    def _occupy(self, new: NewRow, rows: list[int]) -> None:
        assert new.row in rows, "a new row without a chunk"
        assert new.sampling.seed is not None
        assert 0 < new.num_prompt_tokens <= len(new.token_ids)
        self._rows[new.row] = _Row(list(new.token_ids), new.sampling, new.choice)

    def _run_chunk(self, chunk: Chunk, writers: dict[int, int]) -> int | None:
        row = self._rows[chunk.row]
        row.block_ids.extend(chunk.new_block_ids)
        assert all(0 <= block_id < self.num_blocks for block_id in chunk.new_block_ids)
        assert len(set(row.block_ids)) == len(row.block_ids), f"a block twice in a table: {row.block_ids}"
        end = chunk.start + chunk.num_tokens
        assert chunk.num_tokens > 0
        assert end <= len(row.block_ids) * self._block_tokens, "the table does not cover the chunk"
        assert end <= len(row.token_ids), "a chunk beyond the known tokens"
        assert row.num_computed in (None, chunk.start), f"computed {row.num_computed}, chunk from {chunk.start}"
        chain = self._read_context(row, chunk.start)
        for position in range(chunk.start, end):
            block_id, offset = row.block_ids[position // self._block_tokens], position % self._block_tokens
            assert writers.setdefault(block_id, chunk.row) == chunk.row, f"two rows write block {block_id}"
            self._cells[block_id, offset] = (row.token_ids[position], position, chain)
            chain = extend_chain(chain, row.token_ids[position])
        row.num_computed = end
        assert chunk.samples == (end == len(row.token_ids)), "samples exactly at the last known token"
        if not chunk.samples:
            return None
        row.token_ids.append(next_token(chain, row.sampling, row.choice, self._eos_every))
        return row.token_ids[-1]

    def _read_context(self, row: _Row, num_tokens: int) -> int:
        """Check what the row would attend to; returns its chain."""
        chain = 0
        for position in range(num_tokens):
            block_id, offset = row.block_ids[position // self._block_tokens], position % self._block_tokens
            expected = (row.token_ids[position], position, chain)
            found = self._cells.get((block_id, offset))
            assert found == expected, f"block {block_id} at {offset}: {found} in place of {expected}"
            chain = extend_chain(chain, row.token_ids[position])
        return chain

    def _logprobs(self, row: int, token_id: int) -> TokenLogprobs | None:
        if self._rows[row].sampling.num_logprobs is None:
            return None
        return TokenLogprobs(-float(token_id))
