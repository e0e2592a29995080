"""The one decoder: Llama, Qwen2, Qwen3 and SmolLM are settings of it.

Built from a `WeightSource` one tensor at a time: each weight is read as it is in the file, folded and packed, and the
copy dropped. Knows nothing of requests or sampling.

Three things are folded into weights here, so that the step has fewer operations: the weight of each norm goes into the
linear layer behind it, the softmax scale into the query rows where it is a power of two (else into the rotation), and
head rows are put into pair order for the rotation.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from engine.layers.attention import Attention, StepContext
from engine.layers.head import Head
from engine.layers.mlp import Mlp
from engine.layers.rotary import interleave, rotation_table
from engine.models.source import WeightSource
from kernels.dispatch import Kernels


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    attention: Attention
    mlp: Mlp


class Decoder:
    """A loaded model.

    Attributes:
        config: what it is made of.
        dtype: of weights, activations and KV.
    """

    def __init__(self, source: WeightSource, kernels: Kernels, dtype: torch.dtype, num_positions: int) -> None:
        """Load everything. Raises `ModelLoadError` for a tensor that cannot be read."""
        self.config = source.config
        self.dtype = dtype
        self.kernels = kernels
        self._scale = self.config.head_dim**-0.5
        self._scale_in_weights = not self.config.qk_norm and math.log2(self._scale).is_integer()
        self._rotations = rotation_table(self.config, num_positions)
        self._head_scale = self._make_head_scale()
        self._embedding = source.tensor("model.embed_tokens.weight").to(dtype)
        self._layers = [self._load_layer(source, i) for i in range(self.config.num_layers)]
        self._head = self._load_head(source)

    def forward(
        self, token_ids: Tensor, positions: Tensor, pool: Tensor, kv_index: Tensor, attention: Any, sample_rows: Tensor
    ) -> Tensor:
        """One step.

        token_ids, positions int64 [T] (padded to the kernels' row count; kv_index covers the real rows only);
        sample_rows int64 [S], padded likewise. Returns float32 logits [S, vocab] of those rows.
        """
        num_real_rows = kv_index.numel() // (2 * self.config.num_kv_heads)
        rotation, no_rotation = self._step_rotations(positions)
        step = StepContext(
            pool=pool,
            rotation=rotation,
            no_rotation=no_rotation,
            kv_index=kv_index,
            num_real_rows=num_real_rows,
            attention=attention,
        )
        kernels, eps = self.kernels, self.config.rms_norm_eps
        x = self._embedding.index_select(0, token_ids).float()  # [T, hidden], the residual stream
        for layer in self._layers:
            layer.attention.add_to(x, kernels.rms_norm(x, eps, self.dtype), step, kernels)
            layer.mlp.add_to(x, kernels.rms_norm(x, eps, self.dtype), kernels)
        return self._head.logits(kernels.rms_norm(x.index_select(0, sample_rows), eps, torch.float32), kernels)

    def _make_head_scale(self) -> Tensor | None:
        """[1, Hq + Hk, 1]: the softmax scale for query heads, 1 for key heads; None if the weights hold it."""
        if self._scale_in_weights:
            return None
        scale = torch.ones(1, self.config.num_heads + self.config.num_kv_heads, 1)
        scale[:, : self.config.num_heads] = self._scale
        return scale

    def _step_rotations(self, positions: Tensor) -> tuple[Tensor, Tensor | None]:
        rotation = self._rotations.index_select(0, positions)  # [T, 1, D/2]
        if self._head_scale is None:
            return rotation, None
        no_rotation = None
        if self.config.nope_layers:
            no_rotation = torch.ones_like(rotation) * self._head_scale
        return rotation * self._head_scale, no_rotation

    def _pack(self, weight: Tensor, bias: Tensor | None = None) -> Any:
        return self.kernels.pack_linear(weight.to(self.dtype), None if bias is None else bias.to(self.dtype))

    def _load_head(self, source: WeightSource) -> Head:
        norm = source.tensor("model.norm.weight").float()
        tied = self.config.tie_embeddings
        rows = self._embedding if tied else source.tensor("lm_head.weight").to(self.dtype)
        return Head(packed=self._pack(rows.float() * norm), rows=rows, norm=norm)

    def _load_layer(self, source: WeightSource, index: int) -> DecoderLayer:
        prefix = f"model.layers.{index}."

        def read(name: str) -> Tensor:
            return source.tensor(prefix + name).float()

        before_attention = read("input_layernorm.weight")
        weight = self._fuse([read(f"self_attn.{n}_proj.weight") for n in "qkv"])
        bias = self._fuse([read(f"self_attn.{n}_proj.bias") for n in "qkv"]) if self.config.qkv_bias else None
        attention = Attention(
            layer=index,
            num_heads=self.config.num_heads,
            num_kv_heads=self.config.num_kv_heads,
            head_dim=self.config.head_dim,
            qkv=self._pack(weight * before_attention, bias),
            output=self._pack(
                read("self_attn.o_proj.weight"),
                read("self_attn.o_proj.bias") if self.config.output_bias else None,
            ),
            head_norm=self._load_head_norm(read) if self.config.qk_norm else None,
            norm_eps=self.config.rms_norm_eps,
            rotates=index not in self.config.nope_layers,
        )
        gate_up = torch.cat((read("mlp.gate_proj.weight"), read("mlp.up_proj.weight")))
        mlp = Mlp(
            gate_up=self._pack(gate_up * read("post_attention_layernorm.weight")),
            down=self._pack(read("mlp.down_proj.weight")),
        )
        return DecoderLayer(attention, mlp)

    def _fuse(self, qkv: list[Tensor]) -> Tensor:
        """Query, key and value rows, one after another, in pair order and with the scale."""
        query, key, value = qkv
        query, key = (interleave(rows, self.config.head_dim) for rows in (query, key))
        if self._scale_in_weights:
            query = query * self._scale
        return torch.cat((query, key, value))

    def _load_head_norm(self, read: Any) -> Tensor:
        """[Hq + Hk, D] in pair order."""
        query, key = (interleave(read(f"self_attn.{n}_norm.weight"), self.config.head_dim) for n in "qk")
        stacked = torch.cat(
            (query.expand(self.config.num_heads, -1), key.expand(self.config.num_kv_heads, -1)),
        )
        return stacked.contiguous()
