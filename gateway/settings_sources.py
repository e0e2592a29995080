"""Where settings come from: a TOML file, then environment variables, then command-line options.

An unknown name in any of them is an error that proposes the nearest known one. Remembers the origin of each value, for
error messages and ``evenhand config show``. The tree itself, with types and defaults, is `settings`.
"""

from __future__ import annotations

import difflib
import os
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic_settings import EnvSettingsSource

from gateway.settings import ENV_PREFIX, Setting, Settings, all_settings

CONFIG_VARIABLE = "EVENHAND_CONFIG"
CONFIG_NAME = "evenhand.toml"


class SettingsError(Exception):
    """A setting is unknown or has a value that cannot work; the message has one line for each."""


@dataclass(frozen=True, slots=True)
class LoadedSettings:
    """The tree and where it came from.

    Attributes:
        config: the TOML file that was read, if any.
        origins: for each dotted name, ``default``, the file, the environment variable, or the option that set it.
    """

    settings: Settings
    config: Path | None
    origins: Mapping[str, str]


def load_settings(config: Path | None = None, options: Mapping[str, Any] | None = None) -> LoadedSettings:
    """Read the layers and check them.

    The file is `config`, else ``EVENHAND_CONFIG``, else ``evenhand.toml`` in the working directory, else the one in
    ``EVENHAND_HOME``.

    Args:
        config: a TOML file that must exist.
        options: dotted names to values given on the command line; a None is not given.

    Raises:
        SettingsError: unknown names, values that cannot work, an unreadable file.
    """
    given = {name: value for name, value in (options or {}).items() if value is not None}
    path = _find_config(config)
    from_file = dict(_flatten(_read_toml(path))) if path else {}
    known = {setting.name: setting for setting in all_settings()}
    _refuse_unknown(str(path), from_file, known)
    variables = {variable for variable in os.environ if variable.upper().startswith(ENV_PREFIX)} - {CONFIG_VARIABLE}
    _refuse_unknown("environment", variables, {setting.variable: setting for setting in known.values()})
    from_environment = dict(_flatten(EnvSettingsSource(Settings)()))

    origins = dict.fromkeys(known, "default")
    origins |= dict.fromkeys(from_file, str(path))
    origins |= {name: known[name].variable for name in from_environment}
    origins |= {name: f"--{name.rsplit('.', 1)[-1].replace('_', '-')}" for name in given}
    try:
        settings = Settings(**_unflatten({**from_file, **from_environment, **given}))
    except ValidationError as e:
        raise SettingsError("\n".join(_explain(e, known, origins))) from e
    return LoadedSettings(settings, path, origins)


def _find_config(config: Path | None) -> Path | None:
    named = config or os.environ.get(CONFIG_VARIABLE)
    if named:
        return Path(named).expanduser()
    home = os.environ.get(f"{ENV_PREFIX}HOME") or Settings.model_fields["home"].default
    candidates = (Path(CONFIG_NAME), Path(home).expanduser() / CONFIG_NAME)
    return next((path for path in candidates if path.is_file()), None)


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            return tomllib.load(file)
    except OSError as e:
        raise SettingsError(f"{path}: cannot be read: {e.strerror}") from e
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as e:
        raise SettingsError(f"{path}: not valid TOML: {e}") from e


def _flatten(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _unflatten(flat: Mapping[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for name, value in flat.items():
        section, _, leaf = name.rpartition(".")
        (tree.setdefault(section, {}) if section else tree)[leaf] = value
    return tree


def _refuse_unknown(where: str, names: Iterable[str], known: Iterable[str]) -> None:
    lines = []
    for name in sorted(names):
        canonical = name.upper() if where == "environment" else name
        if canonical not in known:
            nearest = difflib.get_close_matches(canonical, known, n=1, cutoff=0.5)
            lines.append(f"{where}: unknown setting {name}" + (f"; did you mean {nearest[0]}?" if nearest else ""))
    if lines:
        raise SettingsError("\n".join(lines))


def _explain(error: ValidationError, known: Mapping[str, Setting], origins: Mapping[str, str]) -> Iterator[str]:
    """One line for each problem: where it came from, what is wrong, and the value unless it is a secret."""
    for problem in error.errors(include_url=False):
        name = ".".join(str(part) for part in problem["loc"])
        message = problem["msg"].removeprefix("Value error, ")
        if name not in known:
            yield f"{name}: {message}" if name else message
        elif known[name].is_secret:
            yield f"{name} (from {origins[name]}): {message}"
        else:
            yield f"{name} (from {origins[name]}): {message}, not {problem['input']!r}"
