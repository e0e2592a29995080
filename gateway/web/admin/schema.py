"""Bodies and queries of the admin API.

Unknown fields are errors everywhere: a limit that was misspelled must not be taken for one that was set. In a change,
what is absent stays as it is and null clears.
"""

from __future__ import annotations

from datetime import datetime
from typing import Annotated

import msgspec
from msgspec import UNSET, Meta, UnsetType

from gateway.domain.ledger import HOUR_MS
from gateway.domain.limits.periods import DEFAULT_ZONE
from gateway.domain.limits.policy import Scope
from gateway.domain.principal import RequestClass
from gateway.domain.request import Endpoint
from gateway.domain.tenancy import Role
from gateway.limit_notation import RuleForm
from gateway.services.admin_catalog import AliasChange
from gateway.services.admin_keys import KeyChange, KeyTerms
from gateway.services.admin_pages import MAX_PAGE, PageRequest
from gateway.services.tenants import OrganizationChange, TenantChange
from gateway.web.admin.times import to_ms
from gateway.web.query import time_ms

Time = Annotated[datetime, Meta(tz=True)]

USAGE_RANGE_MS = 24 * HOUR_MS
"""What a query for usage covers that does not say from when."""


class Body(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Base of all bodies."""


class NewOrganization(Body):
    name: str
    weight: int = 1
    time_zone: str = DEFAULT_ZONE


class NewTeam(Body):
    organization_id: str
    name: str
    weight: int = 1


class ChangedTenant(Body):
    """Of a team; an organization has more."""

    name: str | UnsetType = UNSET
    weight: int | UnsetType = UNSET
    disabled: bool | UnsetType = UNSET

    def change(self) -> TenantChange:
        return TenantChange(name=self.name, weight=self.weight, is_disabled=self.disabled)


class ChangedOrganization(ChangedTenant):
    time_zone: str | UnsetType = UNSET

    def change(self) -> OrganizationChange:
        return OrganizationChange(
            name=self.name, weight=self.weight, time_zone=self.time_zone, is_disabled=self.disabled
        )


class NewKey(Body):
    team_id: str
    name: str
    default_class: RequestClass = "interactive"
    models: list[str] | None = None
    endpoints: list[Endpoint] | None = None
    max_queue_depth: int | None = None
    deadline_ms: int | None = None
    networks: list[str] | None = None
    expires_at: Time | None = None

    def terms(self) -> KeyTerms:
        return KeyTerms(
            name=self.name,
            default_class=self.default_class,
            models=self.models,
            endpoints=self.endpoints,
            max_queue_depth=self.max_queue_depth,
            deadline_ms=self.deadline_ms,
            networks=self.networks,
            expires_at_ms=to_ms(self.expires_at),
        )


class ChangedKey(Body):
    name: str | UnsetType = UNSET
    default_class: RequestClass | UnsetType = UNSET
    models: list[str] | UnsetType | None = UNSET
    endpoints: list[Endpoint] | UnsetType | None = UNSET
    max_queue_depth: int | UnsetType | None = UNSET
    deadline_ms: int | UnsetType | None = UNSET
    networks: list[str] | UnsetType | None = UNSET
    expires_at: Time | UnsetType | None = UNSET

    def change(self) -> KeyChange:
        return KeyChange(
            name=self.name,
            default_class=self.default_class,
            models=self.models,
            endpoints=self.endpoints,
            max_queue_depth=self.max_queue_depth,
            deadline_ms=self.deadline_ms,
            networks=self.networks,
            expires_at_ms=UNSET if self.expires_at is UNSET else to_ms(self.expires_at),
        )


class NewAdminToken(Body):
    name: str
    role: Role
    expires_at: Time | None = None


class ChangedModel(Body):
    disabled: bool


class NewAlias(Body):
    name: str
    model: str
    system_default: str | None = None
    request_class: RequestClass | None = None


class ChangedAlias(Body):
    model: str | UnsetType = UNSET
    system_default: str | UnsetType | None = UNSET
    request_class: RequestClass | UnsetType | None = UNSET

    def change(self) -> AliasChange:
        return AliasChange(model=self.model, system_default=self.system_default, request_class=self.request_class)


class NewLimit(Body, kw_only=True):
    """Set in place of the one with its scope, model and name."""

    scope_id: str
    model: str | None = None
    rule: RuleForm
    shadow: bool = False


class NewTopUp(Body, kw_only=True):
    model: str | None = None
    name: str
    period_id: str | None = None
    amount: int
    reason: str


class NewPrice(Body, kw_only=True):
    """Micro-USD for a million tokens."""

    model: str
    valid_from: Time | None = None
    prompt: int
    cached: int | None = None
    completion: int


class Nothing(Body):
    """The body of what needs none; it may be left out."""


class NoQuery(Body):
    """Of routes that take none."""


class PageQuery(Body):
    limit: Annotated[int, Meta(ge=1, le=MAX_PAGE)] = 50
    after: str = ""

    @property
    def page(self) -> PageRequest:
        return PageRequest(self.limit, self.after)


class ModelQuery(Body):
    model: str | None = None


class LimitsQuery(PageQuery):
    scope: Scope | None = None
    scope_id: str | None = None


class PricesQuery(PageQuery):
    model: str | None = None


class TeamsQuery(PageQuery):
    organization_id: str | None = None


class OfTeamQuery(PageQuery):
    team_id: str | None = None


class UsageQuery(OfTeamQuery):
    """`from` and `until` are times as `time_ms` reads them."""

    begin: str | None = msgspec.field(name="from", default=None)
    until: str | None = None

    def range_ms(self, now_ms: int) -> tuple[int, int]:
        """Raises `InvalidRequest`."""
        until_ms = now_ms if self.until is None else time_ms(self.until, "until")
        begin_ms = max(until_ms - USAGE_RANGE_MS, 0) if self.begin is None else time_ms(self.begin, "from")
        return begin_ms, until_ms
