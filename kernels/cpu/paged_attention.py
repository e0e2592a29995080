"""Paged attention on the CPU: the same code for prefill and decode, whose rows do not depend on each other.

A step's queries are cut into query blocks: up to 128 consecutive tokens of one sequence, padded to one of a few sizes.
Query blocks of one size form groups; a group runs as one batched multiplication over as many KV tiles (256 positions)
as its longest member has:

    scores = Q K^T          one product over all tiles; K = head size
    weights = softmax       over the tile-padded row; masked positions are -inf, so they add exact zeros
    out = sum over tiles of (weights V), one batched product with K = 256, summed in float32

Why this shape: products over a longer K change in the last bit when padding is added, and batched float32 products
change below four rows. Softmax and the sum over tiles do not change when whole tiles of zeros follow: both take what
comes first together in the same order. With that a token's result is the same in a decode step, in any prefill chunk,
beside any neighbors, in a group of any length.

All tiles in one product, since one for each cost a decode at 3,000 positions three quarters of its time. Groups are
joined where that adds less work than a group of its own costs in calls (`_joined`): a step of many requests otherwise
has half a dozen, at 2 ms each for a model of 30 layers.

Shapes: T tokens, Hq query heads, Hk key-value heads, G = Hq / Hk, D head size, N blocks, L layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

TILE_TOKENS = 256
QUERY_BLOCK_TOKENS = 128
_QUERY_SIZES = (1, 8, 16, 24, 32, 48, 64, 96, QUERY_BLOCK_TOKENS)
_MAX_GROUP_TILES = 256  # bounds the gathered copy of keys and values
_GROUP_COST = 8.0
"""Of a group, in tiles that a decode attends over: measured on two cores, a group costs what 8 such tiles do."""


@dataclass(frozen=True, slots=True)
class QueryGroup:
    """Query blocks of one size: num_blocks blocks of query_size tokens, each over num_tiles KV tiles.

    Attributes:
        query_index: [num_blocks * query_size] rows of the step's query; padding repeats the block's first row.
        kv_index: rows of the pool seen as [.., block_tokens * D], for layer 0: keys, then values.
        mask: [num_blocks, 1, query_size, 1, masked positions], 0 or -inf: of the last positions; nobody's are hidden
            before those.
        kept: which of the rows are not padding; None if all are.
        out_index: [kept rows] where they belong in the step's output.
    """

    num_blocks: int
    query_size: int
    num_tiles: int
    query_index: Tensor
    kv_index: Tensor
    mask: Tensor
    kept: Tensor | None
    out_index: Tensor


@dataclass(slots=True)
class AttentionPlan:
    """How one step attends; made once a step, used by every layer.

    Attributes:
        in_order: one group holds all tokens in their order, so nothing needs to be moved.
    """

    groups: list[QueryGroup]
    num_tokens: int
    in_order: bool
    workspace: Workspace


@dataclass(slots=True)
class Workspace:
    """Memory for gathered keys and values, kept from step to step: fresh pages cost more than the copy."""

    buffer: Tensor = field(default_factory=lambda: torch.empty(0))

    def take(self, num_rows: int, row_elements: int, dtype: torch.dtype) -> Tensor:
        """An uninitialised [num_rows, row_elements]; valid until the next call."""
        needed = num_rows * row_elements
        if self.buffer.numel() < needed or self.buffer.dtype != dtype:
            self.buffer = torch.empty(needed, dtype=dtype)
        return self.buffer[:needed].view(num_rows, row_elements)


def plan_attention(
    pool: Tensor, chunks: Sequence[tuple[int, int, Sequence[int]]], num_rows: int, workspace: Workspace
) -> AttentionPlan:
    """Cut a step into query groups.

    pool is [N, L, 2, Hk, block_tokens, D]. A chunk is (position of its first token, number of tokens, block table that
    covers them); the step's query holds the chunks one after another and has num_rows rows in all, the last ones
    padding.
    """
    smallest = 1 if pool.dtype == torch.bfloat16 else 8
    blocks: dict[int, list[_Block]] = {}
    row = 0
    for start, num_tokens, table in chunks:
        end = start + num_tokens
        while start < end:
            num = min(end - start, QUERY_BLOCK_TOKENS)
            size = next(s for s in _QUERY_SIZES if s >= max(num, smallest))
            blocks.setdefault(size, []).append(_Block(row, start, num, table))
            row += num
            start += num
    groups = []
    for size, of_size in sorted(blocks.items()):
        for members in _joined(of_size, size):
            tiles = members[-1].tiles
            most = max(1, _MAX_GROUP_TILES // tiles)
            groups += [_group(pool, size, tiles, members[i : i + most]) for i in range(0, len(members), most)]
    in_order = len(groups) == 1 and groups[0].kept is None and row == num_rows and _is_sorted(groups[0].out_index)
    return AttentionPlan(groups, num_rows, in_order, workspace)


class _Block(NamedTuple):
    """Consecutive tokens of one sequence: their first row in the step, position, number, and block table."""

    row: int
    start: int
    num: int
    table: Sequence[int]

    @property
    def tiles(self) -> int:
        return -(-(self.start + self.num) // TILE_TOKENS)


def _joined(blocks: list[_Block], size: int) -> list[list[_Block]]:
    """Blocks of one size as groups, the longest last in each: joined while the padding costs less than a group."""
    blocks.sort(key=lambda block: block.tiles)
    groups: list[list[_Block]] = []
    for block in blocks:
        if groups and (block.tiles - groups[-1][-1].tiles) * len(groups[-1]) * (1 + size / 16) <= _GROUP_COST:
            groups[-1].append(block)
        else:
            groups.append([block])
    return groups


def _is_sorted(index: Tensor) -> bool:
    return bool((index[1:] > index[:-1]).all())


def _group(pool: Tensor, size: int, tiles: int, members: list[_Block]) -> QueryGroup:
    _, num_layers, _, num_kv_heads, block_tokens, _ = pool.shape
    tile_blocks = tiles * TILE_TOKENS // block_tokens
    tables = torch.zeros(len(members), tile_blocks, dtype=torch.int64)
    for i, (_, start, num, table) in enumerate(members):
        used = -(-(start + num) // block_tokens)
        tables[i, :used] = torch.as_tensor(table[:used], dtype=torch.int64)
        tables[i, used:] = tables[i, 0]  # masked, but read: nobody else's block, which might hold what is no number
    first = torch.tensor([m[0] for m in members]).unsqueeze(1)
    starts = torch.tensor([m[1] for m in members]).unsqueeze(1)
    nums = torch.tensor([m[2] for m in members]).unsqueeze(1)
    steps = torch.arange(size).unsqueeze(0)
    real = steps < nums
    offset = torch.where(real, steps, 0)
    query_index = (first + offset).flatten()
    positions = starts + offset  # [members, size]
    first_hidden = min(start for _, start, _, _ in members) // TILE_TOKENS * TILE_TOKENS
    hidden = torch.arange(first_hidden, tiles * TILE_TOKENS) > positions.unsqueeze(-1)
    mask = torch.zeros(hidden.shape, dtype=pool.dtype).masked_fill_(hidden, float("-inf"))
    heads = torch.arange(2 * num_kv_heads).view(2, 1, num_kv_heads, 1)
    kv_index = (tables.view(1, len(members), 1, tile_blocks) * (num_layers * 2 * num_kv_heads) + heads).flatten()
    if bool(real.all()):
        kept, out_index = None, query_index
    else:
        kept = real.flatten().nonzero().squeeze(1)
        out_index = query_index.index_select(0, kept)
    return QueryGroup(len(members), size, tiles, query_index, kv_index, mask[:, None, :, None, :], kept, out_index)


def paged_attention(query: Tensor, pool: Tensor, layer: int, plan: AttentionPlan) -> Tensor:
    """Causal attention of a step over its paged context.

    query [T, Hq, D], already scaled; returns [T, Hq * D]. Rows of the step's padding are zero.
    """
    num_tokens, num_heads, size = query.shape
    if plan.in_order:
        return _attend(query, pool, layer, plan.groups[0], plan.workspace).view(num_tokens, num_heads * size)
    out = query.new_zeros(num_tokens, num_heads * size)
    for group in plan.groups:
        rows = _attend(query.index_select(0, group.query_index), pool, layer, group, plan.workspace)
        if group.kept is not None:
            rows = rows.index_select(0, group.kept)
        out.index_copy_(0, group.out_index, rows)
    return out


def _attend(query: Tensor, pool: Tensor, layer: int, group: QueryGroup, workspace: Workspace) -> Tensor:
    """One group; query [num_blocks * query_size, Hq, D] → [num_blocks * query_size, Hq * D]."""
    num_kv_heads, block_tokens, size = pool.shape[3:]
    num_blocks, query_size, context = group.num_blocks, group.query_size, group.num_tiles * TILE_TOKENS
    per_kv_head = query.shape[1] // num_kv_heads
    batch, rows = num_blocks * num_kv_heads, query_size * per_kv_head

    # Rows of one block, one head: the same index serves every layer through a view that starts at that layer.
    row_elements = block_tokens * size
    skipped = layer * 2 * num_kv_heads
    all_rows = pool.numel() // row_elements
    view = pool.as_strided((all_rows - skipped, row_elements), (row_elements, 1), skipped * row_elements)
    gathered = workspace.take(group.kv_index.numel(), row_elements, pool.dtype)
    torch.index_select(view, 0, group.kv_index, out=gathered)
    key, value = gathered.view(2, batch, context, size).unbind(0)

    packed = query.view(num_blocks, query_size, num_kv_heads, per_kv_head, size).transpose(1, 2)
    scores = torch.bmm(packed.reshape(batch, rows, size), key.transpose(1, 2))
    hidden = scores.view(num_blocks, num_kv_heads, query_size, per_kv_head, context)[..., -group.mask.shape[-1] :]
    hidden.add_(group.mask)
    weights = torch.softmax(scores, dim=-1)
    if group.num_tiles == 1:
        out = torch.bmm(weights, value)
    else:
        by_tile = weights.view(batch, rows, group.num_tiles, TILE_TOKENS).transpose(1, 2)
        parts = torch.bmm(
            by_tile.reshape(batch * group.num_tiles, rows, TILE_TOKENS),
            value.reshape(batch * group.num_tiles, TILE_TOKENS, size),
        )
        total = parts.view(batch, group.num_tiles, rows, size).sum(1, dtype=torch.float32)
        out = total.to(query.dtype)
    out = out.view(num_blocks, num_kv_heads, query_size, per_kv_head, size).transpose(1, 2)
    return out.reshape(num_blocks * query_size, num_kv_heads * per_kv_head * size)
