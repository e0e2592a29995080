from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer.core
import typer.main

from gateway.cli import app
from gateway.commands.config import reference
from gateway.errors import EvenhandError
from gateway.settings import Settings, all_settings
from gateway.settings_sources import load_settings
from gateway.telemetry.metrics import GatewayMetrics

ROOT = Path(__file__).parents[2]
HANDBOOK = (ROOT / "deploy" / "README.md").read_text()
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
    metrics = GatewayMetrics(lambda: True).registry.collect()
    documented = re.findall(r"^\| `(evenhand_\w+)` \| (.+) \|$", HANDBOOK, re.MULTILINE)

    expected = [(m.name + "_total" * (m.type == "counter"), m.documentation) for m in metrics]
    assert sorted(documented) == sorted(expected)
