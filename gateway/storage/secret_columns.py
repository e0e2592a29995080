"""How a `Secret` lies in the columns of keys and admin tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from gateway.domain.tenancy import AdminToken, ApiKey, Secret


def with_secret_columns(value: ApiKey | AdminToken) -> dict[str, Any]:
    """Column → value: the fields of the object, with those of its secret beside them."""
    columns = msgspec.structs.asdict(value)
    del columns["secret"]
    return columns | msgspec.structs.asdict(value.secret)


def without_secret_columns(row: Mapping[str, Any]) -> dict[str, Any]:
    """The opposite: the object's fields."""
    fields = dict(row)
    fields["secret"] = Secret(**{name: fields.pop(name) for name in Secret.__struct_fields__})
    return fields
