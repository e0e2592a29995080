"""What the tables of a file with tenants have, before anything is checked but its kind. Names are the admin API's."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from gateway.commands.toml_tables import Table
from gateway.domain.principal import RequestClass


class FileTable(Table):
    organizations: dict[str, Any] = msgspec.field(default_factory=dict)
    models: dict[str, Any] = msgspec.field(default_factory=dict)
    aliases: dict[str, Any] = msgspec.field(default_factory=dict)
    prices: list[Any] = msgspec.field(default_factory=list)


class OrganizationTable(Table):
    weight: int | UnsetType = UNSET
    time_zone: str | UnsetType = UNSET
    disabled: bool | UnsetType = UNSET
    limits: list[Any] = msgspec.field(default_factory=list)
    teams: dict[str, Any] = msgspec.field(default_factory=dict)


class TeamTable(Table):
    weight: int | UnsetType = UNSET
    disabled: bool | UnsetType = UNSET
    limits: list[Any] = msgspec.field(default_factory=list)
    keys: dict[str, Any] = msgspec.field(default_factory=dict)


class KeyTable(Table):
    default_class: RequestClass | UnsetType = UNSET
    models: list[str] | Literal["all"] | UnsetType = UNSET
    endpoints: list[str] | Literal["all"] | UnsetType = UNSET
    networks: list[str] | Literal["all"] | UnsetType = UNSET
    max_queue_depth: int | Literal["none"] | UnsetType = UNSET
    deadline_ms: int | Literal["none"] | UnsetType = UNSET
    expires_at: Any = UNSET
    limits: list[Any] = msgspec.field(default_factory=list)


class LimitTable(Table):
    """What is said of a limit beside its rule, which `limit_notation` has the forms of."""

    model: str | None = None
    shadow: bool = False


class ModelTable(Table):
    disabled: bool


class AliasTable(Table):
    model: str
    system_default: str | UnsetType = UNSET
    request_class: RequestClass | Literal["none"] | UnsetType = UNSET


class PriceTable(Table):
    model: str
    valid_from: Any
    prompt: Any
    completion: Any
    cached: Any = UNSET
