"""What may lie at a model's path: a GGUF file or a folder in Hugging Face layout. Torch-free."""

from __future__ import annotations

from pathlib import Path

from engine.errors import ModelLoadError


def is_gguf(path: Path) -> bool:
    """True for a GGUF file, False for a folder. Raises `ModelLoadError` for anything else."""
    if path.is_dir():
        return False
    if not path.exists():
        raise ModelLoadError("there is no such file or folder", file=str(path))
    if path.suffix.lower() != ".gguf":
        raise ModelLoadError("is neither a .gguf file nor a folder of safetensors", file=str(path))
    return True
