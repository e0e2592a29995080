"""Everything administrators can do, as one value: what the admin API and the command line are given."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from gateway.domain.credential import Peppers
from gateway.services.admin_apply import Application
from gateway.services.admin_catalog import CatalogAdministration
from gateway.services.admin_changes import Changes
from gateway.services.admin_keys import Keys
from gateway.services.admin_limits import Limits
from gateway.services.admin_prices import Prices
from gateway.services.admin_quotas import Quotas
from gateway.services.admin_reports import Reports
from gateway.services.admin_tokens import AdminTokens
from gateway.services.ports import Clock
from gateway.services.stores import ChangeFeed, Storage
from gateway.services.tenants import Tenants


@dataclass(frozen=True, slots=True)
class Administration:
    """The use cases by what they are about."""

    tenants: Tenants
    keys: Keys
    tokens: AdminTokens
    catalog: CatalogAdministration
    limits: Limits
    quotas: Quotas
    prices: Prices
    application: Application
    reports: Reports

    @classmethod
    def over(cls, storage: Storage, feed: ChangeFeed | None, peppers: Peppers, clock: Clock) -> Self:
        changes = Changes(storage, feed, clock)
        return cls(
            tenants=Tenants(storage, changes),
            keys=Keys(storage, changes, peppers),
            tokens=AdminTokens(storage, changes, peppers),
            catalog=CatalogAdministration(storage, changes),
            limits=Limits(storage, changes),
            quotas=Quotas(storage, changes, clock),
            prices=Prices(storage, changes),
            application=Application(changes, peppers),
            reports=Reports(storage),
        )
