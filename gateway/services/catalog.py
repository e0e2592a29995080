"""The use case "which models are there": names, what they stand for, and who may use them.

A name is a model's own or an alias of one; a model's own name wins. A name that a key may not use does not exist for
it, in the same words as one that nobody may use. Knows nothing of whether an engine is up.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol, Self

from gateway.domain.catalog import Alias, Model, ModelCard
from gateway.domain.limits.policy import Price
from gateway.domain.principal import Principal, RequestClass
from gateway.errors import ModelNotFound
from gateway.services.ports import Backend


class Listing(NamedTuple):
    """The catalogue, by name.

    Attributes:
        prices: of all models, in any order.
    """

    models: Mapping[str, Model]
    aliases: Mapping[str, Alias]
    prices: tuple[Price, ...] = ()

    @classmethod
    def of(cls, models: Iterable[Model] = (), aliases: Iterable[Alias] = (), prices: Iterable[Price] = ()) -> Self:
        return cls({model.name: model for model in models}, {alias.name: alias for alias in aliases}, tuple(prices))


class Listings(Protocol):
    """Where the catalogue comes from; `gateway.services.directory.Directory` is one."""

    async def listing(self) -> Listing:
        """Raises `StorageDown`."""


class FixedListing:
    """Implements `Listings` with a catalogue that never changes. With an empty one models have their own names only."""

    def __init__(
        self, models: Iterable[Model] = (), aliases: Iterable[Alias] = (), prices: Iterable[Price] = ()
    ) -> None:
        self._listing = Listing.of(models, aliases, prices)

    async def listing(self) -> Listing:
        return self._listing


class Resolved(NamedTuple):
    """What a name stands for.

    Attributes:
        system_default: the system message of conversations that bring none.
        request_class: the highest class of requests under this name; None leaves it to key and request.
        prices: of the model, past and future ones included.
    """

    model: str
    system_default: str | None = None
    request_class: RequestClass | None = None
    prices: tuple[Price, ...] = ()


class Catalog:
    """What is served, as the holder of a key may see it."""

    def __init__(self, backend: Backend, listings: Listings) -> None:
        self._backend = backend
        self._listings = listings

    async def resolve(self, name: str, principal: Principal) -> Resolved:
        """Raises `ModelNotFound` if nobody may use the name, or the principal may not; `StorageDown`.

        Whether the model is served right now is not looked at: a backend knows it, and whether its engine is only down.
        """
        if not principal.may_use(name):
            raise ModelNotFound(name)
        listing = await self._listings.listing()
        alias = self._alias(name, listing)
        model = name if alias is None else alias.model
        if _is_disabled(model, listing):
            raise ModelNotFound(name)
        prices = tuple(price for price in listing.prices if price.model == model)
        if alias is None:
            return Resolved(model, prices=prices)
        return Resolved(model, alias.system_default, alias.request_class, prices)

    async def cards(self, principal: Principal) -> Sequence[ModelCard]:
        """What the principal may use: models as the backend lists them, then aliases by name. Raises `StorageDown`."""
        listing = await self._listings.listing()
        served = {card.id: card for card in self._backend.cards() if not _is_disabled(card.id, listing)}
        cards = list(served.values())
        for name in sorted(listing.aliases):
            alias = self._alias(name, listing)
            if alias is not None and (card := served.get(alias.model)) is not None:
                cards.append(_card_of_alias(alias, card))
        return [card for card in cards if principal.may_use(card.id)]

    async def card(self, name: str, principal: Principal) -> ModelCard:
        """The one of this name among `cards`. Raises `ModelNotFound` or `StorageDown`."""
        for card in await self.cards(principal):
            if card.id == name:
                return card
        raise ModelNotFound(name)

    def _alias(self, name: str, listing: Listing) -> Alias | None:
        """The alias of this name, unless a model has the name, be it of the catalogue or served without being there."""
        alias = listing.aliases.get(name)
        if alias is None or name in listing.models or any(card.id == name for card in self._backend.cards()):
            return None
        return alias


def _is_disabled(model: str, listing: Listing) -> bool:
    entry = listing.models.get(model)
    return entry is not None and entry.disabled_at_ms is not None


def _card_of_alias(alias: Alias, card: ModelCard) -> ModelCard:
    return ModelCard(
        id=alias.name,
        created=alias.created_at_ms // 1000,
        max_model_len=card.max_model_len,
        owned_by=card.owned_by,
    )
