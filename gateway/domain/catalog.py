"""What is served."""

from __future__ import annotations

import msgspec


class ModelCard(msgspec.Struct, frozen=True, kw_only=True):
    """A model as callers see it.

    Attributes:
        created: seconds since the epoch.
        max_model_len: the window: most tokens of prompt plus output.
    """

    id: str
    created: int
    max_model_len: int
    owned_by: str = "evenhand"
