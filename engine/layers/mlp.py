"""The feed-forward half of a layer: SwiGLU (Shazeer 2020)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from kernels.dispatch import Kernels


@dataclass(frozen=True, slots=True, kw_only=True)
class Mlp:
    """down(silu(gate x) * up x).

    Attributes:
        gate_up: packed [2 * intermediate, hidden]: gate rows, then up rows; the norm's weight folded in.
        down: packed [hidden, intermediate].
    """

    gate_up: Any
    down: Any

    def add_to(self, residual: Tensor, normed: Tensor, kernels: Kernels) -> None:
        """residual += mlp(normed). normed [T, hidden]; residual float32 [T, hidden]."""
        kernels.add_linear_(residual, kernels.silu_mul(kernels.linear(normed, self.gate_up)), self.down)
