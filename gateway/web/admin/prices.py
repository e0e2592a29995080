"""/admin/api/prices. A price is neither changed nor removed: a later one takes over."""

from typing import Any

from litestar import Controller, get, post
from litestar.di import NamedDependency

from gateway.web.admin.auth import CHANGE, READ
from gateway.web.admin.http import AdminHttp, AdminRequest
from gateway.web.admin.schema import NewPrice, PricesQuery
from gateway.web.admin.times import to_ms
from gateway.web.admin.wire import page_to_wire, price_to_wire
from gateway.web.decoding import BodyDecoder

_new = BodyDecoder(NewPrice)


class PricesController(Controller):
    """What tokens of models cost, from when on."""

    path = "/prices"
    tags = ("Prices",)

    @get(operation_id="listPrices", opt=READ)
    async def list_page(self, request: AdminRequest, admin: NamedDependency[AdminHttp]) -> dict[str, Any]:
        """A page of all, or of one model's, by model and time; raises `NotFound` if there is no such model."""
        query = admin.query(request, PricesQuery)
        return page_to_wire(await admin.prices.page(query.page, model=query.model), price_to_wire)

    @post(operation_id="addPrice", opt=CHANGE)
    async def add(self, request: AdminRequest, admin: NamedDependency[AdminHttp]) -> dict[str, Any]:
        """One that holds already is answered as it is; raises `InvalidRequest`, or `Conflict` for a past moment."""
        wanted = await admin.body(request, _new)
        price = await admin.prices.add(
            admin.actor(request),
            model=wanted.model,
            prompt=wanted.prompt,
            cached=wanted.cached,
            completion=wanted.completion,
            valid_from_ms=to_ms(wanted.valid_from),
        )
        return price_to_wire(price)
