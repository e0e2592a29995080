from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar, get_args

import msgspec
import pytest
import typer.core
import typer.main
from admin_kit import admin_routes, ledger_row
from identity_kit import PEPPERS, MemoryStorage, SteppedClock, fixed_authenticator
from litestar import Litestar
from metering_kit import OwnRequests

from gateway.app import build
from gateway.backends.scripted import ScriptedBackend
from gateway.cli import app
from gateway.commands.config import reference
from gateway.domain.audit import AuditDraft, AuditEntry
from gateway.domain.catalog import Alias, Model
from gateway.domain.ledger import HourlyUsage, UsageTotals
from gateway.domain.limits.periods import Period
from gateway.domain.limits.policy import Limit, Price, QuotaRule, TopUp
from gateway.domain.tenancy import AdminToken, ApiKey, Organization, Team
from gateway.errors import EvenhandError
from gateway.limit_notation import RuleForm
from gateway.services.admin_quotas import QuotaStatus
from gateway.services.admin_tokens import AdminAuthenticator
from gateway.services.administration import Administration
from gateway.services.lookup import RequestLookup
from gateway.services.usage import UsageReports
from gateway.settings import ServerSettings, Settings, all_settings
from gateway.settings_sources import load_settings
from gateway.telemetry.limit_metrics import LimitMetrics
from gateway.telemetry.metrics import GatewayMetrics
from gateway.web.admin import schema, wire
from gateway.web.admin.router import admin_router

T = TypeVar("T")

ROOT = Path(__file__).parents[2]
HANDBOOK = (ROOT / "deploy" / "README.md").read_text()
API = (ROOT / "deploy" / "API.md").read_text()
EXAMPLE = ROOT / "deploy" / "config" / "evenhand.example.toml"


def _commands(command: object, name: str = "evenhand") -> Iterator[str]:
    if isinstance(command, typer.core.TyperGroup):
        for part, inner in command.commands.items():
            yield from _commands(inner, f"{name} {part}")
    else:
        yield name


def test_the_settings_reference_is_what_the_command_prints() -> None:
    assert (ROOT / "deploy" / "SETTINGS.md").read_text() == reference(), "run: evenhand config reference"


def test_every_setting_is_described() -> None:
    assert [setting.name for setting in all_settings() if len(setting.field.description or "") < 15] == []


def test_the_example_is_all_comments_and_holds_every_setting() -> None:
    text = EXAMPLE.read_text()
    assert {name for name, section in tomllib.loads(text).items() if section} == set()
    names = re.findall(r"^(?:\[(\w+)\]|# (\w+) = .*)$", text, re.MULTILINE)
    section, found = "", []
    for header, name in names:
        if header:
            section = f"{header}."
        else:
            found.append(section + name)
    assert found == [setting.name for setting in all_settings()]


def test_the_example_s_values_are_the_defaults_where_there_is_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in [name for name in os.environ if name.upper().startswith("EVENHAND_")]:
        monkeypatch.delenv(variable)
    no_default = {setting.name.rpartition(".")[2] for setting in all_settings() if setting.field.default is None}
    uncommented = tmp_path / "example.toml"
    lines = re.sub(r"^# (\w+ = )", r"\1", EXAMPLE.read_text(), flags=re.MULTILINE).splitlines()
    uncommented.write_text("\n".join(line for line in lines if line.partition(" = ")[0] not in no_default))

    assert load_settings(uncommented).settings == Settings()


def test_every_command_is_documented_and_every_documented_command_exists() -> None:
    documented = re.findall(r"^\| `(evenhand [a-z -]+)` \|", HANDBOOK, re.MULTILINE)

    assert sorted(documented) == sorted(_commands(typer.main.get_command(app)))


def test_every_error_code_is_in_the_runbook_and_every_code_there_exists() -> None:
    runbook = (ROOT / "deploy" / "RUNBOOK.md").read_text()
    rows = re.findall(r"^\| (\d{3}) \| (.+?) \|", runbook, re.MULTILINE)
    told = {(int(status), code) for status, codes in rows for code in re.findall(r"`(\w+)`", codes)}

    def kinds(kind: type[EvenhandError]) -> Iterator[type[EvenhandError]]:
        yield kind
        for narrower in kind.__subclasses__():
            yield from kinds(narrower)

    fixed = {(kind.status, kind.code) for kind in kinds(EvenhandError) if kind.code is not None}
    sources = [path.read_text() for path in (ROOT / "gateway").rglob("*.py")]
    given = {(403, code) for text in sources for code in re.findall(r"NotAllowed\([^)]*code=\"(\w+)\"", text)}
    assert told == fixed | given


def test_every_metric_is_documented_and_every_documented_metric_exists() -> None:
    registry = GatewayMetrics(lambda: True).registry
    LimitMetrics(registry)
    documented = re.findall(r"^\| `(evenhand_\w+)` \| (.+) \|$", HANDBOOK, re.MULTILINE)

    expected = [(m.name + "_total" * (m.type == "counter"), m.documentation) for m in registry.collect()]
    assert sorted(documented) == sorted(expected)


def _application() -> Litestar:
    storage, clock, backend = MemoryStorage(), SteppedClock(), ScriptedBackend({})
    administration = Administration.over(storage, None, PEPPERS, clock)
    return build(
        backend=backend,
        authenticator=fixed_authenticator(),
        server=ServerSettings(),
        usage=UsageReports(storage, clock),
        lookup=RequestLookup(backend, storage, OwnRequests(), clock),
        admin=admin_router(administration, AdminAuthenticator(storage, PEPPERS, clock), clock, body_timeout_s=1),
    )


