"""The routes of the admin API, as one router for the application to mount."""

from __future__ import annotations

from litestar import Router
from litestar.di import Provide

from gateway.services.admin_tokens import AdminAuthenticator
from gateway.services.administration import Administration
from gateway.services.ports import Clock
from gateway.services.throttle import Throttle, Unthrottled
from gateway.web.admin.auth import AdminAuthentication, permission_guard
from gateway.web.admin.catalog import AdminModelsController, AliasesController
from gateway.web.admin.http import AdminHttp
from gateway.web.admin.keys import KeysController
from gateway.web.admin.limits import LimitsController
from gateway.web.admin.prices import PricesController
from gateway.web.admin.quotas import QuotasController
from gateway.web.admin.reports import ReportsController
from gateway.web.admin.tenants import OrganizationsController, TeamsController
from gateway.web.admin.tokens import AdminTokensController
from gateway.web.errors import ADMIN_PATH


def admin_router(
    administration: Administration,
    authenticator: AdminAuthenticator,
    clock: Clock,
    *,
    body_timeout_s: float,
    changes: Throttle | None = None,
) -> Router:
    """``/admin/api``. The application's exception handler makes problem+json of errors below it.

    Args:
        changes: of one token; None lets any number pass.
    """
    admin = AdminHttp(administration, clock, body_timeout_s=body_timeout_s)
    return Router(
        f"{ADMIN_PATH}/api",
        route_handlers=[
            OrganizationsController,
            TeamsController,
            KeysController,
            AdminTokensController,
            AdminModelsController,
            AliasesController,
            LimitsController,
            QuotasController,
            PricesController,
            ReportsController,
        ],
        middleware=[AdminAuthentication(authenticator)],
        guards=[permission_guard(changes or Unthrottled())],
        dependencies={"admin": Provide(lambda: admin, sync_to_thread=False)},
        # Answers hold keys, or what is true only now.
        response_headers={"cache-control": "no-store"},
    )
