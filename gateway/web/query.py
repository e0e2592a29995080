"""What stands behind the question mark of an address. The same for every protocol.

Nothing is passed over: a field that nobody knows may be a limit that was misspelled.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import TypeVar
from urllib.parse import parse_qsl

import msgspec

from gateway.errors import InvalidRequest
from gateway.web.decoding import MAX_ECHO, explain

T = TypeVar("T", bound=msgspec.Struct)

MAX_BYTES = 8 << 10
MAX_FIELDS = 16
EARLIEST = datetime(2020, 1, 1, tzinfo=UTC)
"""Nobody asks for what was before. A smaller number of seconds is a year or a day that was meant, such as 20261130."""
LATEST_MS = 253_402_297_200_000
"""The last whole hour of the year 9999: times are rounded up to hours, and texts of them end there."""

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MILLISECOND = timedelta(milliseconds=1)
_EARLIEST_MS = (EARLIEST - _EPOCH) // _MILLISECOND


def decode_query(query: bytes, kind: type[T]) -> T:
    """The fields of a query, as its `kind` has them. Unknown ones, and any given twice, are errors.

    Args:
        kind: forbids unknown fields.

    Raises:
        InvalidRequest: with `param` set if it is about a field.
    """
    if len(query) > MAX_BYTES:
        raise InvalidRequest(f"The query is longer than {MAX_BYTES} bytes.")
    try:
        pairs = parse_qsl(query.decode("latin-1"), keep_blank_values=True, max_num_fields=MAX_FIELDS)
    except ValueError as e:
        raise InvalidRequest(f"The query has more than {MAX_FIELDS} fields.") from e
    fields: dict[str, str] = {}
    for name, value in pairs:
        if name in fields:
            raise InvalidRequest("A field of the query is given twice.", param=name[:MAX_ECHO])
        fields[name] = value
    try:
        return msgspec.convert(fields, kind, strict=False)
    except msgspec.ValidationError as e:
        raise explain(e) from e


def time_ms(text: str, param: str) -> int:
    """ISO 8601, which means UTC if it names no zone, or seconds since 1970; in milliseconds since then.

    Raises:
        InvalidRequest: it is neither, or lies before 2020 or behind the last whole hour of the year 9999.
    """
    try:
        if text.isascii() and text.isdigit():
            time_ms = int(text[:20]) * 1000
        else:
            # A plus sign in an address means a blank, and many clients leave it so.
            time = datetime.fromisoformat(text.replace(" ", "+") if "T" in text else text)
            time_ms = ((time if time.tzinfo else time.replace(tzinfo=UTC)) - _EPOCH) // _MILLISECOND
    except (ValueError, OverflowError) as e:
        raise _no_time(param) from e
    if not _EARLIEST_MS <= time_ms <= LATEST_MS:
        raise _no_time(param)
    return time_ms


def _no_time(param: str) -> InvalidRequest:
    return InvalidRequest(
        f"Invalid '{param}': it must be a time from {EARLIEST.year} on, in ISO 8601 as in 2030-01-31T12:00:00Z, "
        "or in seconds since 1970.",
        param=param,
    )
