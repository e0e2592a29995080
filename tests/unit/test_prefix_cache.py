"""The prefix cache and the block tables: what is found, what never is, what survives longest."""

from __future__ import annotations

import pytest

from engine.errors import IntegrityError
from engine.kv.kv_cache import BlockTable, KVCache
from engine.kv.prefix_cache import ROOT, CachedBlock, PrefixCache, hash_block

BLOCK = 4


def make_kv(num_blocks: int = 16, cache: PrefixCache | None = None) -> KVCache:
    return KVCache(num_blocks, BLOCK, cache if cache is not None else PrefixCache())


def admit(kv: KVCache, token_ids: list[int], salt: str = "") -> BlockTable:
    """Look up, allocate, and compute all tokens."""
    prefix: list[CachedBlock] = []
    kv.lookup(token_ids, salt, prefix)
    table = kv.allocate(token_ids, salt, prefix)
    assert table is not None
    kv.extend(table, len(token_ids))
    kv.commit(table, token_ids, len(token_ids))
    return table


def num_found(kv: KVCache, token_ids: list[int], salt: str = "") -> int:
    prefix: list[CachedBlock] = []
    kv.lookup(token_ids, salt, prefix)
    return len(prefix)


def bad_hash(parent: bytes, salt: str, token_ids: tuple[int, ...]) -> bytes:
    return bytes(16)


@pytest.mark.parametrize(
    ("num_cached", "num_prompt", "expected"),
    [(7, 9, 1), (8, 9, 2), (9, 10, 2), (8, 8, 1), (9, 9, 2), (4, 4, 0), (3, 9, 0), (8, 7, 1), (12, 8, 1)],
)
def test_a_hit_covers_full_blocks_and_leaves_the_last_token(num_cached: int, num_prompt: int, expected: int) -> None:
    kv = make_kv()
    kv.free(admit(kv, list(range(num_cached))))

    assert expected == num_found(kv, list(range(num_prompt)))


def test_the_blocks_of_a_hit_are_shared_with_who_computed_them() -> None:
    kv = make_kv()
    first, second = admit(kv, [*range(8), 20]), admit(kv, [*range(8), 30])

    assert first.block_ids[:2] == second.block_ids[:2]
    assert first.block_ids[2] != second.block_ids[2]
    kv.check([(first, 9), (second, 9)])


def test_only_computed_blocks_can_be_found() -> None:
    kv = make_kv()
    tokens = list(range(12))
    table = kv.allocate(tokens, "", [])
    assert table is not None
    kv.extend(table, 12)
    kv.commit(table, tokens, 7)

    assert num_found(kv, [*tokens, 99]) == 1


def test_salts_never_share() -> None:
    kv = make_kv()
    kv.free(admit(kv, list(range(9)), "team-a"))

    assert num_found(kv, list(range(9)), "team-b") == 0
    assert num_found(kv, list(range(9))) == 0
    assert num_found(kv, list(range(9)), "team-a") == 2


def test_the_hash_tells_salt_and_tokens_apart() -> None:
    fields = [
        (ROOT, "", (1, 2)),
        (ROOT, "a", (1, 2)),
        (ROOT, "\0", (1, 2)),
        (ROOT, "", (2, 1)),
        (ROOT, "", (1 + (2 << 32), 0)),
        (hash_block(ROOT, "", (1, 2)), "", (1, 2)),
        (ROOT, "\1\0\0\0\0\0\0\0", (2,)),
    ]
    keys = {hash_block(*f) for f in fields}

    assert len(fields) == len(keys)
    assert all(len(key) >= 16 for key in keys)


def test_a_forced_collision_of_tokens_is_no_hit() -> None:
    kv = make_kv(cache=PrefixCache(bad_hash))
    kv.free(admit(kv, [1, 2, 3, 4, 5]))

    assert num_found(kv, [1, 2, 3, 4, 9]) == 1
    assert num_found(kv, [1, 2, 3, 5, 9]) == 0


def test_a_forced_collision_of_salts_is_no_hit() -> None:
    kv = make_kv(cache=PrefixCache(bad_hash))
    kv.free(admit(kv, [1, 2, 3, 4, 5], "team-a"))

    assert num_found(kv, [1, 2, 3, 4, 5], "team-b") == 0


def test_a_forced_collision_of_parents_is_no_hit() -> None:
    """The second block's hash says no more than its own tokens, as if the parents' hashes had collided."""

    def forgetful_hash(parent: bytes, salt: str, token_ids: tuple[int, ...]) -> bytes:
        return hash_block(ROOT, salt, token_ids)

    kv = make_kv(cache=PrefixCache(forgetful_hash))
    kv.free(admit(kv, [1, 1, 1, 1, 7, 7, 7, 7, 5]))
    kv.free(admit(kv, [2, 2, 2, 2, 5]))

    assert num_found(kv, [2, 2, 2, 2, 7, 7, 7, 7, 5]) == 1
    assert num_found(kv, [1, 1, 1, 1, 7, 7, 7, 7, 5]) == 2


def test_a_block_displaced_by_a_collision_is_free_again() -> None:
    kv = make_kv(cache=PrefixCache(bad_hash))
    kv.free(admit(kv, [1, 2, 3, 4, 5]))
    table = admit(kv, [5, 6, 7, 8, 9])

    kv.check([(table, 5)])
    assert kv.num_cached == 0
    assert num_found(kv, [1, 2, 3, 4, 5]) == 0


