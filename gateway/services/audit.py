"""What the audit says of a change, and whether its chain is whole. Knows nothing of who may change what."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import msgspec

from gateway.domain.audit import AuditDraft, AuditEntry, follows
from gateway.domain.tenancy import Secret
from gateway.services.stores import Storage

SYSTEM = "system"
"""The name of the actor of what no person asked for."""

CHECK_ENTRIES = 500
"""Entries that are read at a time when the chain is checked."""

_encoder = msgspec.json.Encoder()


class Actor(msgspec.Struct, frozen=True):
    """Who changes something, and how it came here; see `AuditDraft`."""

    name: str
    source: str = ""
    request_id: str = ""


def describe(value: msgspec.Struct) -> dict[str, Any]:
    """An object's fields without what nobody may see: of a secret only its public id is left."""
    fields = msgspec.structs.asdict(value)
    secret = fields.pop("secret", None)
    if isinstance(secret, Secret):
        fields["public_id"] = secret.public_id
    return fields


def draft(
    actor: Actor,
    action: str,
    object_id: str,
    *,
    at_ms: int,
    before: msgspec.Struct | None,
    after: msgspec.Struct | None,
) -> AuditDraft:
    """What is written of one change; None stands for an object that is not there yet, or no longer."""
    return AuditDraft(
        at_ms=at_ms,
        actor=actor.name,
        source=actor.source,
        request_id=actor.request_id,
        action=action,
        object_id=object_id,
        before=_as_json(before),
        after=_as_json(after),
    )


def _as_json(value: msgspec.Struct | None) -> str:
    return "" if value is None else _encoder.encode(describe(value)).decode()


async def breaks(storage: Storage) -> AsyncIterator[str]:
    """Where the chain is not what was written, a sentence each; nothing if it is whole.

    What was cut off at the end leaves no trace in the chain: keep the last entry's hash elsewhere to find that out.
    """
    previous: AuditEntry | None = None
    while True:
        after = previous.sequence if previous else 0
        async with storage.reading() as work:
            entries = await work.audit.page(after=after, limit=CHECK_ENTRIES)
        if not entries:
            return
        for entry in entries:
            if not follows(entry, previous):
                yield _break(entry, previous)
            previous = entry


def _break(entry: AuditEntry, previous: AuditEntry | None) -> str:
    expected = previous.sequence + 1 if previous else 1
    if entry.sequence != expected:
        return f"Entry {entry.sequence} comes where {expected} was expected: entries are missing."
    return f"Entry {entry.sequence} is not what was written, or what stands before it has been changed."
