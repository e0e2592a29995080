"""The use case "which models are there"."""

from __future__ import annotations

from collections.abc import Sequence

from gateway.domain.catalog import ModelCard
from gateway.errors import ModelNotFound
from gateway.services.ports import Backend


class Catalog:
    """What is served, as callers may see it."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    def cards(self) -> Sequence[ModelCard]:
        return self._backend.cards()

    def card(self, model_id: str) -> ModelCard:
        """Raises `ModelNotFound`."""
        for card in self._backend.cards():
            if card.id == model_id:
                return card
        raise ModelNotFound(model_id)
