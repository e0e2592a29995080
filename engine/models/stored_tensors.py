"""What lies in model files, compared with what the decoder needs. Torch-free; reads nothing itself."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from engine.errors import ModelLoadError
from engine.models.config import ModelConfig, required_tensors

# Present in some files, of no use to anybody: recomputed tables, and an output matrix that is the embedding again.
_IGNORED = re.compile(r"rotary_emb\.inv_freq$|attn_rot_embd\.weight$|^lm_head\.weight$")


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor as the header of its file describes it.

    Attributes:
        name: its name in that file.
        dtype: as the file calls it.
        readable: this dtype can be turned into floats.
        end: offset of the first byte after it.
        file_bytes: size of its file.
    """

    file: Path
    name: str
    shape: tuple[int, ...]
    dtype: str
    readable: bool
    end: int
    file_bytes: int


def check_tensors(
    config: ModelConfig, stored: Mapping[str, StoredTensor], path: Path, own_names: Mapping[str, str] | None = None
) -> None:
    """Raise `ModelLoadError` for the first tensor that is missing, mis-shaped, unreadable, cut off, or not understood.

    A tensor that the decoder does not know is an error too: leaving it out would change every answer.

    Args:
        stored: by canonical name.
        path: blamed for what is missing.
        own_names: canonical name → name in this kind of file, for messages.
    """
    required = required_tensors(config)
    for name, shape in required.items():
        tensor = stored.get(name)
        if tensor is None:
            raise ModelLoadError("is missing", file=str(path), tensor=(own_names or {}).get(name, name))
        _check(tensor, shape)
    for name, tensor in stored.items():
        if name not in required and not _IGNORED.search(name):
            raise ModelLoadError(
                f"the {config.architecture} decoder has no use for it", file=str(tensor.file), tensor=tensor.name
            )


def _check(tensor: StoredTensor, shape: tuple[int, ...]) -> None:
    problem = None
    if tensor.shape != shape:
        problem = f"has shape {list(tensor.shape)}, must be {list(shape)}"
    elif not tensor.readable:
        problem = f"type {tensor.dtype} is not supported"
    elif tensor.end > tensor.file_bytes:
        problem = f"the file is truncated: it ends at byte {tensor.file_bytes}, the tensor at {tensor.end}"
    if problem is not None:
        raise ModelLoadError(problem, file=str(tensor.file), tensor=tensor.name)
