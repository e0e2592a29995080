"""What a GGUF file's metadata say about the model. Torch-free; reads no weights but the few rotary factors.

Refuses, by name, what the decoder cannot do: wrong mapping of an architecture gives fluent nonsense, not an error.
"""

from __future__ import annotations

import math
import struct

from engine.errors import ModelLoadError
from engine.models.config import Architecture, ModelConfig, RopeScaling
from engine.models.consistency import consistent
from engine.models.gguf_file import GGUFFile

ROPE_FACTORS = "rope_freqs.weight"
_F32 = 0

_ARCHITECTURES: dict[str, Architecture] = {
    "llama": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "smollm3": "smollm3",
}

# llama.cpp gives SmolLM3 files no key for this: every fourth layer goes without rotation.
_SMOLLM3_NOPE_INTERVAL = 4

# The constants of every Llama 3.x model; a file carries only what comes out of them, as `rope_freqs.weight`.
_LLAMA3_LOW, _LLAMA3_HIGH, _LLAMA3_ORIGINAL = 1.0, 4.0, 8192

# Metadata that change the computation, and the value with which they do not.
_UNSUPPORTED: dict[str, tuple[float, ...]] = {
    "expert_count": (0,),
    "attention.clamp_kqv": (0,),
    "attention.max_alibi_bias": (0,),
    "attention.scale": (0,),
    "attn_logit_softcapping": (0,),
    "embedding_scale": (0, 1),
    "final_logit_softcapping": (0,),
    "logit_scale": (0, 1),
    "residual_scale": (0, 1),
    "rope.scaling.attn_factor": (0, 1),
}


