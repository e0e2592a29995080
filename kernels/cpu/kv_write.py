"""Store a step's keys and values in the paged pool on the CPU."""

from __future__ import annotations

import torch
from torch import Tensor


def plan_kv_write(pool: Tensor, block_ids: Tensor, offsets: Tensor) -> Tensor:
    """Where a step's keys and values go, for layer 0: rows of the pool seen as [.., D].

    pool [N, L, 2, Hk, block_tokens, D]; block_ids and offsets int64 [T] (which block, which token in it). Returns
    int64 [T * 2 * Hk]: for each token its key heads, then its value heads.
    """
    _, num_layers, _, num_kv_heads, block_tokens, _ = pool.shape
    heads = torch.arange(2 * num_kv_heads) * block_tokens
    first = block_ids * (num_layers * 2 * num_kv_heads * block_tokens) + offsets
    return (first.unsqueeze(1) + heads).flatten()


def write_kv(pool: Tensor, layer: int, index: Tensor, key_value: Tensor) -> None:
    """Store key_value [T, 2 * Hk, D] (keys before values) at the rows planned by `plan_kv_write`."""
    _, _, _, num_kv_heads, block_tokens, size = pool.shape
    skipped = layer * 2 * num_kv_heads * block_tokens
    view = pool.as_strided((pool.numel() // size - skipped, size), (size, 1), skipped * size)
    view.index_copy_(0, index, key_value.reshape(-1, size))
