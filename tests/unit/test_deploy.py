"""What can be known of the image and of compose.yaml without building or starting anything."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.core
import typer.main
import yaml

from gateway.cli import app
from gateway.commands.health import TIMEOUT_S
from gateway.settings import Settings, all_settings
from gateway.settings_sources import load_settings
from gateway.supervisor import STOP_S

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
COMPOSE = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
OURS = [name for name, service in SERVICES.items() if service["image"].startswith("evenhand")]
GATEWAYS = ["gateway-1", "gateway-2"]
EXAMPLES = {
    "POSTGRES_PASSWORD": "0123456789abcdef",
    "REDIS_PASSWORD": "fedcba9876543210",
    "PEPPERS": "2026:" + "0123456789abcdef" * 4,
}


def instructions(stage: str | None = None) -> Iterator[tuple[str, str]]:
    """The Dockerfile's instructions and what follows them, of one stage or of all."""
    text = re.sub(r"\\\n\s*", "", (DEPLOY / "Dockerfile").read_text())
    current = None
    for line in text.splitlines():
        if not line or line.startswith("#"):
            continue
        word, _, rest = line.partition(" ")
        if word == "FROM":
            current = rest.rpartition(" AS ")[2]
        if stage in (None, current):
            yield word, rest


def image_environment(stage: str) -> dict[str, str]:
    """What a stage and those it comes from set with ENV."""
    environment: dict[str, str] = {}
    for word, rest in instructions(stage):
        if word == "FROM":
            base = rest.partition(" AS ")[0]
            if any(word == "FROM" and rest.endswith(f" AS {base}") for word, rest in instructions()):
                environment |= image_environment(base)
        if word == "ENV":
            environment |= dict(pair.split("=", 1) for pair in rest.split())
    return environment


def filled_in(value: str) -> str:
    """With what `.env` would give, or the default that stands there."""

    def replace(found: re.Match[str]) -> str:
        name, _, default = found[1].partition(":")
        return EXAMPLES.get(name) or default.removeprefix("-")

    return re.sub(r"\$\{([^}]+)\}", replace, value)


def environment_of(service: str) -> dict[str, str]:
    given = {name: filled_in(str(value)) for name, value in SERVICES[service]["environment"].items()}
    return image_environment("cpu") | given


