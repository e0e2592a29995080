"""The audit trail: who changed what, each entry bound to the one before it by a hash."""

from __future__ import annotations

import hashlib

import msgspec

GENESIS = b"\x00" * 32
"""What the first entry is bound to."""


class AuditDraft(msgspec.Struct, frozen=True, kw_only=True):
    """An entry before it has its place in the chain.

    Attributes:
        actor: who did it: ``adm_…`` for an admin token, ``cli:NAME`` for the command line, ``system``.
        source: the network address it came from, or empty.
        request_id: of the HTTP request that did it, or empty.
        action: for example ``team.create``.
        object_id: what was changed; never a secret.
        before, after: the object as JSON without secrets; empty where there is none.
    """

    at_ms: int
    actor: str
    source: str
    request_id: str
    action: str
    object_id: str
    before: str
    after: str


class AuditEntry(msgspec.Struct, frozen=True, kw_only=True):
    """An entry in its place: `sequence` counts from 1 without gaps."""

    sequence: int
    draft: AuditDraft
    previous_hash: bytes
    hash: bytes


_encoder = msgspec.json.Encoder()


def chain_hash(sequence: int, draft: AuditDraft, previous_hash: bytes) -> bytes:
    """SHA-256 over the entry before, the place, and the draft's JSON in field order."""
    return hashlib.sha256(previous_hash + sequence.to_bytes(8) + _encoder.encode(draft)).digest()


def follows(entry: AuditEntry, previous: AuditEntry | None) -> bool:
    """Whether the entry is what was written, in its place after `previous` (None: it is the first)."""
    sequence, previous_hash = (previous.sequence + 1, previous.hash) if previous else (1, GENESIS)
    return (
        entry.sequence == sequence
        and entry.previous_hash == previous_hash
        and entry.hash == chain_hash(sequence, entry.draft, previous_hash)
    )
