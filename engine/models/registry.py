"""Which source reads what lies at a path."""

from __future__ import annotations

from pathlib import Path

from engine.models.gguf_source import GGUFSource
from engine.models.layout import is_gguf
from engine.models.safetensors_source import SafetensorsSource
from engine.models.source import WeightSource


def open_source(path: Path) -> WeightSource:
    """A GGUF file or a folder of safetensors, opened but not yet checked. Raises `ModelLoadError`."""
    return GGUFSource(path) if is_gguf(path) else SafetensorsSource(path)
