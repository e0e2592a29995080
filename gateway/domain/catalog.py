"""What is served, and under which names."""

from __future__ import annotations

import msgspec

from gateway.domain.principal import RequestClass


class ModelCard(msgspec.Struct, frozen=True, kw_only=True):
    """A model, or an alias of one, as callers see it.

    Attributes:
        created: seconds since the epoch.
        max_model_len: the window: most tokens of prompt plus output.
    """

    id: str
    created: int
    max_model_len: int
    owned_by: str = "evenhand"


class Model(msgspec.Struct, frozen=True, kw_only=True):
    """A model of the catalogue: one that some engine serves or has served. Gateways enter what they serve at start.

    Attributes:
        disabled_at_ms: from then on nobody may use it, under any name.
    """

    name: str
    created_at_ms: int
    disabled_at_ms: int | None = None


class Alias(msgspec.Struct, frozen=True, kw_only=True):
    """Another name for a model. A model's own name wins over an alias of the same name.

    Attributes:
        model: the name of a model of the catalogue, never of an alias.
        system_default: the system message of conversations that bring none.
        request_class: requests under this name are of this class at most; None leaves it to key and request.
    """

    name: str
    model: str
    system_default: str | None = None
    request_class: RequestClass | None = None
    created_at_ms: int
