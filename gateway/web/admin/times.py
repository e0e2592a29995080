"""Times on the wire of the admin API: ISO 8601 in UTC with milliseconds; inside, milliseconds since the epoch."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import overload

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MILLISECOND = timedelta(milliseconds=1)


@overload
def to_ms(time: datetime) -> int: ...
@overload
def to_ms(time: datetime | None) -> int | None: ...
def to_ms(time: datetime | None) -> int | None:
    """Of a time with a zone."""
    return None if time is None else (time - _EPOCH) // _MILLISECOND


def to_iso(time_ms: int | None) -> str | None:
    """Such as ``2026-11-30T09:15:00.250Z``."""
    if time_ms is None:
        return None
    return (_EPOCH + time_ms * _MILLISECOND).isoformat(timespec="milliseconds").replace("+00:00", "Z")
