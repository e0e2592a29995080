"""One layer's attention: projections, rotation, the paged cache, and back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kernels.dispatch import Kernels


@dataclass(frozen=True, slots=True, kw_only=True)
class StepContext:
    """What every layer of one step shares.

    Attributes:
        pool: the KV pool [blocks, layers, 2, kv_heads, block_tokens, head_dim].
        rotation: complex64 [T, 1 or heads, head_dim / 2], the query's scale included where it is per head.
        no_rotation: the same for layers without positions; None if there are none.
        kv_index: where keys and values go (`plan_kv_write`), for the first num_real_rows rows.
        attention: the step's attention plan.
    """

    pool: Tensor
    rotation: Tensor
    no_rotation: Tensor | None
    kv_index: Tensor
    num_real_rows: int
    attention: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """Grouped-query attention over the paged cache.

    Attributes:
        qkv: packed [(Hq + 2 Hk) D, hidden]: input norm's weight folded in, query and key rows in pair order.
        head_norm: float32 [Hq + Hk, D] weights of the per-head norm (Qwen3), or None.
        rotates: False for a layer without positions.
    """

    layer: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    qkv: Any
    output: Any
    head_norm: Tensor | None
    norm_eps: float
    rotates: bool

    def add_to(self, residual: Tensor, normed: Tensor, step: StepContext, kernels: Kernels) -> None:
        """residual += attention(normed). normed [T, hidden]; residual float32 [T, hidden]."""
        num_tokens = normed.shape[0]
        num_rotated = self.num_heads + self.num_kv_heads
        qkv = kernels.linear(normed, self.qkv).view(num_tokens, num_rotated + self.num_kv_heads, self.head_dim)
        rotated = qkv[:, :num_rotated]
        if self.head_norm is not None:
            rotated.copy_(kernels.rms_norm(rotated, self.norm_eps, torch.float32) * self.head_norm)
        rotation = step.rotation if self.rotates else step.no_rotation
        if rotation is not None:
            kernels.rotate_(rotated, rotation)
        kernels.write_kv(step.pool, self.layer, step.kv_index, qkv[: step.num_real_rows, self.num_heads :])
        attended = kernels.paged_attention(qkv[:, : self.num_heads], step.pool, self.layer, step.attention)
        kernels.add_linear_(residual, attended, self.output)
