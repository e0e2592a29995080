"""Plain torch oracles, one for each kernel: slow, obvious, computed in float32 or better.

Tests compare device code with these; nothing on the way of a request uses them.

Shapes: T tokens, Hq query heads, Hk key-value heads, D head size, N blocks, L layers, B tokens of a block.
"""

from __future__ import annotations

import torch
from torch import Tensor


def rms_norm(x: Tensor, eps: float, weight: Tensor | None = None) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension (Zhang and Sennrich 2019)."""
    wide = x.double()
    y = wide / (wide.pow(2).mean(-1, keepdim=True) + eps).sqrt()
    return (y if weight is None else y * weight.double()).to(x.dtype)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, residual: Tensor | None = None) -> Tensor:
    """x W^T + bias + residual, summed in double precision and rounded once."""
    y = x.double() @ weight.double().T
    if bias is not None:
        y = y + bias.double()
    if residual is not None:
        y = y + residual.double()
    return y.to(x.dtype)


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up, where gate and up are the halves of the last dimension."""
    gate, up = gate_up.double().chunk(2, dim=-1)
    return (gate / (1 + (-gate).exp()) * up).to(gate_up.dtype)


def rotate(x: Tensor, angles: Tensor) -> Tensor:
    """Rotate neighboring pairs of the last dimension. x [T, H, D], angles [T, D/2] in radians."""
    wide = x.double()
    cos, sin = angles.double().cos()[:, None, :], angles.double().sin()[:, None, :]
    even, odd = wide[..., 0::2], wide[..., 1::2]
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2).to(x.dtype)


def write_kv(pool: Tensor, layer: int, block_ids: Tensor, offsets: Tensor, key: Tensor, value: Tensor) -> None:
    """Store key and value [T, Hk, D] at (block_ids[t], offsets[t]). pool [N, L, 2, Hk, B, D]."""
    for t in range(key.shape[0]):
        block, offset = int(block_ids[t]), int(offsets[t])
        pool[block, layer, 0, :, offset] = key[t]
        pool[block, layer, 1, :, offset] = value[t]


def paged_attention(
    query: Tensor, pool: Tensor, layer: int, chunks: list[tuple[int, int, list[int]]], scale: float = 1.0
) -> Tensor:
    """Causal attention of each chunk's tokens over their own paged context.

    query [T, Hq, D] holds the chunks one after another; a chunk is (position of its first token, number of tokens,
    block table). Returns [T, Hq, D].
    """
    num_kv_heads, block_tokens = pool.shape[3], pool.shape[4]
    group = query.shape[1] // num_kv_heads
    out = torch.empty_like(query)
    t = 0
    for start, num_tokens, table in chunks:
        for position in range(start, start + num_tokens):
            rows = [(table[p // block_tokens], p % block_tokens) for p in range(position + 1)]
            key = torch.stack([pool[b, layer, 0, :, o] for b, o in rows]).double()  # [context, Hk, D]
            value = torch.stack([pool[b, layer, 1, :, o] for b, o in rows]).double()
            for head in range(query.shape[1]):
                scores = key[:, head // group] @ query[t, head].double() * scale  # [context]
                weights = torch.softmax(scores, 0)
                out[t, head] = (weights @ value[:, head // group]).to(query.dtype)
            t += 1
    return out
