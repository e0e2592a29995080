"""Linear layers on the CPU: oneDNN with weights packed once.

Row-invariance, which determinism rests on, holds within these limits (measured; `tests/kernels` holds them):
bfloat16 rows do not depend on how many rows there are, as long as there are at least two; float32 rows do not if the
number of rows is a multiple of 8. The caller pads (`padded_rows`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

_PACK_ROWS = 32  # the row count oneDNN lays the weights out for; other counts stay correct, and equal in every bit


@dataclass(frozen=True, slots=True)
class PackedLinear:
    """A weight [out, in] in the layout its matrix multiplication reads, with an optional bias [out].

    The layout is opaque when `packed`: only this module may look inside.
    """

    weight: Tensor
    bias: Tensor | None
    packed: bool


def padded_rows(num_rows: int, dtype: torch.dtype) -> int:
    """The number of rows a step must have so that each row's result is independent of the others."""
    if dtype == torch.bfloat16:
        return max(2, num_rows)
    return -(-num_rows // 8) * 8


def supports_bfloat16() -> bool:
    """Whether this processor multiplies bfloat16 natively (otherwise it is emulated, and slow)."""
    return bool(torch._C._has_mkldnn and torch.ops.mkldnn._is_mkldnn_bf16_supported())


def pack_linear(weight: Tensor, bias: Tensor | None = None) -> PackedLinear:
    """Pack a weight [out, in]; the caller may drop its own copy afterwards."""
    if weight.dtype == torch.bfloat16 and supports_bfloat16():
        packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _PACK_ROWS)
        return PackedLinear(packed, bias, packed=True)
    return PackedLinear(weight.contiguous(), bias, packed=False)


def linear(x: Tensor, layer: PackedLinear) -> Tensor:
    """x [T, in] → [T, out]."""
    if layer.packed:
        y: Tensor = torch.ops.mkldnn._linear_pointwise(x, layer.weight, layer.bias, "none", [], "")
        return y
    return F.linear(x, layer.weight, layer.bias)


def add_linear_(residual: Tensor, x: Tensor, layer: PackedLinear) -> None:
    """residual += x W^T + bias, in place. x [T, in]; residual float32 [T, out].

    The residual stream stays in float32: kept in bfloat16 it costs more accuracy than everything else in a layer, and a
    fused addition would save 4 of 60 microseconds.
    """
    residual.add_(linear(x, layer))
