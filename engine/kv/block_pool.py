"""The KV pool's books: which block is free, who holds it, which one is given out next. Ids only.

Knows nothing of tokens, hashes or requests. A block is in one of three states:

    referenced   held by one or more block tables; its reference count says how many
    cached       held by nobody, but its contents can still be found by the prefix cache
    free         held by nobody, contents worthless

Blocks that nobody holds form one doubly linked list: free ones in front, then cached ones, the least recently used
first. So the list is the order of allocation and of eviction at once, and a hit takes its block out of the middle.
"""

from __future__ import annotations

from collections.abc import Sequence

from engine.errors import IntegrityError


class BlockPool:
    """Reference counts and the list of unheld blocks; every operation takes constant time.

    Links are arrays indexed by block id. Index `num_blocks` is the list's sentinel: its next is the front.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._num_references = [0] * num_blocks
        self._is_cached = bytearray(num_blocks)
        self._next: list[int] = [*range(1, num_blocks + 1), 0]
        self._prev: list[int] = [num_blocks, *range(num_blocks)]
        self._num_free = num_blocks
        self._num_cached = 0

    @property
    def num_free(self) -> int:
        return self._num_free

    @property
    def num_cached(self) -> int:
        """Blocks that only the prefix cache remembers."""
        return self._num_cached

    @property
    def num_available(self) -> int:
        """Blocks that `take` can give out before it runs dry: free and cached."""
        return self._num_free + self._num_cached

    def num_references(self, block_id: int) -> int:
        return self._num_references[block_id]

    def take(self) -> int:
        """The next block, now with one reference. If it was cached it no longer is: the caller tells the prefix cache.

        The caller has made sure that `num_available` is not 0.
        """
        block_id = self._next[self.num_blocks]
        assert block_id != self.num_blocks, "take from a pool that has run dry"
        self._unlink(block_id)
        self._is_cached[block_id] = 0
        self._num_references[block_id] = 1
        return block_id

    def share(self, block_id: int) -> None:
        """Add a reference to a referenced or cached block."""
        if self._num_references[block_id] == 0:
            self._unlink(block_id)
        self._num_references[block_id] += 1

    def release(self, block_id: int) -> None:
        """Drop a reference. The last one out makes the block free, or the most recently used of the cached ones."""
        assert self._num_references[block_id] > 0, f"block {block_id} released more often than taken"
        self._num_references[block_id] -= 1
        if self._num_references[block_id] == 0:
            self._link(block_id)

    def mark_cached(self, block_id: int) -> None:
        """The prefix cache remembers this block, which somebody holds."""
        assert self._num_references[block_id] > 0, f"block {block_id} enters the cache while nobody holds it"
        self._is_cached[block_id] = 1

    def unmark_cached(self, block_id: int) -> None:
        """The prefix cache has forgotten this block."""
        if self._num_references[block_id]:
            self._is_cached[block_id] = 0
            return
        self._unlink(block_id)
        self._is_cached[block_id] = 0
        self._link(block_id)

    def is_cached(self, block_id: int) -> bool:
        return bool(self._is_cached[block_id])

    def check(self, expected_references: Sequence[int]) -> None:
        """Raise `IntegrityError` unless every block is counted once and held as often as expected. O(num_blocks)."""
        if list(expected_references) != self._num_references:
            wrong = [
                (block_id, expected, counted)
                for block_id, (expected, counted) in enumerate(
                    zip(expected_references, self._num_references, strict=True)
                )
                if expected != counted
            ]
            raise IntegrityError(f"reference counts: (block, tables that hold it, count) {wrong[:10]}")
        unheld = self._walk()
        num_referenced = sum(count > 0 for count in self._num_references)
        num_cached = sum(self._is_cached[block_id] for block_id in unheld)
        if (len(unheld) - num_cached, num_cached) != (self._num_free, self._num_cached):
            raise IntegrityError(
                f"{len(unheld) - num_cached} free and {num_cached} cached blocks in the list, "
                f"but {self._num_free} and {self._num_cached} in the books"
            )
        if len(unheld) + num_referenced != self.num_blocks:
            raise IntegrityError(
                f"{self._num_free} free + {self._num_cached} cached + {num_referenced} referenced blocks "
                f"are not {self.num_blocks}"
            )
        if any(self._num_references[block_id] for block_id in unheld):
            raise IntegrityError("a referenced block stands in the list of unheld blocks")

    def _walk(self) -> list[int]:
        unheld: list[int] = []
        block_id, seen_cached = self._next[self.num_blocks], False
        while block_id != self.num_blocks:
            if len(unheld) == self.num_blocks or self._prev[self._next[block_id]] != block_id:
                raise IntegrityError(f"the list of unheld blocks is broken at block {block_id}")
            if seen_cached and not self._is_cached[block_id]:
                raise IntegrityError(f"free block {block_id} stands behind a cached one")
            seen_cached = bool(self._is_cached[block_id])
            unheld.append(block_id)
            block_id = self._next[block_id]
        return unheld

    def _link(self, block_id: int) -> None:
        end = self.num_blocks
        if self._is_cached[block_id]:
            before, after = self._prev[end], end
            self._num_cached += 1
        else:
            before, after = end, self._next[end]
            self._num_free += 1
        self._prev[block_id], self._next[block_id] = before, after
        self._next[before] = self._prev[after] = block_id

    def _unlink(self, block_id: int) -> None:
        before, after = self._prev[block_id], self._next[block_id]
        self._next[before], self._prev[after] = after, before
        if self._is_cached[block_id]:
            self._num_cached -= 1
        else:
            self._num_free -= 1
