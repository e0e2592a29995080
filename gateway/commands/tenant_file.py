"""Tenants as a file: TOML in, what is wanted out, and every mistake with its place. Asks nobody.

What the tables and their settings are called is what the admin API calls them, and a rule is written as there. Money is
decimal text. `deploy/tenants.toml` has all of it.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast, get_args

import msgspec
from msgspec import UNSET, UnsetType

from gateway.commands.administer import CommandError
from gateway.commands.tenant_tables import (
    AliasTable,
    FileTable,
    KeyTable,
    LimitTable,
    ModelTable,
    OrganizationTable,
    PriceTable,
    TeamTable,
)
from gateway.commands.toml_tables import Reading, Table, part
from gateway.domain.limits.policy import Price, Rule
from gateway.errors import InvalidRequest
from gateway.limit_notation import QuotaForm, RuleForm, parse_usd, rule_of
from gateway.services.admin_catalog import AliasChange
from gateway.services.admin_keys import KeyChange
from gateway.services.admin_limits import check_limit
from gateway.services.admin_prices import check_price
from gateway.services.admin_rules import (
    check_alias_name,
    check_deadline,
    check_endpoints,
    check_models,
    check_name,
    check_networks,
    check_queue_depth,
    check_system_default,
    check_time_zone,
    check_weight,
)
from gateway.services.tenants import OrganizationChange, TenantChange
from gateway.services.wanted import (
    Mention,
    Mistake,
    Wanted,
    WantedAlias,
    WantedKey,
    WantedLimit,
    WantedModel,
    WantedOrganization,
    WantedPrice,
    WantedTeam,
)
from gateway.web.admin.times import to_ms

FORMS: dict[str, type[msgspec.Struct]] = {str(form.__struct_config__.tag): form for form in get_args(RuleForm)}
"""Of rules, by their `kind`."""

UNITS = ("tokens", "usd", "microusd")


K = TypeVar("K", bound=Table)
T = TypeVar("T")
U = TypeVar("U")


def read_tenants(path: Path) -> tuple[Wanted, Sequence[Mistake]]:
    """What the file says, but for the mistakes in it. Raises `CommandError` if it is not even TOML."""
    try:
        with path.open("rb") as file:
            tables = tomllib.load(file)
    except OSError as e:
        raise CommandError(f"{path}: cannot be read: {e.strerror}") from e
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as e:
        raise CommandError(f"{path}: not valid TOML: {e}") from e
    return wanted_of(tables)


def wanted_of(tables: Mapping[str, Any]) -> tuple[Wanted, Sequence[Mistake]]:
    """Of a file that was read."""
    tenants = _Tenants(Reading())
    return tenants.wanted(tables), tenants.mistakes


class _Tenants:
    def __init__(self, reading: Reading) -> None:
        self._reading = reading
        self._mentions: list[Mention] = []
        """Of what is not wanted for its mistakes."""

    @property
    def mistakes(self) -> Sequence[Mistake]:
        return self._reading.mistakes

    def wanted(self, tables: Mapping[str, Any]) -> Wanted:
        file = self._reading.table(FileTable, tables, "")
        assert file is not None, "a file is a table, and may be empty"
        wanted = Wanted(
            models=tuple(
                WantedModel(place=place, name=name, is_disabled=table.disabled)
                for name, place, table, _ in self._named(ModelTable, file.models, "models", None)
            ),
            aliases=tuple(self._aliases(file.aliases)),
            prices=tuple(self._prices(file.prices)),
            organizations=tuple(self._organizations(file.organizations)),
        )
        return msgspec.structs.replace(wanted, mentions=tuple(self._mentions))

    def _organizations(self, tables: Mapping[str, Any]) -> Iterator[WantedOrganization]:
        for name, place, table, is_named in self._named(OrganizationTable, tables, "organizations", check_name):
            terms = OrganizationChange(
                weight=self._checked(place, table.weight, check_weight),
                time_zone=self._checked(place, table.time_zone, check_time_zone),
                is_disabled=table.disabled,
            )
            limits = tuple(self._limits(table.limits, part(place, "limits")))
            teams = tuple(self._teams(table.teams, part(place, "teams")))
            if is_named:
                yield WantedOrganization(place=place, name=name, terms=terms, limits=limits, teams=teams)

    def _teams(self, tables: Mapping[str, Any], within: str) -> Iterator[WantedTeam]:
        for name, place, table, is_named in self._named(TeamTable, tables, within, check_name):
            terms = TenantChange(weight=self._checked(place, table.weight, check_weight), is_disabled=table.disabled)
            limits = tuple(self._limits(table.limits, part(place, "limits")))
            keys = tuple(self._keys(table.keys, part(place, "keys")))
            if is_named:
                yield WantedTeam(place=place, name=name, terms=terms, limits=limits, keys=keys)

    def _keys(self, tables: Mapping[str, Any], within: str) -> Iterator[WantedKey]:
        for name, place, table, is_named in self._named(KeyTable, tables, within, check_name):
            terms = KeyChange(
                default_class=table.default_class,
                models=self._checked(place, _or_none(table.models, "all"), _or_all(check_models)),
                endpoints=self._checked(place, _or_none(table.endpoints, "all"), _or_all(check_endpoints)),
                networks=self._checked(place, _or_none(table.networks, "all"), check_networks),
                max_queue_depth=self._checked(place, _or_none(table.max_queue_depth, "none"), check_queue_depth),
                deadline_ms=self._checked(place, _or_none(table.deadline_ms, "none"), check_deadline),
                expires_at_ms=self._expiry(part(place, "expires_at"), table.expires_at),
            )
            limits = tuple(self._limits(table.limits, part(place, "limits")))
            if is_named:
                yield WantedKey(place=place, name=name, terms=terms, limits=limits)

    def _limits(self, tables: Sequence[Any], within: str) -> Iterator[WantedLimit]:
        seen: dict[tuple[str, str | None], str] = {}
        for index, value in enumerate(tables):
            place = f"{within}[{index}]"
            limit = self._limit(value, place)
            if limit is None:
                continue
            first = seen.setdefault((limit.rule.name, limit.model), place)
            if first == place:
                yield limit
            else:
                models = "all models" if limit.model is None else "this model"
                self._reading.wrong(place, f"is a second {limit.rule.name} for {models}, beside {first}")

    def _limit(self, value: Any, place: str) -> WantedLimit | None:
        if not isinstance(value, dict):
            self._reading.wrong(place, "must be a table")
            return None
        num_before = len(self._reading.mistakes)
        table = dict(value)
        where = {name: table.pop(name) for name in ("model", "shadow") if name in table}
        beside = self._reading.table(LimitTable, where, place)
        assert beside is not None, "it can do without either"
        rule = self._rule(table, place)
        if rule is None or len(self._reading.mistakes) > num_before:
            self._mention(place, beside.model)
            return None
        return WantedLimit(place=place, rule=rule, model=beside.model, is_shadow=beside.shadow)

    def _rule(self, table: dict[str, Any], place: str) -> Rule | None:
        """Without what is wrong in it; None if that cannot be done without."""
        form = FORMS.get(str(table.get("kind")))
        if form is None:
            self._reading.wrong(part(place, "kind"), f"must be one of {', '.join(FORMS)}")
            return None
        if form is QuotaForm:
            self._read_unit(table, place)
        read = self._reading.table(form, table, place, also=("model", "shadow"))
        rule = UNSET if read is None else self._reading.check(place, partial(_rule_of, read))
        return None if rule is UNSET else rule

    def _read_unit(self, quota: dict[str, Any], place: str) -> None:
        """Put micro-USD in place of decimal USD, and anything in place of what is wrong."""
        unit = quota.get("unit", UNITS[0])
        if unit not in UNITS:
            self._reading.wrong(part(place, "unit"), f"must be one of {', '.join(UNITS)}")
            quota["unit"] = UNITS[0]
        elif unit == "usd":
            quota["unit"] = "microusd"
            if "amount" in quota:
                amount = self._usd(part(place, "amount"), quota["amount"])
                quota["amount"] = 0 if amount is UNSET else amount

    def _aliases(self, tables: Mapping[str, Any]) -> Iterator[WantedAlias]:
        for name, place, table, is_named in self._named(AliasTable, tables, "aliases", check_alias_name):
            terms = AliasChange(
                model=table.model,
                system_default=self._checked(place, _or_none(table.system_default, ""), check_system_default),
                request_class=_or_none(table.request_class, "none"),
            )
            if is_named:
                yield WantedAlias(place=place, name=name, terms=terms)
            else:
                self._mention(place, table.model)

    def _prices(self, tables: Sequence[Any]) -> Iterator[WantedPrice]:
        for index, value in enumerate(tables):
            place = f"prices[{index}]"
            table = self._reading.table(PriceTable, value, place)
            if table is None:
                continue
            prompt = self._usd(part(place, "prompt"), table.prompt)
            cached = prompt if table.cached is UNSET else self._usd(part(place, "cached"), table.cached)
            completion = self._usd(part(place, "completion"), table.completion)
            valid_from = self._moment(part(place, "valid_from"), table.valid_from)
            if prompt is UNSET or cached is UNSET or completion is UNSET or valid_from is UNSET:
                self._mention(place, table.model)
                continue
            price = Price(
                model=table.model, valid_from_ms=valid_from, prompt=prompt, cached=cached, completion=completion
            )
            if self._reading.check(place, partial(check_price, price)) is UNSET:
                self._mention(place, table.model)
            else:
                yield WantedPrice(place=place, price=price)

    def _mention(self, place: str, model: str | None) -> None:
        if model is not None:
            self._mentions.append(Mention(place, model))

    def _named(
        self, kind: type[K], tables: Mapping[str, Any], within: str, check: Callable[[str], str] | None
    ) -> Iterator[tuple[str, str, K, bool]]:
        """Name, place, table, and whether it may have this name."""
        for name, value in tables.items():
            place = part(within, name)
            is_named = check is None or self._checked(place, name, check) is not UNSET
            table = self._reading.table(kind, value, place)
            if table is not None:
                yield name, place, table, is_named

    def _checked(self, place: str, value: U | UnsetType, check: Callable[[U], T]) -> T | UnsetType:
        return UNSET if value is UNSET else self._reading.check(place, lambda: check(value))

    def _usd(self, place: str, text: object) -> int | UnsetType:
        if not isinstance(text, str):
            self._reading.wrong(place, 'must be USD as text, such as "250.00"')
            return UNSET
        try:
            return parse_usd(text)
        except ValueError as e:
            self._reading.wrong(place, str(e).removeprefix("it "))
            return UNSET

    def _expiry(self, place: str, value: object) -> int | UnsetType | None:
        return None if value == "never" else self._moment(place, value, ', or "never"')

    def _moment(self, place: str, value: object, alternative: str = "") -> int | UnsetType:
        if isinstance(value, datetime) and value.tzinfo is not None:
            return to_ms(value)
        if value is not UNSET:
            self._reading.wrong(place, f"must be a time with a zone, such as 2027-01-01T00:00:00Z{alternative}")
        return UNSET


def _rule_of(form: Any) -> Rule:
    rule = rule_of(form)
    check_limit(rule)
    return rule


def _or_all(check: Callable[[U], T]) -> Callable[[U], T]:
    """The check, in whose words something is left out to allow everything; in a file that changes nothing."""

    def in_file(value: U) -> T:
        try:
            return check(value)
        except InvalidRequest as e:
            message = e.message.replace("leave it out to allow all", 'write "all" to allow all')
            raise InvalidRequest(message, param=e.param) from e

    return in_file


def _or_none(value: T | str | UnsetType, word: str) -> T | UnsetType | None:
    """In a file it takes a word to say that there is to be none."""
    return None if value == word else cast("T | UnsetType", value)