def test_every_route_is_documented_with_its_permission_and_every_documented_route_exists() -> None:
    routes = {
        (method, re.sub(r":\w+}", "}", path)): handler.opt.get("permission")
        for method, path, handler in admin_routes(_application())
    }
    with_version = {(method, path) for method, path in routes if (method, f"/v1{path}") in routes}
    rows = re.findall(r"^\| `([A-Z]+) (/\S+)` \| (\w+) \|", API, re.MULTILINE)
    documented = {(method, path): needs for method, path, needs in rows}

    assert documented.keys() == routes.keys() - with_version
    assert len(rows) == len(documented)
    for route, needs in documented.items():
        if route[1].startswith("/admin"):
            assert needs == routes[route], route
        else:
            assert needs == ("yes" if route[1].startswith("/v1/") else "no"), route


def _example(kind: type[T], **fields: Any) -> T:
    """Of what needs no more than some of these."""
    secret = {"public_id": "", "digest": b"", "pepper_id": ""}
    return msgspec.convert({"id": "", "name": "", "created_at_ms": 0, "secret": secret, **fields}, kind)


_ROW = ledger_row(1, team_id="t", key_id="k", closed_at_ms=0)
_USAGE = HourlyUsage(
    hour_ms=0,
    organization_id=_ROW.organization_id,
    team_id=_ROW.team_id,
    key_id=_ROW.key_id,
    model="",
    totals=UsageTotals(),
)
_RULE = QuotaRule(unit="tokens", period="day", amount=1)
_LIMIT = Limit(scope="team", scope_id="", rule=_RULE, changed_at_ms=0)
_QUOTA = QuotaStatus(limit=_LIMIT, rule=_RULE, period=Period("", 0, 1), topped_up=0, committed=0, alerts=())
_TOP_UP = TopUp(id="", scope="team", scope_id="", name="", period_id="", amount=1, reason="", created_at_ms=0)
_PRICE = Price(model="", valid_from_ms=0, prompt=0, cached=0, completion=0)
_DRAFT = AuditDraft(at_ms=0, actor="", source="", request_id="", action="", object_id="", before="", after="")
_ENTRY = AuditEntry(sequence=1, draft=_DRAFT, previous_hash=b"", hash=b"")

Body = type[msgspec.Struct] | None
OBJECTS: dict[str, tuple[wire.Wire, Body, Body]] = {
    "Organization": (wire.to_wire(_example(Organization)), schema.NewOrganization, schema.ChangedOrganization),
    "Team": (wire.to_wire(_example(Team, organization_id="")), schema.NewTeam, schema.ChangedTenant),
    "Key": (wire.to_wire(_example(ApiKey, team_id="")), schema.NewKey, schema.ChangedKey),
    "Admin token": (wire.to_wire(_example(AdminToken, role="admin")), schema.NewAdminToken, None),
    "Model": (wire.to_wire(_example(Model)), None, schema.ChangedModel),
    "Alias": (wire.to_wire(_example(Alias, model="")), schema.NewAlias, schema.ChangedAlias),
    "Limit": (wire.limit_to_wire(_LIMIT), schema.NewLimit, None),
    "Quota": (wire.quota_to_wire(_QUOTA), None, None),
    "Top-up": (wire.to_wire(_TOP_UP), schema.NewTopUp, None),
    "Price": (wire.price_to_wire(_PRICE), schema.NewPrice, None),
    "Audit entry": (wire.audit_to_wire(_ENTRY), None, None),
    "Ledger row": (wire.ledger_to_wire(_ROW), None, None),
    "Usage": (wire.usage_to_wire(_USAGE), None, None),
}
"""An answer, the body of its POST and that of its PATCH, by the name in API.md."""


@pytest.mark.parametrize("name", OBJECTS)
def test_every_field_of_an_object_is_documented_and_every_documented_field_exists(name: str) -> None:
    answer, new, changed = OBJECTS[name]
    section = API.partition(f"\n### {name}\n")[2].partition("\n### ")[0]
    rows = re.findall(r"^\| `(\w+)` \| (\w*) ?\| (\w*) ?\| (\w*) ?\| .+ \|$", section, re.MULTILINE)

    assert [field for field, told, _, _ in rows if told == "yes"] == list(answer)
    for column, body in ((2, new), (3, changed)):
        fields = msgspec.structs.fields(body) if body else ()
        expected = {field.encode_name: "must" if field.required else "may" for field in fields}
        assert {row[0]: row[column] for row in rows if row[column]} == expected


def test_every_kind_of_rule_is_documented_with_its_fields_and_every_documented_one_exists() -> None:
    section = API.partition("\n### Limit\n")[2].partition("\n### ")[0]
    documented: dict[str, set[str]] = {}
    kind = ""
    for first, names in re.findall(r"^\| (`\w+`|) ?\| (`\w+`(?:, `\w+`)*) \| .+ \|$", section, re.MULTILINE):
        kind = first.strip("`") or kind
        documented.setdefault(kind, set()).update(re.findall(r"`(\w+)`", names))

    forms = get_args(RuleForm)
    assert documented == {
        form.__struct_config__.tag: {field.name for field in msgspec.structs.fields(form)} for form in forms
    }
