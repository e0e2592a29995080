"""Which device code serves this device: chosen once, logged once."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kernels.cpu import elementwise, kv_write, linear, paged_attention

_log = logging.getLogger(__name__)


class KernelError(Exception):
    """There is no device code for this device in this build."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernels:
    """The device code of one device.

    Each function's contract stands where it is defined; `reference.py` has an oracle for each that computes. Packed
    linears, attention plans and workspaces are opaque: made and read by the same device's functions only.
    """

    name: str
    padded_rows: Callable[[int, torch.dtype], int]
    pack_linear: Callable[[Tensor, Tensor | None], Any]
    linear: Callable[[Tensor, Any], Tensor]
    add_linear_: Callable[[Tensor, Tensor, Any], None]
    rms_norm: Callable[[Tensor, float, torch.dtype], Tensor]
    rotate_: Callable[[Tensor, Tensor], None]
    silu_mul: Callable[[Tensor], Tensor]
    plan_kv_write: Callable[[Tensor, Tensor, Tensor], Tensor]
    write_kv: Callable[[Tensor, int, Tensor, Tensor], None]
    workspace: Callable[[], Any]
    plan_attention: Callable[[Tensor, Sequence[tuple[int, int, Sequence[int]]], int, Any], Any]
    paged_attention: Callable[[Tensor, Tensor, int, Any], Tensor]


def select(device: str) -> Kernels:
    """The kernels for a device. Raises `KernelError` for one that this build does not serve."""
    if device != "cpu":
        raise KernelError(f"this build has no kernels for device '{device}'; it serves device 'cpu'")
    chosen = Kernels(
        name="cpu",
        padded_rows=linear.padded_rows,
        pack_linear=linear.pack_linear,
        linear=linear.linear,
        add_linear_=linear.add_linear_,
        rms_norm=elementwise.rms_norm,
        rotate_=elementwise.rotate_,
        silu_mul=elementwise.silu_mul,
        plan_kv_write=kv_write.plan_kv_write,
        write_kv=kv_write.write_kv,
        workspace=paged_attention.Workspace,
        plan_attention=paged_attention.plan_attention,
        paged_attention=paged_attention.paged_attention,
    )
    _log.info(
        "kernels: cpu, torch %s, %d threads, bfloat16 %s",
        torch.__version__,
        torch.get_num_threads(),
        "native" if linear.supports_bfloat16() else "emulated",
    )
    return chosen


def default_dtype(device: str) -> torch.dtype:
    """bfloat16, except on a processor that would have to emulate it."""
    if device == "cpu" and not linear.supports_bfloat16():
        return torch.float32
    return torch.bfloat16
