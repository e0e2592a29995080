"""JSON files of a model's folder, read with errors that name the file and the field. Torch-free."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.errors import ModelLoadError


@dataclass(frozen=True, slots=True)
class JsonFile:
    """A parsed JSON object. A field that is null counts as absent."""

    path: Path
    fields: dict[str, Any]

    @classmethod
    def read(cls, path: Path) -> JsonFile:
        """Raises `ModelLoadError` if the file is missing, not JSON, or not an object."""
        try:
            fields = json.loads(path.read_bytes())
        except FileNotFoundError as e:
            raise ModelLoadError("is missing", file=str(path)) from e
        except OSError as e:
            raise ModelLoadError(f"cannot be read: {e.strerror}", file=str(path)) from e
        except ValueError as e:  # JSON and UTF-8 errors alike
            raise ModelLoadError(f"is not JSON: {e}", file=str(path)) from e
        if not isinstance(fields, dict):
            raise ModelLoadError("is not a JSON object", file=str(path))
        return cls(path, fields)

    @classmethod
    def read_if_there(cls, path: Path) -> JsonFile:
        """As `read`, but a missing file is an empty object."""
        return cls.read(path) if path.exists() else cls(path, {})

    def integer(self, name: str, default: int | None = None) -> int:
        """A whole number of at least 1; without a default the field is required."""
        value = self._value(name, default)
        if type(value) is not int or value < 1:
            raise self.error(f"'{name}' must be a whole number of at least 1, not {value!r}")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """A number greater than 0; without a default the field is required."""
        value = self._value(name, default)
        if type(value) not in (int, float) or value <= 0:
            raise self.error(f"'{name}' must be a number greater than 0, not {value!r}")
        return float(value)

    def flag(self, name: str, *, default: bool) -> bool:
        value = self._value(name, default)
        if type(value) is not bool:
            raise self.error(f"'{name}' must be true or false, not {value!r}")
        return value

    def section(self, name: str) -> JsonFile:
        """A nested object, empty if absent; its errors name this file."""
        value = self._value(name, {})
        if not isinstance(value, dict):
            raise self.error(f"'{name}' must be an object, not {value!r}")
        return JsonFile(self.path, value)

    def token_ids(self, name: str) -> tuple[int, ...]:
        """One token id or a list of them; empty if absent."""
        value = self._value(name, [])
        ids = value if isinstance(value, list) else [value]
        if not all(type(token_id) is int and token_id >= 0 for token_id in ids):
            raise self.error(f"'{name}' must be a token id or a list of them, not {value!r}")
        return tuple(dict.fromkeys(ids))

    def error(self, message: str) -> ModelLoadError:
        return ModelLoadError(message, file=str(self.path))

    def _value(self, name: str, default: Any) -> Any:
        value = self.fields.get(name)
        if value is not None:
            return value
        if default is None:
            raise self.error(f"'{name}' is missing")
        return default
