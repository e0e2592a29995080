"""GET /v1/models and /v1/models/{id}."""

from typing import Any

from litestar import Controller, Request, get
from litestar.di import NamedDependency
from litestar.params import FromPath

from gateway.domain.catalog import ModelCard
from gateway.services.catalog import Catalog


class ModelsController(Controller):
    """The names that the caller's key may ask for."""

    path = "/models"
    tags = ("Models",)

    @get(operation_id="listModels")
    async def list_models(self, request: Request[Any, Any, Any], catalog: NamedDependency[Catalog]) -> dict[str, Any]:
        """All of them."""
        cards = await catalog.cards(request.scope["auth"])
        return {"object": "list", "data": [_to_wire(card) for card in cards]}

    @get("/{model_id:path}", operation_id="retrieveModel")
    async def retrieve_model(
        self, request: Request[Any, Any, Any], catalog: NamedDependency[Catalog], model_id: FromPath[str]
    ) -> dict[str, Any]:
        """One of them; ids may contain slashes."""
        return _to_wire(await catalog.card(model_id.strip("/"), request.scope["auth"]))


def _to_wire(card: ModelCard) -> dict[str, Any]:
    return {
        "id": card.id,
        "object": "model",
        "created": card.created,
        "owned_by": card.owned_by,
        "max_model_len": card.max_model_len,
    }
