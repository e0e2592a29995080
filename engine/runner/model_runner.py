"""The model runner: computes one step plan on the device.

It sees plans only (`engine/sched/plan.py`), never requests. On the CPU a step is computed when it is waited for, in the
caller's thread: two cores have nothing to gain from a second thread that competes for the interpreter.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
import torch

from engine.allocator import keep_freed_memory
from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.layers.decoder import Decoder
from engine.messages import TokenLogprobs
from engine.models.config import ModelConfig
from engine.models.registry import open_source
from engine.runner.rows import Rows
from engine.runner.threads import ThreadGovernor
from engine.sample.sampler import RowSampling, Sampler
from engine.sched.plan import Chunk, StepPlan, StepResult
from kernels.dispatch import KernelError, Kernels, default_dtype, select

_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


class ModelRunner:
    """A loaded model with its KV pool [blocks, layers, 2, kv_heads, block_tokens, head_dim]."""

    def __init__(self, decoder: Decoder, kernels: Kernels, *, config: EngineConfig, max_model_len: int) -> None:
        model = decoder.config
        block_shape = (model.num_layers, 2, model.num_kv_heads, config.block_tokens, model.head_dim)
        block_bytes = config.block_tokens * model.kv_token_elements * decoder.dtype.itemsize
        self.num_blocks = config.kv_cache_bytes // block_bytes
        if self.num_blocks < 2:
            raise ConfigError(f"kv_cache_bytes holds less than two blocks of {block_bytes} bytes")
        self.vocab_size = model.vocab_size
        self.kv_element_bytes = decoder.dtype.itemsize
        # Zeros, since masked positions are read too: anything finite does, NaN would not.
        self._pool = torch.zeros((self.num_blocks, *block_shape), dtype=decoder.dtype)
        self._decoder = decoder
        self._kernels = kernels
        self._sampler = Sampler(model.eos_token_ids)
        self._rows = Rows(config.max_sequences, max_model_len, config.block_tokens, model.vocab_size)
        self._block_tokens = config.block_tokens
        self._workspace = kernels.workspace()
        self._governor = ThreadGovernor(_governed_threads(decoder.dtype), torch.set_num_threads)

    def submit(self, plan: StepPlan) -> _PendingStep:
        return _PendingStep(self, plan)

    def close(self) -> None:
        """Nothing to give back: memory goes with the process."""

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> StepResult:
        """Compute a plan and sample its rows."""
        began = time.perf_counter_ns()
        for new in plan.new_rows:
            self._rows.occupy(new)
        for chunk in plan.chunks:
            self._rows.extend_table(chunk)
        sampling = [chunk for chunk in plan.chunks if chunk.samples]
        with self._governor.step():
            logits = self._forward(plan)
            token_ids, logprobs = self._sample(logits, sampling)
        return StepResult(
            step_id=plan.step_id,
            rows=tuple(chunk.row for chunk in sampling),
            token_ids=tuple(token_ids),
            logprobs=tuple(logprobs),
            elapsed_us=(time.perf_counter_ns() - began) // 1000,
        )

    def _forward(self, plan: StepPlan) -> torch.Tensor:
        """Logits [number of sampling chunks, vocab], in the plan's order."""
        kernels, dtype, rows = self._kernels, self._decoder.dtype, self._rows
        num_tokens = plan.num_tokens
        num_rows = kernels.padded_rows(num_tokens, dtype)
        token_ids = np.zeros(num_rows, dtype=np.int64)
        positions = np.zeros(num_rows, dtype=np.int64)
        block_ids = np.zeros(num_tokens, dtype=np.int64)
        last_rows, chunks, at = [], [], 0
        for chunk in plan.chunks:
            end, stop = at + chunk.num_tokens, chunk.start + chunk.num_tokens
            token_ids[at:end] = rows.token_ids[chunk.row, chunk.start : stop]
            span = np.arange(chunk.start, stop)
            positions[at:end] = span
            block_ids[at:end] = rows.block_tables[chunk.row, span // self._block_tokens]
            chunks.append((chunk.start, chunk.num_tokens, rows.block_tables[chunk.row]))
            if chunk.samples:
                last_rows.append(end - 1)
            at = end
        offsets = positions[:num_tokens] % self._block_tokens
        kv_index = kernels.plan_kv_write(self._pool, torch.from_numpy(block_ids), torch.from_numpy(offsets))
        attention = kernels.plan_attention(self._pool, chunks, num_rows, self._workspace)
        num_sampled = len(last_rows)
        last_rows += [0] * (kernels.padded_rows(num_sampled, dtype) - num_sampled)
        logits = self._decoder.forward(
            torch.from_numpy(token_ids),
            torch.from_numpy(positions),
            self._pool,
            kv_index,
            attention,
            torch.tensor(last_rows, dtype=torch.int64),
        )
        return logits[:num_sampled]

    def _sample(self, logits: torch.Tensor, chunks: list[Chunk]) -> tuple[list[int], list[TokenLogprobs | None]]:
        if not chunks:
            return [], []
        states: list[RowSampling] = []
        for chunk in chunks:
            state = self._rows.sampling[chunk.row]
            assert state is not None, f"row {chunk.row} has a chunk but was never occupied"
            states.append(state)
        positions = [chunk.start + chunk.num_tokens for chunk in chunks]
        token_ids, logprobs = self._sampler.sample(logits, states, positions)
        for chunk, position, token_id in zip(chunks, positions, token_ids, strict=True):
            self._rows.append(chunk.row, position, token_id)
        return token_ids, logprobs


@dataclass(frozen=True, slots=True)
class _PendingStep:
    runner: ModelRunner
    plan: StepPlan

    def wait(self) -> StepResult:
        return self.runner.run(self.plan)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedRunner:
    """A runner with what the core needs to know of its model."""

    runner: ModelRunner
    model_config: ModelConfig
    max_model_len: int


def _governed_threads(dtype: torch.dtype) -> int:
    """float32 activations differ in the last bit at some numbers of threads, so there the number stays as it is."""
    return torch.get_num_threads() if dtype == torch.bfloat16 else 1


def dtype_name(device: str, dtype: str) -> str:
    """The number format that ``auto`` stands for on this machine; any other as it is."""
    return str(default_dtype(device)).removeprefix("torch.") if dtype == "auto" else dtype


def build_runner(config: EngineConfig) -> LoadedRunner:
    """Load the model of a configuration. Raises `ModelLoadError`, or `ConfigError` for what this machine cannot do."""
    if config.num_threads:
        torch.set_num_threads(config.num_threads)
    try:
        kernels = select(config.device)
    except KernelError as e:
        raise ConfigError(str(e)) from e
    dtype = _DTYPES[dtype_name(config.device, config.dtype)]
    source = open_source(config.model)
    source.check()
    max_model_len = min(config.max_model_len or source.config.max_position, source.config.max_position)
    with torch.inference_mode():
        decoder = Decoder(source, kernels, dtype, max_model_len)
    runner = ModelRunner(decoder, kernels, config=config, max_model_len=max_model_len)
    keep_freed_memory()
    return LoadedRunner(runner=runner, model_config=source.config, max_model_len=max_model_len)
