"""Settings as text: what is in force, and the reference of what there is."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from pydantic import ByteSize, SecretStr

from gateway.settings import Setting, Settings, all_settings
from gateway.settings_sources import LoadedSettings

HIDDEN = "(hidden)"

_INTRODUCTION = """\
# Settings

Written by `evenhand config reference`; do not edit by hand.

A setting has the same name in a TOML file and in the environment: `server.port` is `port` under `[server]`, and
`EVENHAND_SERVER__PORT`. Later ones win: default, file, environment, command-line option. The file is the one given with
`--config`, else `EVENHAND_CONFIG`, else `evenhand.toml` in the working directory, else the one in `EVENHAND_HOME`. An
unknown name is an error. Sizes are bytes as integers, or text such as `"2GiB"`. Relative paths start from the working
directory. `evenhand config show` prints what is in force and where it came from.
"""


def effective(loaded: LoadedSettings) -> str:
    """The whole tree as TOML; values that are unset or secret stand in comments."""
    lines = [f"# {loaded.config}"] if loaded.config else []
    for section, settings in _by_section():
        if section:
            lines += ["", f"[{section}]"]
        for setting in settings:
            value = _value(loaded.settings, setting.name)
            name = setting.name.rpartition(".")[2]
            if value is None:
                line = f"# {name} is unset"
            elif setting.is_secret:
                line = f"# {name} = {HIDDEN}"
            else:
                line = f"{name} = {_toml(value)}"
            lines.append(f"{line:<40}  # {loaded.origins[setting.name]}")
    return "\n".join(lines).lstrip("\n") + "\n"


def reference() -> str:
    """Every setting with its type, default and meaning, as Markdown."""
    lines = [_INTRODUCTION]
    for section, settings in _by_section():
        if section:
            lines += [f"## {section}", "", str(Settings.model_fields[section].default.__doc__), ""]
        for setting in settings:
            description = " ".join((setting.field.description or "").split())
            default = setting.field.default
            shown = "unset" if default is None else f"default `{_toml(default)}`"
            lines.append(f"- **`{setting.name}`** (`{setting.variable}`): {_kind(setting)}, {shown}. {description}")
        lines.append("")
    return "\n".join(lines).rstrip("\n") + "\n"


def _by_section() -> Iterator[tuple[str, list[Setting]]]:
    for section, settings in groupby(all_settings(), key=lambda setting: setting.name.rpartition(".")[0]):
        yield section, list(settings)


def _value(settings: Settings, name: str) -> Any:
    value: Any = settings
    for part in name.split("."):
        value = getattr(value, part)
    return value


def _toml(value: Any) -> str:
    if isinstance(value, ByteSize):
        return _size(value)
    if isinstance(value, (str, Path)):
        return json.dumps(str(value), ensure_ascii=False)
    if isinstance(value, tuple):
        return json.dumps([str(each) for each in value], ensure_ascii=False)
    return str(value)


def _size(size: int) -> str:
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if size and size % unit == 0:
            return f'"{size // unit}{name}"'
    return str(size)


def _kind(setting: Setting) -> str:
    annotation: Any = setting.field.annotation
    if type(None) in get_args(annotation):
        (annotation,) = (part for part in get_args(annotation) if part is not type(None))
    if get_origin(annotation) is Literal:
        return "one of " + ", ".join(f"`{choice}`" for choice in get_args(annotation))
    if get_origin(annotation) is tuple:
        return "list"
    kinds = {str: "text", int: "integer", float: "number", ByteSize: "size", SecretStr: "secret text"}
    return kinds.get(annotation, "path")
