"""/admin/api/models and /admin/api/aliases. Their names are their addresses, and may contain slashes."""

from typing import Any

from litestar import Controller, delete, get, patch, post
from litestar.di import NamedDependency
from litestar.params import FromPath

from gateway.web.admin.auth import CHANGE, READ
from gateway.web.admin.http import AdminHttp, AdminRequest
from gateway.web.admin.schema import ChangedAlias, ChangedModel, NewAlias, NoQuery, PageQuery
from gateway.web.admin.wire import page_to_wire, to_wire
from gateway.web.decoding import BodyDecoder

_changed_model = BodyDecoder(ChangedModel)
_new_alias = BodyDecoder(NewAlias)
_changed_alias = BodyDecoder(ChangedAlias)


class AdminModelsController(Controller):
    """Models of the catalogue."""

    path = "/models"
    tags = ("Models",)

    @get(operation_id="adminListModels", opt=READ)
    async def list_page(self, request: AdminRequest, admin: NamedDependency[AdminHttp]) -> dict[str, Any]:
        """A page of them, by name."""
        return page_to_wire(await admin.catalog.models(admin.query(request, PageQuery).page))

    @get("/{name:path}", operation_id="adminGetModel", opt=READ)
    async def retrieve(
        self, request: AdminRequest, admin: NamedDependency[AdminHttp], name: FromPath[str]
    ) -> dict[str, Any]:
        """One of them."""
        admin.query(request, NoQuery)
        return to_wire(await admin.catalog.model(name.strip("/")))

    @patch("/{name:path}", operation_id="changeModel", opt=CHANGE)
    async def change(
        self, request: AdminRequest, admin: NamedDependency[AdminHttp], name: FromPath[str]
    ) -> dict[str, Any]:
        """Disabled or not."""
        wanted = await admin.body(request, _changed_model)
        changed = await admin.catalog.set_model_disabled(
            admin.actor(request), name.strip("/"), is_disabled=wanted.disabled
        )
        return to_wire(changed)


class AliasesController(Controller):
    """Other names for models."""

    path = "/aliases"
    tags = ("Aliases",)

    @get(operation_id="listAliases", opt=READ)
    async def list_page(self, request: AdminRequest, admin: NamedDependency[AdminHttp]) -> dict[str, Any]:
        """A page of them, by name."""
        return page_to_wire(await admin.catalog.aliases(admin.query(request, PageQuery).page))

    @post(operation_id="createAlias", opt=CHANGE)
    async def create(self, request: AdminRequest, admin: NamedDependency[AdminHttp]) -> dict[str, Any]:
        """Make one."""
        wanted = await admin.body(request, _new_alias)
        made = await admin.catalog.create_alias(
            admin.actor(request),
            name=wanted.name,
            model=wanted.model,
            system_default=wanted.system_default,
            request_class=wanted.request_class,
        )
        return to_wire(made)

    @get("/{name:path}", operation_id="getAlias", opt=READ)
    async def retrieve(
        self, request: AdminRequest, admin: NamedDependency[AdminHttp], name: FromPath[str]
    ) -> dict[str, Any]:
        """One of them."""
        admin.query(request, NoQuery)
        return to_wire(await admin.catalog.alias(name.strip("/")))

    @patch("/{name:path}", operation_id="changeAlias", opt=CHANGE)
    async def change(
        self, request: AdminRequest, admin: NamedDependency[AdminHttp], name: FromPath[str]
    ) -> dict[str, Any]:
        """Another model, system default or class."""
        wanted = await admin.body(request, _changed_alias)
        return to_wire(await admin.catalog.change_alias(admin.actor(request), name.strip("/"), wanted.change()))

    @delete("/{name:path}", operation_id="removeAlias", opt=CHANGE)
    async def remove(self, request: AdminRequest, admin: NamedDependency[AdminHttp], name: FromPath[str]) -> None:
        """Remove one; what it pointed at stays."""
        await admin.no_body(request)
        await admin.catalog.remove_alias(admin.actor(request), name.strip("/"))
