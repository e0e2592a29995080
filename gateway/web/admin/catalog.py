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
    """A model is in the catalogue once it has been served; administrators switch it off and on."""

    path = "/models"
    tags = ("Models",)

    @get(operation_id="adminListModels", opt=READ)
    async def list_page(self, request: AdminRequest, admin: NamedDependency[AdminHttp]) -> dict[str, Any]:
        """A page of all that were ever served, by name; raises `InvalidRequest` for a bad cursor."""
        return page_to_wire(await admin.catalog.models(admin.query(request, PageQuery).page))

    @get("/{name:path}", operation_id="adminGetModel", opt=READ)
    async def retrieve(
        self, request: AdminRequest, admin: NamedDependency[AdminHttp], name: FromPath[str]
    ) -> dict[str, Any]:
        """The model, also a disabled one; raises `NotFound`."""
        admin.query(request, NoQuery)
        return to_wire(await admin.catalog.model(name.strip("/")))

    @patch("/{name:path}", operation_id="changeModel", opt=CHANGE)
    async def change(
        self, request: AdminRequest, admin: NamedDependency[AdminHttp], name: FromPath[str]
    ) -> dict[str, Any]:
        """Switch it off or on for everybody; raises `NotFound`."""
        wanted = await admin.body(request, _changed_model)
        changed = await admin.catalog.set_model_disabled(
            admin.actor(request), name.strip("/"), is_disabled=wanted.disabled
        )
        return to_wire(changed)


class AliasesController(Controller):
    """Other names for models, with what their users get who set nothing themselves."""

    path = "/aliases"
    tags = ("Aliases",)

    @get(operation_id="listAliases", opt=READ)
    async def list_page(self, request: AdminRequest, admin: NamedDependency[AdminHttp]) -> dict[str, Any]:
        """A page of all, by name; raises `InvalidRequest` for a bad cursor."""
        return page_to_wire(await admin.catalog.aliases(admin.query(request, PageQuery).page))

    @post(operation_id="createAlias", opt=CHANGE)
    async def create(self, request: AdminRequest, admin: NamedDependency[AdminHttp]) -> dict[str, Any]:
        """Give a model another name; raises `InvalidRequest` for an unknown model, `Conflict` for a taken name."""
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
        """The alias, whether or not its model can be used; raises `NotFound`."""
        admin.query(request, NoQuery)
        return to_wire(await admin.catalog.alias(name.strip("/")))

    @patch("/{name:path}", operation_id="changeAlias", opt=CHANGE)
    async def change(
        self, request: AdminRequest, admin: NamedDependency[AdminHttp], name: FromPath[str]
    ) -> dict[str, Any]:
        """Another model, system default or class; raises `NotFound`, or `InvalidRequest` for an unknown model."""
        wanted = await admin.body(request, _changed_alias)
        return to_wire(await admin.catalog.change_alias(admin.actor(request), name.strip("/"), wanted.change()))

    @delete("/{name:path}", operation_id="removeAlias", opt=CHANGE)
    async def remove(self, request: AdminRequest, admin: NamedDependency[AdminHttp], name: FromPath[str]) -> None:
        """What it pointed at stays; raises `NotFound`."""
        await admin.no_body(request)
        await admin.catalog.remove_alias(admin.actor(request), name.strip("/"))
