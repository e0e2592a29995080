"""Norm, rotation and activation on the CPU. Each row's result depends on that row alone."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def rms_norm(x: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """x / sqrt(mean(x^2) + eps) over the last dimension, as dtype; no weight: callers fold it into what follows."""
    return F.rms_norm(x, (x.shape[-1],), None, eps).to(dtype)


def rotate_(x: Tensor, rotation: Tensor) -> None:
    """Rotate, in place, neighboring pairs of the last dimension by one complex multiplication in float32.

    x [T, H, D], its last dimension contiguous; rotation complex64 [T, 1 or H, D/2], scales included.
    """
    num_tokens, num_heads, size = x.shape
    pairs = torch.view_as_complex(x.float().view(num_tokens, num_heads, size // 2, 2))
    x.copy_(torch.view_as_real(pairs * rotation).flatten(-2))


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up, where gate and up are the halves of the last dimension. [T, 2 I] → [T, I]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)
