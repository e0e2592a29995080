"""Weights from a GGUF file: canonical names, one tensor dequantized at a time, rows in Hugging Face order.

Dequantization is the gguf package's, bit for bit. What metadata mean is in `gguf_config.py`.
"""

from __future__ import annotations

import math
from functools import cached_property
from pathlib import Path

import gguf
import numpy as np
import torch

from engine.errors import ModelLoadError
from engine.models.config import ModelConfig
from engine.models.gguf_config import ROPE_FACTORS, gguf_config
from engine.models.gguf_file import GGUFFile, TensorInfo
from engine.models.stored_tensors import StoredTensor, check_tensors

_FLOATS = {
    gguf.GGMLQuantizationType.F32: torch.float32,
    gguf.GGMLQuantizationType.F16: torch.float16,
    gguf.GGMLQuantizationType.BF16: torch.bfloat16,
}

_GLOBAL_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}

_LAYER_NAMES = {
    "input_layernorm.weight": "attn_norm.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
    "self_attn.q_proj.weight": "attn_q.weight",
    "self_attn.k_proj.weight": "attn_k.weight",
    "self_attn.v_proj.weight": "attn_v.weight",
    "self_attn.o_proj.weight": "attn_output.weight",
    "self_attn.q_proj.bias": "attn_q.bias",
    "self_attn.k_proj.bias": "attn_k.bias",
    "self_attn.v_proj.bias": "attn_v.bias",
    "self_attn.o_proj.bias": "attn_output.bias",
    "self_attn.q_norm.weight": "attn_q_norm.weight",
    "self_attn.k_norm.weight": "attn_k_norm.weight",
    "mlp.gate_proj.weight": "ffn_gate.weight",
    "mlp.up_proj.weight": "ffn_up.weight",
    "mlp.down_proj.weight": "ffn_down.weight",
}

# llama.cpp rotates neighboring pairs for these and reorders query and key rows to fit; Qwen files it leaves alone.
_PERMUTED_ARCHITECTURES = ("llama", "smollm3")


class GGUFSource:
    """A `WeightSource` over one GGUF file. Opening reads the header only."""

    def __init__(self, path: Path) -> None:
        """Raises `ModelLoadError`."""
        self._file = GGUFFile.open(path)
        self.config: ModelConfig = gguf_config(self._file)

    def check(self) -> None:
        stored = {
            self._canonical.get(info.name, info.name): self._stored(info)
            for info in self._file.tensors.values()
            if info.name != ROPE_FACTORS  # read with the configuration
        }
        check_tensors(self.config, stored, self._file.path, self._own_names)

    def tensor(self, name: str) -> torch.Tensor:
        info = self._file.tensors.get(self._own_names.get(name, name))
        if info is None:
            raise ModelLoadError("is missing", file=str(self._file.path), tensor=name)
        values = self._read(info)
        if self.config.architecture in _PERMUTED_ARCHITECTURES:
            if ".q_proj." in name:
                return _restore_rows(values, self.config.num_heads)
            if ".k_proj." in name:
                return _restore_rows(values, self.config.num_kv_heads)
        return values

    @cached_property
    def _own_names(self) -> dict[str, str]:
        """Canonical name → name in a GGUF file."""
        layers = range(self.config.num_layers)
        return _GLOBAL_NAMES | {
            f"model.layers.{i}.{ours}": f"blk.{i}.{theirs}" for i in layers for ours, theirs in _LAYER_NAMES.items()
        }

    @cached_property
    def _canonical(self) -> dict[str, str]:
        return {theirs: ours for ours, theirs in self._own_names.items()}

    def _stored(self, info: TensorInfo) -> StoredTensor:
        size = _packed_shape(info)
        return StoredTensor(
            file=self._file.path,
            name=info.name,
            shape=info.shape,
            dtype=_type_name(info.type_id),
            readable=size is not None and _can_dequantize(info.type_id),
            end=info.offset + (0 if size is None else math.prod(size)),
            file_bytes=self._file.num_bytes,
        )

    def _read(self, info: TensorInfo) -> torch.Tensor:
        packed_shape = _packed_shape(info)
        if packed_shape is None:
            raise ModelLoadError(
                f"type {_type_name(info.type_id)} is not supported", file=str(self._file.path), tensor=info.name
            )
        num_bytes = math.prod(packed_shape)
        packed = np.fromfile(self._file.path, np.uint8, num_bytes, offset=info.offset)
        if packed.size < num_bytes:
            raise ModelLoadError("the file is truncated", file=str(self._file.path), tensor=info.name)
        quantization = gguf.GGMLQuantizationType(info.type_id)
        if quantization in _FLOATS:
            return torch.from_numpy(packed).view(_FLOATS[quantization]).view(info.shape)
        values: np.ndarray = gguf.dequantize(packed.reshape(packed_shape), quantization)
        return torch.from_numpy(values).view(info.shape)


def _packed_shape(info: TensorInfo) -> tuple[int, ...] | None:
    """Shape in bytes; None for a type we do not know or a row that is not a whole number of blocks."""
    try:
        block, block_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(info.type_id)]
    except (ValueError, KeyError):
        return None
    row = info.shape[-1] if info.shape else 1
    if row % block:
        return None
    return (*info.shape[:-1], row // block * block_bytes)


def _type_name(type_id: int) -> str:
    try:
        return gguf.GGMLQuantizationType(type_id).name
    except ValueError:
        return f"number {type_id}"


def _can_dequantize(type_id: int) -> bool:
    """Try it on one block of zeros: the gguf package has types that it can name but not read."""
    quantization = gguf.GGMLQuantizationType(type_id)
    if quantization in _FLOATS:
        return True
    try:
        gguf.dequantize(np.zeros((1, gguf.GGML_QUANT_SIZES[quantization][1]), np.uint8), quantization)
    except NotImplementedError:  # how the library says that it cannot read this kind
        return False
    return True


def _restore_rows(rows: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Undo llama.cpp's reordering within each head: from pairs (0, d/2, 1, d/2+1, …) back to halves."""
    pairs = rows.view(num_heads, -1, 2, *rows.shape[1:])
    return pairs.transpose(1, 2).reshape(rows.shape)
