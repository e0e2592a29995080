"""Which blocks hold the KV of which tokens, so that a request that begins alike need not compute it again.

An index over full blocks: a chain from the first block of a prompt to the last one known. Knows nothing of reference
counts or eviction order (`block_pool.py`) and is told what to forget.

The hash finds a block; it does not vouch for it. An entry is a hit only if its parent is the very entry before it, and
salt and tokens are equal. So even two prefixes with one hash never share KV.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import sha256

BlockHash = Callable[[bytes, str, tuple[int, ...]], bytes]
"""(hash of the parent block or `ROOT`, salt, token ids) → at least 16 bytes."""

ROOT = bytes(32)


def hash_block(parent: bytes, salt: str, token_ids: tuple[int, ...]) -> bytes:
    """256 bits over tagged fields: fixed-width parent, salt with its length, tokens of fixed width."""
    raw = salt.encode()
    return sha256(b"%b%b%b%b" % (parent, len(raw).to_bytes(4, "little"), raw, _pack(token_ids))).digest()


def _pack(token_ids: tuple[int, ...]) -> bytes:
    return struct.pack(f"<{len(token_ids)}q", *token_ids)


@dataclass(frozen=True, slots=True, eq=False)
class CachedBlock:
    """A block whose KV is computed for exactly these tokens behind exactly this parent. Compared by identity.

    Attributes:
        serial: never used twice, unlike block ids.
        parent_serial: serial of the block before it; 0 for the first of a chain.
    """

    block_id: int
    key: bytes
    serial: int
    parent_serial: int
    salt: str
    token_ids: tuple[int, ...]


class PrefixCache:
    """The index. At most one entry for each hash, and one for each block.

    Args:
        hash_block: replaced in tests by a bad one.
    """

    def __init__(self, hash_block: BlockHash = hash_block) -> None:
        self._hash_block = hash_block
        self._by_key: dict[bytes, CachedBlock] = {}
        self._by_block: dict[int, CachedBlock] = {}
        self._last_serial = 0

    def __len__(self) -> int:
        return len(self._by_block)

    def __contains__(self, entry: CachedBlock) -> bool:
        return self._by_block.get(entry.block_id) is entry

    def find(self, parent: CachedBlock | None, salt: str, token_ids: tuple[int, ...]) -> CachedBlock | None:
        """The block that holds these tokens behind this parent (None: at the beginning)."""
        entry = self._by_key.get(self._key(parent, salt, token_ids))
        return entry if entry is not None and _is_same(entry, parent, salt, token_ids) else None

    def insert(
        self, parent: CachedBlock | None, salt: str, token_ids: tuple[int, ...], block_id: int
    ) -> tuple[CachedBlock, int | None]:
        """Enter a full, computed block that is not in the index yet.

        Returns the entry for this content, which is another block's if that came first, and the block whose entry had
        to go because it had the same hash for other content.
        """
        key = self._key(parent, salt, token_ids)
        existing = self._by_key.get(key)
        displaced = None
        if existing is not None:
            if _is_same(existing, parent, salt, token_ids):
                return existing, None
            displaced = existing.block_id
            self.forget(displaced)
        self._last_serial += 1
        parent_serial = parent.serial if parent is not None else 0
        entry = CachedBlock(block_id, key, self._last_serial, parent_serial, salt, token_ids)
        self._by_key[key] = self._by_block[block_id] = entry
        return entry, displaced

    def forget(self, block_id: int) -> None:
        """The block's contents are about to change; does nothing if it is not in the index."""
        entry = self._by_block.pop(block_id, None)
        if entry is not None:
            del self._by_key[entry.key]

    def block_ids(self) -> set[int]:
        return set(self._by_block)

    def _key(self, parent: CachedBlock | None, salt: str, token_ids: tuple[int, ...]) -> bytes:
        return self._hash_block(parent.key if parent is not None else ROOT, salt, token_ids)


def _is_same(entry: CachedBlock, parent: CachedBlock | None, salt: str, token_ids: tuple[int, ...]) -> bool:
    parent_serial = parent.serial if parent is not None else 0
    return entry.parent_serial == parent_serial and entry.salt == salt and entry.token_ids == token_ids