def gguf_eos_token_ids(file: GGUFFile) -> tuple[int, ...]:
    """Tokens that end a generation: end of sequence, of turn and of message, as far as the file names them."""
    keys = (f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom"))
    ids = (file.get(key, int) for key in keys)
    return tuple(dict.fromkeys(token_id for token_id in ids if token_id is not None))


def gguf_config(file: GGUFFile) -> ModelConfig:
    """Raises `ModelLoadError` for an unknown architecture, a missing value, or something the decoder cannot do."""
    architecture = _architecture(file)
    hidden_size = _size(file, "embedding_length")
    num_heads = _size(file, "attention.head_count")
    head_dim = _get_size(file, "attention.key_length", hidden_size // num_heads)
    _refuse_unsupported(file, head_dim)
    num_layers = _size(file, "block_count")
    eps = file.require(f"{architecture}.attention.layer_norm_rms_epsilon", float)
    config = ModelConfig(
        architecture=architecture,
        vocab_size=_vocab_size(file),
        hidden_size=hidden_size,
        intermediate_size=_size(file, "feed_forward_length"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=_get_size(file, "attention.head_count_kv", num_heads),
        head_dim=head_dim,
        # Stored as float32: its shortest decimal is the number the model was trained with (1e-05, not 9.9999997e-06).
        rms_norm_eps=float(f"{eps:.7g}"),
        rope_theta=file.get(f"{architecture}.rope.freq_base", float, 10000.0),
        max_position=_size(file, "context_length"),
        rope_scaling=_rope_scaling(file, head_dim),
        qkv_bias=architecture == "qwen2" or "blk.0.attn_q.bias" in file.tensors,
        output_bias="blk.0.attn_output.bias" in file.tensors,
        qk_norm=architecture == "qwen3",
        nope_layers=_nope_layers(architecture, num_layers),
        tie_embeddings="output.weight" not in file.tensors,
        eos_token_ids=gguf_eos_token_ids(file),
        bos_token_id=file.get("tokenizer.ggml.bos_token_id", int),
    )
    return consistent(config, file.path)


def _architecture(file: GGUFFile) -> Architecture:
    name = file.require("general.architecture", str)
    if name not in _ARCHITECTURES:
        raise ModelLoadError(
            f"architecture '{name}' is not supported (only {', '.join(_ARCHITECTURES)})", file=str(file.path)
        )
    return _ARCHITECTURES[name]


def _key(file: GGUFFile, name: str) -> str:
    return f"{file.require('general.architecture', str)}.{name}"


def _size(file: GGUFFile, name: str) -> int:
    key = _key(file, name)
    value = file.require(key, int)
    if value < 1:
        raise ModelLoadError(f"metadata '{key}' must be at least 1, not {value}", file=str(file.path))
    return value


def _get_size(file: GGUFFile, name: str, default: int) -> int:
    return default if file.metadata.get(_key(file, name)) is None else _size(file, name)


def _vocab_size(file: GGUFFile) -> int:
    tokens = file.get("tokenizer.ggml.tokens", list)
    return _size(file, "vocab_size") if tokens is None else len(tokens)


def _nope_layers(architecture: Architecture, num_layers: int) -> frozenset[int]:
    if architecture != "smollm3":
        return frozenset()
    return frozenset(range(_SMOLLM3_NOPE_INTERVAL - 1, num_layers, _SMOLLM3_NOPE_INTERVAL))


def _refuse_unsupported(file: GGUFFile, head_dim: int) -> None:
    splits = file.get("split.count", int, 1)
    if splits > 1:
        raise ModelLoadError(f"part of a model split over {splits} files; merge them first", file=str(file.path))
    harmless = {_key(file, name): values for name, values in _UNSUPPORTED.items()}
    harmless[_key(file, "attention.causal")] = (True,)
    harmless[_key(file, "attention.sliding_window")] = (0, _size(file, "context_length"))
    harmless[_key(file, "attention.value_length")] = (head_dim,)
    harmless[_key(file, "rope.dimension_count")] = (head_dim,)
    for key, values in harmless.items():
        value = file.metadata.get(key)
        if value is not None and value not in values:
            raise ModelLoadError(f"metadata '{key}' = {value} is not supported", file=str(file.path))


def _rope_scaling(file: GGUFFile, head_dim: int) -> RopeScaling | None:
    if ROPE_FACTORS in file.tensors:
        return _scaling_of_factors(file, head_dim)
    kind = file.get(_key(file, "rope.scaling.type"), str, "linear")
    factor = file.get(_key(file, "rope.scaling.factor"), float) or file.get(_key(file, "rope.scale_linear"), float)
    if kind == "none" or (kind == "linear" and factor in (None, 0.0, 1.0)):
        return None
    if kind != "linear" or factor is None:
        raise ModelLoadError(f"rotary scaling of type '{kind}' is not supported", file=str(file.path))
    return RopeScaling(kind="linear", factor=factor)


def _scaling_of_factors(file: GGUFFile, head_dim: int) -> RopeScaling | None:
    """The llama3 scaling that gives exactly the file's factors, which is all that a GGUF file keeps of it."""
    factors = _read_factors(file, head_dim)
    factor = max(factors)
    if factor == 1.0:
        return None
    theta = file.get(_key(file, "rope.freq_base"), float, 10000.0)
    for pair, found in enumerate(factors):
        turns = _LLAMA3_ORIGINAL * theta ** (-2 * pair / head_dim) / (2 * math.pi)
        keep = min(1.0, max(0.0, (turns - _LLAMA3_LOW) / (_LLAMA3_HIGH - _LLAMA3_LOW)))
        if not math.isclose(found, 1 / (keep + (1 - keep) / factor), rel_tol=1e-4):
            raise ModelLoadError("not the rotary scaling of Llama 3", file=str(file.path), tensor=ROPE_FACTORS)
    return RopeScaling(
        kind="llama3",
        factor=factor,
        low_freq_factor=_LLAMA3_LOW,
        high_freq_factor=_LLAMA3_HIGH,
        original_max_position=_LLAMA3_ORIGINAL,
    )


def _read_factors(file: GGUFFile, head_dim: int) -> tuple[float, ...]:
    info = file.tensors[ROPE_FACTORS]
    if info.shape != (head_dim // 2,) or info.type_id != _F32:
        raise ModelLoadError(f"must be {head_dim // 2} float32 values", file=str(file.path), tensor=ROPE_FACTORS)
    layout = f"<{head_dim // 2}f"
    with file.path.open("rb") as stream:
        stream.seek(info.offset)
        data = stream.read(struct.calcsize(layout))
    if len(data) < struct.calcsize(layout):
        raise ModelLoadError("the file is truncated", file=str(file.path), tensor=ROPE_FACTORS)
    return struct.unpack(layout, data)