def test_equal_blocks_computed_side_by_side_are_both_kept_and_one_is_found() -> None:
    kv = make_kv()
    tokens = list(range(9))
    first, second = kv.allocate(tokens, "", []), kv.allocate(tokens, "", [])
    assert first is not None
    assert second is not None
    for table in (first, second):
        kv.extend(table, 9)
        kv.commit(table, tokens, 9)
    kv.check([(first, 9), (second, 9)])
    kv.free(second)

    assert kv.num_cached == 0  # the copies are worth nothing
    kv.free(first)
    assert kv.num_cached == 2
    assert num_found(kv, tokens) == 2


def test_the_tail_is_evicted_before_the_head_and_old_before_new() -> None:
    kv = make_kv(num_blocks=6)
    kv.free(admit(kv, [1] * 9))
    kv.free(admit(kv, [2] * 9))
    assert (kv.num_free, kv.num_cached) == (2, 4)

    table = kv.allocate([3] * 12, "", [])
    assert table is not None
    kv.extend(table, 12)

    assert num_found(kv, [1] * 9) == 1
    assert num_found(kv, [2] * 9) == 2


def test_a_hit_counts_as_use() -> None:
    kv = make_kv(num_blocks=6)
    kv.free(admit(kv, [1] * 9))
    kv.free(admit(kv, [2] * 9))
    kv.free(admit(kv, [1] * 9))

    table = kv.allocate([3] * 16, "", [])
    assert table is not None
    kv.extend(table, 16)

    assert num_found(kv, [1] * 9) == 2
    assert num_found(kv, [2] * 9) == 0


def test_a_lookup_goes_on_where_the_last_one_ended() -> None:
    asked = []

    def counting_hash(parent: bytes, salt: str, token_ids: tuple[int, ...]) -> bytes:
        asked.append(token_ids)
        return hash_block(parent, salt, token_ids)

    kv = make_kv(cache=PrefixCache(counting_hash))
    tokens = list(range(17))
    writer = kv.allocate(tokens, "", [])
    assert writer is not None
    kv.extend(writer, 17)
    kv.commit(writer, tokens, 8)
    prefix: list[CachedBlock] = []
    kv.lookup(tokens, "", prefix)
    assert len(prefix) == 2
    kv.commit(writer, tokens, 12)
    asked.clear()
    kv.lookup(tokens, "", prefix)

    assert len(prefix) == 3
    assert [tuple(tokens[8:12]), tuple(tokens[12:16])] == asked


def test_a_prefix_that_was_evicted_since_the_lookup_is_not_used() -> None:
    kv = make_kv(num_blocks=4)
    kv.free(admit(kv, [1] * 9))
    prefix: list[CachedBlock] = []
    kv.lookup([1] * 9, "", prefix)
    assert len(prefix) == 2
    other = kv.allocate([2] * 12, "", [])
    assert other is not None
    kv.extend(other, 12)
    kv.free(other)

    table = kv.allocate([1] * 9, "", prefix)

    assert table is not None
    assert len(table.block_ids) == 1  # the tail is gone, the head is still there
    kv.check([(table, 4)])


def test_admission_counts_what_is_promised_to_others() -> None:
    kv = make_kv(num_blocks=8)
    first = kv.allocate([1] * 20, "", [])  # 5 blocks, none of them taken yet
    assert first is not None

    assert kv.allocate([2] * 12, "", []) is None  # 3 more would leave nothing above the watermark
    second = kv.allocate([2] * 8, "", [])
    assert second is not None
    kv.check([(first, 0), (second, 0)])
    kv.free(first)
    kv.free(second)
    kv.check([])


def test_a_request_as_large_as_the_pool_is_admitted_when_nobody_holds_a_block() -> None:
    kv = make_kv(num_blocks=4)
    kv.free(admit(kv, [1] * 9))

    table = kv.allocate([2] * 16, "", [])

    assert table is not None
    kv.extend(table, 16)
    kv.check([(table, 0)])


def test_without_a_prefix_cache_nothing_is_found() -> None:
    kv = KVCache(8, BLOCK, None)
    kv.free(admit(kv, list(range(9))))

    assert num_found(kv, list(range(9))) == 0
    assert kv.num_free == 8


def test_check_finds_a_shared_block_that_may_be_written() -> None:
    kv = make_kv()
    tokens = list(range(9))
    first, second = admit(kv, tokens), admit(kv, tokens)

    with pytest.raises(IntegrityError, match="may still be written"):
        kv.check([(first, 9), (second, 5)])


def test_check_finds_a_table_that_no_request_holds() -> None:
    kv = make_kv()
    admit(kv, list(range(9)))

    with pytest.raises(IntegrityError, match="tables"):
        kv.check([])


def test_check_finds_a_cached_block_that_the_index_has_lost() -> None:
    cache = PrefixCache()
    kv = make_kv(cache=cache)
    table = admit(kv, list(range(9)))
    cache.forget(table.block_ids[0])

    with pytest.raises(IntegrityError, match="disagree"):
        kv.check([(table, 9)])
