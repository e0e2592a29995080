"""Weights from a folder in Hugging Face layout: config.json, and safetensors in one file or in shards.

What config.json means is in `hf_config.py`. The tokenizer's files are the business of `engine.text`.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from engine.errors import ModelLoadError
from engine.models.config import ModelConfig
from engine.models.hf_config import hf_config
from engine.models.json_file import JsonFile
from engine.models.stored_tensors import StoredTensor, check_tensors

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_READABLE = ("F32", "F16", "BF16")
_LENGTH = struct.Struct("<Q")


class SafetensorsSource:
    """A `WeightSource` over a folder. Opening reads config.json and the headers of all weight files."""

    def __init__(self, folder: Path) -> None:
        """Raises `ModelLoadError`."""
        self.config: ModelConfig = hf_config(folder)
        self._folder = folder
        self._stored = _read_headers(folder)

    def check(self) -> None:
        check_tensors(self.config, self._stored, self._folder)
        for file in dict.fromkeys(stored.file for stored in self._stored.values()):
            try:
                with safe_open(file, framework="pt"):
                    pass  # opening verifies that offsets, shapes and the file's length agree
            except (OSError, SafetensorError) as e:
                raise ModelLoadError(f"is damaged: {e}", file=str(file)) from e

    def tensor(self, name: str) -> torch.Tensor:
        stored = self._stored.get(name)
        if stored is None:
            raise ModelLoadError("is missing", file=str(self._folder), tensor=name)
        try:
            with safe_open(stored.file, framework="pt") as file:
                values: torch.Tensor = file.get_tensor(name)
        except (OSError, SafetensorError) as e:
            raise ModelLoadError(f"cannot be read: {e}", file=str(stored.file), tensor=name) from e
        return values.clone()  # what the library returns may be backed by the file


def _read_headers(folder: Path) -> dict[str, StoredTensor]:
    single, index = folder / _SINGLE, folder / _INDEX
    if single.exists():
        return _read_header(single)
    if not index.exists():
        raise ModelLoadError(f"holds neither {_SINGLE} nor {_INDEX}", file=str(folder))
    file_of_tensor = JsonFile.read(index).section("weight_map").fields
    headers: dict[str, dict[str, StoredTensor]] = {}
    stored: dict[str, StoredTensor] = {}
    for name, file_name in file_of_tensor.items():
        # A plain name only: an index must not lead out of its folder.
        if not isinstance(file_name, str) or Path(file_name).name != file_name:
            raise ModelLoadError(f"names the file {file_name!r}", file=str(index), tensor=name)
        if file_name not in headers:
            headers[file_name] = _read_header(folder / file_name)
        if name not in headers[file_name]:
            raise ModelLoadError("is missing, though the index names it", file=str(folder / file_name), tensor=name)
        stored[name] = headers[file_name][name]
    return stored


def _read_header(path: Path) -> dict[str, StoredTensor]:
    """A header is its length in 8 bytes, then JSON: name → dtype, shape, data_offsets."""
    try:
        file_bytes = path.stat().st_size
        with path.open("rb") as file:
            head = file.read(_LENGTH.size)
            num_header_bytes = _LENGTH.unpack(head)[0] if len(head) == _LENGTH.size else file_bytes
            if _LENGTH.size + num_header_bytes > file_bytes:
                raise ModelLoadError("the file is truncated, or not safetensors", file=str(path))
            header = json.loads(file.read(num_header_bytes))
    except FileNotFoundError as e:
        raise ModelLoadError("is missing", file=str(path)) from e
    except OSError as e:
        raise ModelLoadError(f"cannot be read: {e.strerror}", file=str(path)) from e
    except ValueError as e:
        raise ModelLoadError(f"its header is not JSON: {e}", file=str(path)) from e
    if not isinstance(header, dict):
        raise ModelLoadError("its header is not a JSON object", file=str(path))
    header.pop("__metadata__", None)
    data_start = _LENGTH.size + num_header_bytes
    return {name: _stored(path, name, entry, data_start, file_bytes) for name, entry in header.items()}


def _stored(path: Path, name: str, entry: Any, data_start: int, file_bytes: int) -> StoredTensor:
    try:
        dtype, shape, (_, end) = str(entry["dtype"]), tuple(map(int, entry["shape"])), map(int, entry["data_offsets"])
    except (KeyError, TypeError, ValueError) as e:
        raise ModelLoadError("its entry in the header is damaged", file=str(path), tensor=name) from e
    return StoredTensor(
        file=path,
        name=name,
        shape=shape,
        dtype=dtype,
        readable=dtype in _READABLE,
        end=data_start + end,
        file_bytes=file_bytes,
    )