def settings_of(service: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Settings:
    monkeypatch.chdir(tmp_path)
    for name in [setting.variable for setting in all_settings()]:
        monkeypatch.delenv(name, raising=False)
    for name, value in environment_of(service).items():
        if name.startswith("EVENHAND_"):
            monkeypatch.setenv(name, value)
    return load_settings(None).settings


def seconds(duration: str) -> float:
    return float(duration.removesuffix("s"))


def test_there_is_what_a_deployment_of_two_gateways_needs() -> None:
    assert {*GATEWAYS, "engine", "postgres", "redis"} <= set(SERVICES)
    for name in GATEWAYS:
        assert SERVICES[name]["command"] == ["gateway"]
    published = [port for name in GATEWAYS for port in SERVICES[name]["ports"]]
    assert len({port.rpartition(":")[0] for port in published}) == 2
    assert all(port.endswith(":8000") for port in published)
    assert not any("ports" in SERVICES[name] for name in ("postgres", "redis", "engine"))


def test_every_variable_is_a_setting() -> None:
    known = {setting.variable for setting in all_settings()}
    texts = [(DEPLOY / name).read_text() for name in ("compose.yaml", "Dockerfile", "RUNBOOK.md", "README.md")]
    used = {name for text in texts for name in re.findall(r"EVENHAND_\w+", text)}

    assert used - known - {"EVENHAND_CONFIG"} == set()


@pytest.mark.parametrize("service", OURS)
def test_the_variables_of_a_service_make_valid_settings(
    service: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    settings = settings_of(service, monkeypatch, tmp_path)

    assert settings.server.host == "0.0.0.0"  # noqa: S104 - it must be reached from outside the container
    if service in GATEWAYS:
        assert settings.auth.peppers is not None
        assert settings.database.url is not None
        assert settings.redis.url is not None
        assert settings.server.drain_notice_s > 0
        # Fit for several workers, too.
        Settings(**(settings.model_dump() | {"server": settings.server.model_dump() | {"workers": 2}}))


def test_gateways_and_engine_meet_and_share_their_secrets(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    one, two, engine = (settings_of(name, monkeypatch, tmp_path) for name in (*GATEWAYS, "engine"))

    assert one.engine.endpoint == two.engine.endpoint == engine.engine.endpoint
    assert one.engine.model == engine.engine.model
    assert one.auth == two.auth
    assert one.database == two.database
    socket = Path(str(one.engine.endpoint).removeprefix("ipc://"))
    for name in (*GATEWAYS, "engine"):
        assert f"engine-socket:{socket.parent}" in SERVICES[name]["volumes"]
        assert f"home:{one.home}" in SERVICES[name]["volumes"]
    made_private = next(rest for word, rest in instructions("runtime") if word == "RUN")
    assert re.search(rf"install -d -m 0700 -o evenhand -g evenhand .*{socket.parent}", made_private)


@pytest.mark.parametrize("service", GATEWAYS)
def test_a_gateway_is_given_the_time_that_it_takes_to_leave(
    service: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    server = settings_of(service, monkeypatch, tmp_path).server

    assert seconds(SERVICES[service]["stop_grace_period"]) > server.drain_notice_s + server.drain_s + STOP_S


def test_every_command_exists() -> None:
    def commands(command: object, name: str = "") -> Iterator[str]:
        if isinstance(command, typer.core.TyperGroup):
            for part, inner in command.commands.items():
                yield from commands(inner, f"{name} {part}".strip())
        else:
            yield name

    known = set(commands(typer.main.get_command(app)))
    used = {" ".join(SERVICES[name]["command"]) for name in OURS}
    used |= {" ".join(json.loads(rest)) for word, rest in instructions() if word == "CMD"}
    assert [json.loads(rest) for word, rest in instructions() if word == "ENTRYPOINT"] == [["evenhand"]]
    assert used - known == set()

    texts = [(DEPLOY / name).read_text() for name in ("RUNBOOK.md", "README.md", "compose.yaml", ".env.example")]
    told = {found for text in texts for found in re.findall(r"\bevenhand ((?:[a-z][a-z-]*)(?: [a-z][a-z-]*)?)", text)}
    first_words = {name.split()[0] for name in known}
    groups = first_words - known
    for found in told:
        first, _, second = found.partition(" ")
        assert first in first_words, found
        if first in groups and second:
            assert found in known, found


def test_health_checks_ask_what_is_there() -> None:
    [check] = [rest for word, rest in instructions() if word == "HEALTHCHECK"]
    assert json.loads(check[check.index("[") :]) == ["evenhand", "health"]
    assert seconds(re.findall(r"--timeout=(\S+)", check)[0]) > TIMEOUT_S
    assert SERVICES["engine"]["healthcheck"]["test"][-1] == "/run/evenhand/engine.sock"
    for name in GATEWAYS:
        assert "healthcheck" not in SERVICES[name], "the image's own"


def test_what_is_copied_exists_and_is_let_through() -> None:
    ignored = (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines()
    sources = [
        source
        for word, rest in instructions()
        if word == "COPY" and not rest.startswith("--from")
        for source in rest.split()[:-1]
    ]
    assert "gateway" in sources
    for source in sources:
        assert (ROOT / source).exists(), source
        assert f"!{source}" in ignored, source
    package = tomllib.loads((ROOT / "pyproject.toml").read_text())
    build = package["tool"]["hatch"]["build"]["targets"]["wheel"]
    needed = {*build["packages"], *build.get("force-include", {}), package["project"]["readme"], "LICENSE"}
    assert needed <= set(sources)


@pytest.mark.parametrize("target", ["cpu", "cuda"])
def test_an_image_runs_as_nobody_special_and_has_no_tools(target: str) -> None:
    last = list(instructions(target))
    assert [rest for word, rest in last if word == "USER"] == ["10001:10001"]
    assert last[-1][0] == "USER"
    assert last[0][1].startswith("runtime ")
    assert not any(word == "RUN" for word, _ in last)
    assert any(rest == f"--from=build-{target} /opt/evenhand /opt/evenhand" for word, rest in last if word == "COPY")
    runtime = " ".join(rest for word, rest in instructions("runtime") if word == "RUN")
    assert not re.search(r"\b(apt|pip|gcc|curl|git)\b", runtime)
    assert ("STOPSIGNAL", "SIGTERM") in list(instructions("runtime"))
    installed = next(rest for word, rest in instructions(f"build-{target}") if word == "RUN")
    assert "-c constraints.txt" in installed


def test_secrets_come_from_the_environment_file_alone() -> None:
    named = {
        name for name, _, _ in (line.partition("=") for line in (DEPLOY / ".env.example").read_text().splitlines())
    }
    text = (DEPLOY / "compose.yaml").read_text()
    used = set(re.findall(r"\$\{(\w+)", text))
    assert used <= named
    assert {name for name in used if f"${{{name}:?" in text} == set(EXAMPLES), "a start without them is refused"
    for name in EXAMPLES:
        assert f"{name}=\n" in (DEPLOY / ".env.example").read_text(), "no value that somebody could leave there"
