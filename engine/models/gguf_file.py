"""The GGUF container: metadata, and where each tensor lies. Torch-free, so that the gateway can read a vocabulary.

Only the container: knows nothing of architectures, and of quantization types only their number. The format is public
(ggml, `docs/gguf.md`); versions 2 and 3, little-endian. Written out here because the reader of the gguf package
builds several numpy arrays for each string and takes over a second for a vocabulary of 49k tokens.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, overload

from engine.errors import ModelLoadError

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_DEFAULT_ALIGNMENT = 32
_MAX_DIMENSIONS = 4

_STRING, _ARRAY = 8, 9
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_NAMES = {bool: "a boolean", int: "an integer", float: "a number", str: "a string", list: "a list"}

T = TypeVar("T", bool, int, float, str, list[Any])


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where one tensor lies.

    Attributes:
        shape: row-major, as numpy and torch have it (the file lists dimensions the other way round).
        type_id: ggml's number of the quantization type.
        offset: of its first byte, from the start of the file.
    """

    name: str
    shape: tuple[int, ...]
    type_id: int
    offset: int


@dataclass(frozen=True, slots=True)
class GGUFFile:
    """A parsed header. Metadata values are plain Python values; arrays are lists.

    Attributes:
        num_bytes: size of the whole file.
    """

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, TensorInfo]
    num_bytes: int

    @classmethod
    def open(cls, path: Path) -> GGUFFile:
        """Read the header. Raises `ModelLoadError` if it is not GGUF, not of a version we know, or cut off."""
        try:
            num_bytes = path.stat().st_size
            if num_bytes < len(_MAGIC):
                raise ModelLoadError("not a GGUF file: it is too short", file=str(path))
            with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                metadata, tensors = _Parser(data, str(path)).header()
        except OSError as e:
            raise ModelLoadError(f"cannot be read: {e.strerror}", file=str(path)) from e
        return cls(path, metadata, tensors, num_bytes)

    @overload
    def get(self, key: str, kind: type[T]) -> T | None: ...

    @overload
    def get(self, key: str, kind: type[T], default: T) -> T: ...

    def get(self, key: str, kind: type[T], default: T | None = None) -> T | None:
        """The metadata value of a key, or the default. Raises `ModelLoadError` if it is of another type."""
        value = self.metadata.get(key)
        if value is None:
            return default
        if kind is float and type(value) is int:
            value = float(value)
        if type(value) is not kind:
            raise ModelLoadError(f"metadata '{key}' is not {_NAMES[kind]}", file=str(self.path))
        return value

    def require(self, key: str, kind: type[T]) -> T:
        """As `get`, but raises `ModelLoadError` if the key is absent too."""
        value = self.get(key, kind)
        if value is None:
            raise ModelLoadError(f"metadata '{key}' is missing", file=str(self.path))
        return value


class _Parser:
    """A cursor over the mapped file."""

    def __init__(self, data: mmap.mmap, file: str) -> None:
        self._data = data
        self._file = file
        self._at = 0

    def header(self) -> tuple[dict[str, Any], dict[str, TensorInfo]]:
        if self._data[: len(_MAGIC)] != _MAGIC:
            raise self._error("not a GGUF file: it does not begin with 'GGUF'")
        self._at = len(_MAGIC)
        try:
            return self._header()
        except (struct.error, IndexError) as e:
            raise self._error(f"the file is truncated: its header goes on after byte {len(self._data)}") from e
        except UnicodeDecodeError as e:
            raise self._error(f"damaged header: a string before byte {self._at} is not UTF-8") from e

    def _header(self) -> tuple[dict[str, Any], dict[str, TensorInfo]]:
        (version,) = self._unpack("I")
        if version not in _VERSIONS:
            raise self._error(f"GGUF version {version} is not supported (only little-endian versions 2 and 3 are)")
        num_tensors, num_values = self._unpack("QQ")
        metadata: dict[str, Any] = {}
        for _ in range(num_values):
            key = self._string()
            metadata[key] = self._value(self._unpack("I")[0])
        infos = [self._tensor_info() for _ in range(num_tensors)]
        alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        if type(alignment) is not int or alignment < 1:
            raise self._error(f"damaged header: 'general.alignment' is {alignment}")
        data_start = -(-self._at // alignment) * alignment
        return metadata, {
            name: TensorInfo(name, shape, type_id, data_start + offset) for name, shape, type_id, offset in infos
        }

    def _tensor_info(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._string()
        (num_dimensions,) = self._unpack("I")
        if num_dimensions > _MAX_DIMENSIONS:
            raise self._error(f"damaged header: {num_dimensions} dimensions", tensor=name)
        dimensions = self._unpack(f"{num_dimensions}Q")
        type_id, offset = self._unpack("IQ")
        return name, dimensions[::-1], type_id, offset

    def _value(self, type_id: int) -> Any:
        if type_id == _STRING:
            return self._string()
        if type_id in _SCALARS:
            return self._unpack(_SCALARS[type_id])[0]
        if type_id != _ARRAY:
            raise self._error(f"damaged header: value type {type_id} before byte {self._at}")
        item_type, count = self._unpack("IQ")
        if item_type == _STRING:
            return [self._string() for _ in range(count)]
        if item_type not in _SCALARS:
            raise self._error(f"damaged header: array of value type {item_type} before byte {self._at}")
        return list(self._unpack(f"{count}{_SCALARS[item_type]}"))

    def _string(self) -> str:
        (length,) = self._unpack("Q")
        end = self._at + length
        if end > len(self._data):
            raise IndexError
        text = self._data[self._at : end].decode("utf-8")
        self._at = end
        return text

    def _unpack(self, layout: str) -> tuple[Any, ...]:
        layout = "<" + layout
        values = struct.unpack_from(layout, self._data, self._at)
        self._at += struct.calcsize(layout)
        return values

    def _error(self, message: str, tensor: str | None = None) -> ModelLoadError:
        return ModelLoadError(message, file=self._file, tensor=tensor)
