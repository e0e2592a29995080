"""The port between model files and the decoder."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from engine.models.config import ModelConfig

if TYPE_CHECKING:
    import torch


class WeightSource(Protocol):
    """Weights of one model, read and dequantised one tensor at a time.

    Attributes:
        config: what the files describe; checked, so that the decoder can rely on it.
    """

    config: ModelConfig

    def check(self) -> None:
        """Raise `ModelLoadError` if a required tensor is missing, mis-shaped or cut off; reads headers only."""
        ...

    def tensor(self, name: str) -> torch.Tensor:
        """The tensor of this canonical name (`required_tensors`) in its shape, as float32 or bfloat16 or float16.

        The result is the caller's; the source keeps no copy. Raises `ModelLoadError`.
        """
        ...
