from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
from pydantic import ValidationError

from engine.config import EngineConfig
from gateway.commands.config import effective
from gateway.commands.engine import engine_config
from gateway.settings import EngineSettings, ServerSettings, Settings
from gateway.settings_sources import SettingsError, load_settings

SHARED = {"EVENHAND_DATABASE__URL": "postgresql://db/evenhand", "EVENHAND_REDIS__URL": "redis://cache"}


@pytest.fixture(autouse=True)
def _nothing_set(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for variable in [name for name in os.environ if name.upper().startswith("EVENHAND_")]:
        monkeypatch.delenv(variable)
    monkeypatch.setenv("HOME", str(tmp_path / "user"))
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")


def test_defaults_need_no_file_and_no_variable(tmp_path: Path) -> None:
    settings = load_settings().settings

    assert settings == Settings()
    assert settings.home == tmp_path / "user" / ".evenhand"
    assert (settings.server.host, settings.server.port, settings.server.metrics_port) == ("127.0.0.1", 8000, 9464)
    assert settings.engine.model == "smollm2-135m-instruct"


def test_the_engine_has_the_same_defaults(tmp_path: Path) -> None:
    model = tmp_path / "some.gguf"
    model.touch()

    config = engine_config(Settings(home=tmp_path, engine=EngineSettings(model=str(model))))

    assert replace(config, dtype="auto") == EngineConfig(model=model, model_name="some")


def test_a_variable_beats_the_file_and_an_option_beats_both(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("evenhand.toml").write_text('[server]\nport = 1001\nhost = "::1"\nmetrics_port = 1002\n')
    monkeypatch.setenv("EVENHAND_SERVER__PORT", "2001")
    monkeypatch.setenv("EVENHAND_SERVER__HOST", "::2")

    loaded = load_settings(options={"server.port": 3001, "engine.model": None})

    server = loaded.settings.server
    assert (server.metrics_port, server.host, server.port) == (1002, "::2", 3001)
    assert loaded.origins["server.metrics_port"] == "evenhand.toml"
    assert loaded.origins["server.host"] == "EVENHAND_SERVER__HOST"
    assert loaded.origins["server.port"] == "--port"
    assert loaded.origins["engine.model"] == "default"


def test_the_file_is_looked_for_in_a_fixed_order(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def write(path: Path, port: int) -> Path:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"[server]\nport = {port}\n")
        return path

    monkeypatch.setenv("EVENHAND_HOME", str(tmp_path / "home"))
    write(tmp_path / "home" / "evenhand.toml", 1)
    assert load_settings().settings.server.port == 1
    write(Path("evenhand.toml"), 2)
    assert load_settings().settings.server.port == 2
    monkeypatch.setenv("EVENHAND_CONFIG", str(write(tmp_path / "named.toml", 3)))
    assert load_settings().settings.server.port == 3
    assert load_settings(write(tmp_path / "given.toml", 4)).settings.server.port == 4


def test_the_fixed_names_are_all_read_from_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("cert", "key"):
        (tmp_path / name).touch()
    values = SHARED | {
        "EVENHAND_HOME": str(tmp_path),
        "EVENHAND_SERVER__HOST": "::1",
        "EVENHAND_SERVER__PORT": "81",
        "EVENHAND_SERVER__WORKERS": "2",
        "EVENHAND_SERVER__TLS_CERT": str(tmp_path / "cert"),
        "EVENHAND_SERVER__TLS_KEY": str(tmp_path / "key"),
        "EVENHAND_SERVER__METRICS_PORT": "82",
        "EVENHAND_ENGINE__MODEL": "m",
        "EVENHAND_ENGINE__DEVICE": "cuda",
        "EVENHAND_ENGINE__DTYPE": "float32",
        "EVENHAND_ENGINE__POLICY": "static",
        "EVENHAND_ENGINE__MAX_SEQUENCES": "3",
        "EVENHAND_ENGINE__MAX_STEP_TOKENS": "4",
        "EVENHAND_ENGINE__KV_CACHE_BYTES": "1GiB",
        "EVENHAND_ENGINE__HOST_KV_BYTES": "1048576",
        "EVENHAND_ENGINE__RECORD": "plans",
    }
    for name, value in values.items():
        monkeypatch.setenv(name, value)

    loaded = load_settings()

    assert {origin for origin in loaded.origins.values() if origin != "default"} == set(values)
    assert loaded.settings.engine.kv_cache_bytes == 1 << 30
    assert loaded.settings.engine.host_kv_bytes == 1 << 20
    assert loaded.settings.engine.record == Path.cwd() / "plans"


@pytest.mark.parametrize(
    ("variable", "nearest"),
    [
        ("EVENHAND_SERVER__PROT", "EVENHAND_SERVER__PORT"),
        ("EVENHAND_SEVER__PORT", "EVENHAND_SERVER__PORT"),
        ("EVENHAND_ENGINE_MODEL", "EVENHAND_ENGINE__MODEL"),
        ("EVENHAND_SERVER", "EVENHAND_SERVER__PORT"),
    ],
)
def test_an_unknown_variable_is_refused_with_the_nearest_name(
    monkeypatch: pytest.MonkeyPatch, variable: str, nearest: str
) -> None:
    monkeypatch.setenv(variable, "1")

    with pytest.raises(SettingsError, match=f"environment: unknown setting {variable}; did you mean {nearest}"):
        load_settings()


@pytest.mark.parametrize(
    ("text", "name", "nearest"),
    [
        ("[server]\nprot = 1", "server.prot", "server.port"),
        ("[engin]\nmodel = 'x'", "engin.model", "engine.model"),
        ("port = 1", "port", "server.port"),
        ("server = 1", "server", "server"),
    ],
)
def test_an_unknown_name_in_the_file_is_refused_with_the_nearest_name(text: str, name: str, nearest: str) -> None:
    Path("evenhand.toml").write_text(text)

    with pytest.raises(SettingsError, match=rf"evenhand\.toml: unknown setting {name}; did you mean {nearest}"):
        load_settings()


def test_a_bad_value_is_one_line_with_where_it_came_from(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("evenhand.toml").write_text('[engine]\ndevice = "gpu"\n')
    monkeypatch.setenv("EVENHAND_SERVER__PORT", "70000")

    with pytest.raises(SettingsError) as caught:
        load_settings()

    first, second = str(caught.value).splitlines()
    assert first.startswith("server.port (from EVENHAND_SERVER__PORT): ")
    assert first.endswith("not '70000'")
    assert second == "engine.device (from evenhand.toml): Input should be 'cpu' or 'cuda', not 'gpu'"


@pytest.mark.parametrize("text", ["[server", 'x = "\xff"', None])
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, text: str | None) -> None:
    path = tmp_path / "broken.toml"
    if text is not None:
        path.write_text(text, encoding="latin-1")

    with pytest.raises(SettingsError, match=r"broken\.toml"):
        load_settings(path)


def test_an_empty_variable_is_one_that_is_not_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVENHAND_ENGINE__RECORD", "")

    assert load_settings().settings.engine.record is None


@pytest.mark.parametrize("missing", SHARED)
def test_several_workers_without_shared_state_are_refused(monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    monkeypatch.setenv("EVENHAND_SERVER__WORKERS", "2")
    for name, value in SHARED.items():
        if name != missing:
            monkeypatch.setenv(name, value)

    with pytest.raises(SettingsError, match=r"needs database\.url \(PostgreSQL\) and redis\.url"):
        load_settings()


def test_several_workers_do_not_take_sqlite(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (SHARED | {"EVENHAND_DATABASE__URL": "sqlite:///x", "EVENHAND_SERVER__WORKERS": "2"}).items():
        monkeypatch.setenv(name, value)

    with pytest.raises(SettingsError, match="PostgreSQL"):
        load_settings()


@pytest.mark.parametrize(
    ("when", "processes", "is_refused"), [("degrade", 1, True), ("degrade", 2, False), ("refuse", 1, False)]
)
def test_shares_for_fewer_processes_than_there_are_workers_are_refused(
    monkeypatch: pytest.MonkeyPatch, when: str, processes: int, is_refused: bool
) -> None:
    limits = {"EVENHAND_LIMITS__WHEN_UNAVAILABLE": when, "EVENHAND_LIMITS__PROCESSES": str(processes)}
    for name, value in (SHARED | limits | {"EVENHAND_SERVER__WORKERS": "2"}).items():
        monkeypatch.setenv(name, value)

    if not is_refused:
        assert load_settings().settings.limits.processes == processes
        return
    with pytest.raises(SettingsError, match=r"server\.workers is 2, but limits\.processes is 1: with "):
        load_settings()


def test_half_of_a_tls_pair_is_refused(tmp_path: Path) -> None:
    (tmp_path / "cert").touch()

    with pytest.raises(ValidationError, match="go together"):
        ServerSettings(tls_cert=tmp_path / "cert")


def test_the_tree_cannot_be_changed() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        Settings().server.port = 1  # type: ignore[misc]


def test_secrets_show_neither_in_the_listing_nor_in_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVENHAND_DATABASE__URL", "postgresql://user:hunter2@db/x")
    loaded = load_settings()
    assert "hunter2" not in effective(loaded) + repr(loaded)
    assert loaded.settings.database.url is not None
    assert "hunter2" in loaded.settings.database.url.get_secret_value()

    Path("evenhand.toml").write_text("[redis]\nurl = ['hunter2']\n")
    with pytest.raises(SettingsError) as caught:
        load_settings()
    assert "hunter2" not in str(caught.value)


def test_the_listing_is_a_file_that_gives_the_same_tree(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("EVENHAND_ENGINE__KV_CACHE_BYTES", "1.5GiB")
    monkeypatch.setenv("EVENHAND_ENGINE__MODEL", 'a "quoted" \\ path')
    loaded = load_settings()
    again = tmp_path / "again.toml"
    again.write_text(effective(loaded))
    monkeypatch.delenv("EVENHAND_ENGINE__KV_CACHE_BYTES")
    monkeypatch.delenv("EVENHAND_ENGINE__MODEL")

    assert load_settings(again).settings == loaded.settings


def test_a_rate_that_cannot_be_is_told_with_its_place() -> None:
    Path("evenhand.toml").write_text('[throttle]\nfailed_keys = "30/fortnight"\nadmin_changes = "0/minute"\n')
    with pytest.raises(SettingsError) as refused:
        load_settings()

    keys, changes = str(refused.value).splitlines()
    assert keys == (
        "throttle.failed_keys (from evenhand.toml): "
        "must be a rate such as 30/minute, 5/second or 10 per 5 minutes, or off, not '30/fortnight'"
    )
    assert changes == (
        "throttle.admin_changes (from evenhand.toml): "
        "must let something pass; to have no throttle, write off, not '0/minute'"
    )


def test_throttles_can_be_set_and_be_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVENHAND_THROTTLE__FAILED_KEYS", "off")
    monkeypatch.setenv("EVENHAND_THROTTLE__ADMIN_CHANGES", "5 per 10 seconds")

    throttle = load_settings().settings.throttle
    assert (throttle.failed_keys, throttle.failed_admin_tokens, throttle.admin_changes) == (
        "off",
        "10/minute",
        "5 per 10 seconds",
    )
