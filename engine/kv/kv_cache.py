"""Block tables: which blocks hold a request's KV. The only owner of tables, references and cache entries.

Knows nothing of policies or of who runs. Sizes are in blocks unless a name says tokens.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from engine.errors import IntegrityError
from engine.kv.block_pool import BlockPool
from engine.kv.prefix_cache import CachedBlock, PrefixCache

WATERMARK_DIVISOR = 100
"""A newcomer leaves one block in a hundred (at least one) to those who are already running, so that their next tokens
do not force it out again at once."""


@dataclass(slots=True, eq=False)
class BlockTable:
    """The blocks of one resident request, in the order of its positions. Only ever grows at its end.

    Attributes:
        num_committed: leading blocks that have been offered to the prefix cache.
        last_committed: the cache entry with the contents of the last of those (perhaps of another block).
        num_promised: blocks that this request will still need for the tokens known when it was admitted.
    """

    salt: str
    block_ids: list[int] = field(default_factory=list)
    num_committed: int = 0
    last_committed: CachedBlock | None = None
    num_promised: int = 0


class KVCache:
    """Hands out blocks, finds those already computed, takes them back.

    Args:
        prefix_cache: None keeps nothing for later requests.
    """

    def __init__(self, num_blocks: int, block_tokens: int, prefix_cache: PrefixCache | None) -> None:
        self.block_tokens = block_tokens
        self._pool = BlockPool(num_blocks)
        self._prefix_cache = prefix_cache
        self._tables: set[BlockTable] = set()
        self._num_promised = 0
        self._watermark = max(1, num_blocks // WATERMARK_DIVISOR)

    @property
    def num_blocks(self) -> int:
        return self._pool.num_blocks

    @property
    def num_free(self) -> int:
        return self._pool.num_free

    @property
    def num_cached(self) -> int:
        return self._pool.num_cached

    @property
    def num_available(self) -> int:
        return self._pool.num_available

    @property
    def caches_prefixes(self) -> bool:
        return self._prefix_cache is not None

    def num_missing(self, table: BlockTable, num_tokens: int) -> int:
        """Blocks that the table lacks to cover so many tokens."""
        return max(0, -(-num_tokens // self.block_tokens) - len(table.block_ids))

    def num_coverable_tokens(self, table: BlockTable) -> int:
        """The most tokens that the table could cover with every available block."""
        return (len(table.block_ids) + self._pool.num_available) * self.block_tokens

    def lookup(self, token_ids: list[int], salt: str, prefix: list[CachedBlock]) -> None:
        """Find the leading blocks of these tokens; takes no references.

        Args:
            prefix: what an earlier lookup for the same tokens found, extended in place: asking again costs one block.
                Blocks that were evicted since are only noticed by `allocate`.
        """
        if self._prefix_cache is None:
            return
        # The last token is always computed again, since its logits are wanted; so a whole cached prompt drops a block.
        for i in range(len(prefix), (len(token_ids) - 1) // self.block_tokens):
            found = self._prefix_cache.find(prefix[-1] if prefix else None, salt, self._block(token_ids, i))
            if found is None:
                return
            prefix.append(found)

    def allocate(self, token_ids: list[int], salt: str, prefix: list[CachedBlock]) -> BlockTable | None:
        """A table that begins with the prefix found by `lookup`; the rest of the tokens' blocks are promised to it.

        None, and nothing changed, if all these tokens do not fit beside what is promised to others and the watermark.
        The watermark is waived when nobody holds a table, so whatever fits the pool can be admitted.
        """
        room = self._room()
        num_blocks = -(-len(token_ids) // self.block_tokens)
        if num_blocks - len(prefix) > room:
            return None
        self._drop_evicted(prefix)
        num_new = num_blocks - len(prefix)
        num_revived = sum(not self._pool.num_references(entry.block_id) for entry in prefix)
        if num_new + num_revived > room:
            return None
        for entry in prefix:
            self._pool.share(entry.block_id)
        table = BlockTable(
            salt,
            [entry.block_id for entry in prefix],
            num_committed=len(prefix),
            last_committed=prefix[-1] if prefix else None,
            num_promised=num_new,
        )
        self._tables.add(table)
        self._num_promised += num_new
        return table

    def extend(self, table: BlockTable, num_tokens: int) -> None:
        """Make the table cover so many tokens; the caller has seen that the missing blocks are available."""
        num_missing = self.num_missing(table, num_tokens)
        for _ in range(num_missing):
            block_id = self._pool.take()
            if self._prefix_cache is not None:
                self._prefix_cache.forget(block_id)
            table.block_ids.append(block_id)
        self._fulfil(table, num_missing)

    def commit(self, table: BlockTable, token_ids: list[int], num_computed: int) -> None:
        """The KV of the first num_computed tokens is there: enter the blocks that have become full into the cache.

        Only tokens that are accepted and computed by an applied step may be counted.
        """
        if self._prefix_cache is None:
            return
        for i in range(table.num_committed, num_computed // self.block_tokens):
            block_id = table.block_ids[i]
            entry, displaced = self._prefix_cache.insert(
                table.last_committed, table.salt, self._block(token_ids, i), block_id
            )
            if displaced is not None:
                self._pool.unmark_cached(displaced)
            if entry.block_id == block_id:
                self._pool.mark_cached(block_id)
            table.last_committed = entry
            table.num_committed = i + 1

    def free(self, table: BlockTable) -> None:
        """Give the table's blocks back, the tail first: what many prompts share is the head, and is to stay longest."""
        self._tables.remove(table)
        self._fulfil(table, table.num_promised)
        for block_id in reversed(table.block_ids):
            self._pool.release(block_id)
        table.block_ids.clear()

    def check(self, num_computed: Iterable[tuple[BlockTable, int]]) -> None:
        """Raise `IntegrityError` if the books are wrong. O(blocks + tables); for idle moments and tests.

        Args:
            num_computed: every table with the number of its tokens whose KV is complete.
        """
        references = [0] * self._pool.num_blocks
        for table in self._tables:
            for block_id in table.block_ids:
                references[block_id] += 1
        self._pool.check(references)
        remembered = self._prefix_cache.block_ids() if self._prefix_cache is not None else set()
        if remembered != {b for b in range(self._pool.num_blocks) if self._pool.is_cached(b)}:
            raise IntegrityError("the prefix cache and the pool disagree on which blocks are cached")
        if self._num_promised != sum(table.num_promised for table in self._tables):
            raise IntegrityError(f"{self._num_promised} blocks promised, but the tables say otherwise")
        known: set[BlockTable] = set()
        for table, num_tokens in num_computed:
            known.add(table)
            if len(table.block_ids) * self.block_tokens < num_tokens:
                raise IntegrityError(f"a table of {len(table.block_ids)} blocks for {num_tokens} computed tokens")
            for block_id in table.block_ids[num_tokens // self.block_tokens :]:
                if references[block_id] != 1 or self._pool.is_cached(block_id):
                    raise IntegrityError(f"block {block_id} may still be written, but is shared or cached")
        if known != self._tables:
            raise IntegrityError(f"{len(self._tables)} tables, but requests hold {len(known)}")

    def _room(self) -> int:
        """Blocks that a newcomer may count on."""
        if not self._tables:
            return self._pool.num_blocks
        return self._pool.num_available - self._num_promised - self._watermark

    def _drop_evicted(self, prefix: list[CachedBlock]) -> None:
        """Cut the prefix before the first block that the cache has lost since the lookup."""
        assert self._prefix_cache is not None or not prefix, "a prefix found by no cache"
        for i, entry in enumerate(prefix):
            if self._prefix_cache is None or entry not in self._prefix_cache:
                del prefix[i:]
                return

    def _fulfil(self, table: BlockTable, num_blocks: int) -> None:
        num_blocks = min(num_blocks, table.num_promised)
        table.num_promised -= num_blocks
        self._num_promised -= num_blocks

    def _block(self, token_ids: list[int], i: int) -> tuple[int, ...]:
        return tuple(token_ids[i * self.block_tokens : (i + 1) * self.block_tokens])
