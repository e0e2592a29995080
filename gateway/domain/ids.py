"""Typed ids. Knows nothing of where they are stored."""

from __future__ import annotations

import re
import secrets
from typing import NewType

RequestId = NewType("RequestId", str)
OrganizationId = NewType("OrganizationId", str)
TeamId = NewType("TeamId", str)
KeyId = NewType("KeyId", str)
SessionId = NewType("SessionId", str)
AdminTokenId = NewType("AdminTokenId", str)

REQUEST_PREFIX = "req_"
_REQUEST_ID = re.compile(rf"{REQUEST_PREFIX}[0-9a-f]{{32}}")


def new_request_id(now_ms: int) -> RequestId:
    """In order of time like the others, which keeps the ledger's index in one place: new rows share its last pages."""
    return RequestId(_ordered(REQUEST_PREFIX, now_ms))


def as_request_id(text: str) -> RequestId | None:
    """The text itself, if `new_request_id` could have made it."""
    return RequestId(text) if _REQUEST_ID.fullmatch(text) else None


def new_organization_id(now_ms: int) -> OrganizationId:
    return OrganizationId(_ordered("org_", now_ms))


def new_team_id(now_ms: int) -> TeamId:
    return TeamId(_ordered("team_", now_ms))


def new_key_id(now_ms: int) -> KeyId:
    return KeyId(_ordered("key_", now_ms))


def new_admin_token_id(now_ms: int) -> AdminTokenId:
    return AdminTokenId(_ordered("adm_", now_ms))


def new_top_up_id(now_ms: int) -> str:
    """Nothing else names one, so it has no type of its own."""
    return _ordered("top_", now_ms)


def _ordered(prefix: str, now_ms: int) -> str:
    """Ids sort by the time they were made at, so that paging by id is paging by age: 48 bits of time, 80 random."""
    return f"{prefix}{now_ms & 0xFFFF_FFFF_FFFF:012x}{secrets.token_hex(10)}"
