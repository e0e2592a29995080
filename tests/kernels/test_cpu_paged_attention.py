"""CPU paged attention: against its oracle, through scattered blocks, and independent of chunks and neighbors."""

import random

import pytest
import torch
from torch import Tensor

from kernels import reference
from kernels.cpu import paged_attention as cpu

BLOCK = 16
HEADS, KV_HEADS, SIZE = 9, 3, 64
Chunks = list[tuple[int, int, list[int]]]


def _pool(num_blocks: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(num_blocks, 2, 2, KV_HEADS, BLOCK, SIZE).to(dtype)


def _attend(query: Tensor, pool: Tensor, chunks: Chunks, padding: int = 0) -> Tensor:
    """query [T, Hq, D] without padding; the step's padding is added and cut off again."""
    padded = torch.cat((query, query.new_zeros(padding, *query.shape[1:])))
    plan = cpu.plan_attention(pool, chunks, padded.shape[0], cpu.Workspace())
    return cpu.paged_attention(padded, pool, 1, plan)[: query.shape[0]].view_as(query)


def _scattered(num_tables: int, num_tokens: int, num_blocks: int) -> list[list[int]]:
    """Block tables for num_tables sequences of num_tokens, from all over the pool, no block twice."""
    blocks = random.Random(num_blocks).sample(range(num_blocks), num_tables * -(-num_tokens // BLOCK))
    each = len(blocks) // num_tables
    return [blocks[i * each : (i + 1) * each] for i in range(num_tables)]


CASES: dict[str, list[tuple[int, int]]] = {
    "one-decode": [(0, 1)],
    "decodes-of-unlike-lengths": [(0, 1), (15, 1), (16, 1), (255, 1), (256, 1), (300, 1)],
    "prefill-from-zero": [(0, 37)],
    "prefill-over-query-blocks": [(100, 200)],
    "prefill-over-tiles": [(250, 20)],
    "mixed": [(299, 1), (0, 9), (120, 150), (31, 1), (5, 3)],
}


@pytest.mark.parametrize("padding", [0, 1], ids=["exact", "padded"])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 0.03), (torch.float32, 2e-5)], ids=["bf16", "fp32"])
def test_attention_matches_its_oracle(dtype: torch.dtype, tolerance: float, case: str, padding: int) -> None:
    torch.manual_seed(0)
    pool = _pool(160, dtype)
    tables = _scattered(len(CASES[case]), 320, 160)
    chunks = [(start, num, table) for (start, num), table in zip(CASES[case], tables, strict=True)]
    query = (torch.randn(sum(num for _, num, _ in chunks), HEADS, SIZE) * SIZE**-0.5).to(dtype)

    result = _attend(query, pool, chunks, padding)

    expected = reference.paged_attention(query, pool, 1, chunks)
    torch.testing.assert_close(result, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("poison", [1e30, float("inf"), float("nan")])
def test_blocks_of_others_change_nothing_whatever_they_hold(poison: float) -> None:
    """And positions ahead in one's own blocks change nothing as long as they are finite, which the pool is made of."""
    torch.manual_seed(1)
    pool = _pool(64, torch.float32)
    table = _scattered(1, 48, 64)[0]
    query = torch.randn(20, HEADS, SIZE)
    clean = _attend(query, pool, [(10, 20, table)])
    poisoned = torch.full_like(pool, poison)
    for block in table[:2]:
        poisoned[block] = pool[block]
    poisoned[table[1], ..., 30 - BLOCK :, :] = 1e30

    assert torch.equal(clean, _attend(query, poisoned, [(10, 20, table)]))


@pytest.mark.parametrize("chunk", [1, 2, 7, 16, 64, 100, 128, 300])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
def test_each_token_has_the_same_bits_in_any_chunk_and_beside_any_neighbors(dtype: torch.dtype, chunk: int) -> None:
    torch.manual_seed(2)
    pool = _pool(200, dtype)
    mine, *others = _scattered(5, 560, 200)
    num_tokens = 560
    query = (torch.randn(num_tokens, HEADS, SIZE) * SIZE**-0.5).to(dtype)
    whole = _attend(query, pool, [(0, num_tokens, mine)])

    for start in range(0, num_tokens, chunk):
        num = min(chunk, num_tokens - start)
        neighbors: Chunks = [(start, 1, others[0]), (max(0, start - 200), 5, others[1]), (start // 2, 40, others[2])]
        chunks = [*neighbors[:2], (start, num, mine), neighbors[2]]
        before = sum(n for _, n, _ in neighbors[:2])
        filler = (torch.randn(before + num + 40, HEADS, SIZE)).to(dtype)
        filler[before : before + num] = query[start : start + num]
        beside = _attend(filler, pool, chunks)[before : before + num]

        assert torch.equal(whole[start : start + num], beside), f"tokens {start}..{start + num}"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("context", [1_500, 4_400, 9_000], ids=lambda n: f"{-(-n // cpu.TILE_TOKENS)}-tiles")
def test_a_token_behind_many_tiles_has_the_same_bits_alone_and_in_a_crowd(context: int, dtype: torch.dtype) -> None:
    """Sums over more than 16 tiles are taken in levels; how many there are must follow from the position alone."""
    torch.manual_seed(3)
    pool = _pool(1_200, dtype)
    mine, other = _scattered(2, 9_200, 1_200)
    start = context // cpu.QUERY_BLOCK_TOKENS * cpu.QUERY_BLOCK_TOKENS
    query = (torch.randn(cpu.QUERY_BLOCK_TOKENS, HEADS, SIZE) * SIZE**-0.5).to(dtype)
    whole = _attend(query, pool, [(start, len(query), mine)])

    for size in (1, 3, 16, 40):
        for at in (0, len(query) - size):
            chunks: Chunks = [(start + 7, 1, other), (start + at, size, mine), (start, 30, other)]
            filler = torch.randn(1 + size + 30, HEADS, SIZE).to(dtype)
            filler[1 : 1 + size] = query[at : at + size]
            beside = _attend(filler, pool, chunks)[1 : 1 + size]
            assert torch.equal(whole[at : at + size], beside), f"{size} tokens at {at}"
