"""What a model is made of: one frozen record that drives the one decoder. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Architecture = Literal["llama", "qwen2", "qwen3", "smollm3"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeScaling:
    """How rotary frequencies are stretched beyond the trained window.

    Attributes:
        kind: ``linear`` divides all frequencies by factor; ``llama3`` divides the low ones only, with a smooth band
            between low_freq_factor and high_freq_factor of original_max_position.
    """

    kind: Literal["linear", "llama3"]
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """A decoder-only transformer with RMSNorm, rotary embedding, grouped-query attention and SwiGLU.

    Attributes:
        head_dim: size of one attention head (not always hidden_size / num_heads).
        qkv_bias: query, key and value projections carry a bias (Qwen2, or files with attention_bias).
        output_bias: so does the output projection (Llama, Qwen3 and SmolLM3 files with attention_bias).
        qk_norm: RMSNorm over each query and key head before rotation (Qwen3).
        nope_layers: layers without rotary embedding (SmolLM3).
        tie_embeddings: the output projection is the embedding table.
        eos_token_ids: tokens that end a generation.
    """

    architecture: Architecture
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    max_position: int
    rope_scaling: RopeScaling | None = None
    qkv_bias: bool = False
    output_bias: bool = False
    qk_norm: bool = False
    nope_layers: frozenset[int] = frozenset()
    tie_embeddings: bool = False
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None

    @property
    def kv_token_elements(self) -> int:
        """Elements of KV that one token takes over all layers."""
        return self.num_layers * 2 * self.num_kv_heads * self.head_dim


def required_tensors(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor the decoder needs, by its canonical (Hugging Face) name, with its shape.

    Query and key rows are in the half-split rotary layout of Hugging Face files, whatever the source's own layout is.
    """
    hidden, inter, d = config.hidden_size, config.intermediate_size, config.head_dim
    q, kv = config.num_heads * d, config.num_kv_heads * d
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config.vocab_size, hidden),
        "model.norm.weight": (hidden,),
    }
    if not config.tie_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    for i in range(config.num_layers):
        layer: dict[str, tuple[int, ...]] = {
            "input_layernorm.weight": (hidden,),
            "post_attention_layernorm.weight": (hidden,),
            "self_attn.q_proj.weight": (q, hidden),
            "self_attn.k_proj.weight": (kv, hidden),
            "self_attn.v_proj.weight": (kv, hidden),
            "self_attn.o_proj.weight": (hidden, q),
            "mlp.gate_proj.weight": (inter, hidden),
            "mlp.up_proj.weight": (inter, hidden),
            "mlp.down_proj.weight": (hidden, inter),
        }
        if config.qkv_bias:
            layer |= {f"self_attn.{n}_proj.bias": (s,) for n, s in (("q", q), ("k", kv), ("v", kv))}
        if config.output_bias:
            layer["self_attn.o_proj.bias"] = (hidden,)
        if config.qk_norm:
            layer |= {"self_attn.q_norm.weight": (d,), "self_attn.k_norm.weight": (d,)}
        shapes |= {f"model.layers.{i}.{name}": shape for name, shape in layer.items()}
    return shapes
