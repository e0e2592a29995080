"""What config.json of a Hugging Face folder says about the model. Torch-free.

Reads the old spelling of rotary settings (`rope_theta`, `rope_scaling`) and the one of transformers 5
(`rope_parameters`). Refuses, by name, what the decoder cannot do.
"""

from __future__ import annotations

from pathlib import Path

from engine.models.config import Architecture, ModelConfig, RopeScaling
from engine.models.consistency import consistent
from engine.models.json_file import JsonFile

_ARCHITECTURES: dict[str, Architecture] = {
    "LlamaForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "SmolLM3ForCausalLM": "smollm3",
}

# Where the value an absent field stands for differs between architectures.
_DEFAULT_THETA: dict[Architecture, float] = {"smollm3": 2_000_000.0}
_DEFAULT_HEAD_DIM: dict[Architecture, int] = {"qwen3": 128}
_DEFAULT_TIED: dict[Architecture, bool] = {"smollm3": True}

_NOPE_INTERVAL = 4


def hf_eos_token_ids(folder: Path) -> tuple[int, ...]:
    """Tokens that end a generation: those of generation_config.json, or else of config.json."""
    generation = JsonFile.read_if_there(folder / "generation_config.json").token_ids("eos_token_id")
    return generation or JsonFile.read(folder / "config.json").token_ids("eos_token_id")


def hf_config(folder: Path) -> ModelConfig:
    """Raises `ModelLoadError` for a missing or malformed file or field, or something the decoder cannot do."""
    file = JsonFile.read(folder / "config.json")
    architecture = _architecture(file)
    num_layers = file.integer("num_hidden_layers")
    _refuse_unsupported(file, num_layers)
    num_heads = file.integer("num_attention_heads")
    hidden_size = file.integer("hidden_size")
    theta, scaling = _rope(file, architecture)
    bos = file.token_ids("bos_token_id")
    config = ModelConfig(
        architecture=architecture,
        vocab_size=file.integer("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=file.integer("intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=file.integer("num_key_value_heads", num_heads),
        head_dim=file.integer("head_dim", _DEFAULT_HEAD_DIM.get(architecture, hidden_size // num_heads)),
        rms_norm_eps=file.number("rms_norm_eps"),
        rope_theta=theta,
        max_position=file.integer("max_position_embeddings"),
        rope_scaling=scaling,
        qkv_bias=architecture == "qwen2" or file.flag("attention_bias", default=False),
        output_bias=architecture != "qwen2" and file.flag("attention_bias", default=False),
        qk_norm=architecture == "qwen3",
        nope_layers=_nope_layers(file, num_layers) if architecture == "smollm3" else frozenset(),
        tie_embeddings=file.flag("tie_word_embeddings", default=_DEFAULT_TIED.get(architecture, False)),
        eos_token_ids=hf_eos_token_ids(folder),
        bos_token_id=bos[0] if bos else None,
    )
    return consistent(config, file.path)


def _architecture(file: JsonFile) -> Architecture:
    names = file.fields.get("architectures")
    if not isinstance(names, list) or not names:
        raise file.error("'architectures' is missing")
    for name in names:
        if name in _ARCHITECTURES:
            return _ARCHITECTURES[name]
    raise file.error(f"architecture {', '.join(map(str, names))} is not supported (only {', '.join(_ARCHITECTURES)})")


def _refuse_unsupported(file: JsonFile, num_layers: int) -> None:
    activation = file.fields.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise file.error(f"'hidden_act' = {activation!r} is not supported (only 'silu')")
    if file.flag("mlp_bias", default=False):
        raise file.error("'mlp_bias' = true is not supported")
    if file.fields.get("quantization_config") is not None:
        raise file.error("'quantization_config' is not supported: only float weights are")
    if _slides(file, num_layers):
        raise file.error("a sliding attention window ('use_sliding_window', 'layer_types') is not supported")


def _slides(file: JsonFile, num_layers: int) -> bool:
    kinds = file.fields.get("layer_types")
    if isinstance(kinds, list):
        return any(kind != "full_attention" for kind in kinds)
    if not file.flag("use_sliding_window", default=False) or file.fields.get("sliding_window") is None:
        return False
    first_sliding = file.fields.get("max_window_layers", 0)
    return not isinstance(first_sliding, int) or first_sliding < num_layers


def _nope_layers(file: JsonFile, num_layers: int) -> frozenset[int]:
    rotated = file.fields.get("no_rope_layers")  # named the wrong way round: 1 is a layer with rotation
    if rotated is None:
        interval = file.integer("no_rope_layer_interval", _NOPE_INTERVAL)
        return frozenset(range(interval - 1, num_layers, interval))
    if not isinstance(rotated, list) or len(rotated) < num_layers:
        raise file.error(f"'no_rope_layers' must list all {num_layers} layers")
    return frozenset(layer for layer, has_rope in enumerate(rotated[:num_layers]) if not has_rope)


def _rope(file: JsonFile, architecture: Architecture) -> tuple[float, RopeScaling | None]:
    """(theta, scaling)."""
    rope = file.section("rope_parameters" if file.fields.get("rope_parameters") is not None else "rope_scaling")
    theta = rope.number("rope_theta", file.number("rope_theta", _DEFAULT_THETA.get(architecture, 10000.0)))
    for place in (file, rope):
        if place.number("partial_rotary_factor", 1.0) != 1.0:
            raise file.error("'partial_rotary_factor' is not supported")
    kind = rope.fields.get("rope_type", rope.fields.get("type", "default"))
    if kind == "default":
        return theta, None
    if kind == "linear":
        return theta, RopeScaling(kind="linear", factor=rope.number("factor"))
    if kind == "llama3":
        original = file.integer("original_max_position_embeddings", file.integer("max_position_embeddings"))
        return theta, RopeScaling(
            kind="llama3",
            factor=rope.number("factor"),
            low_freq_factor=rope.number("low_freq_factor"),
            high_freq_factor=rope.number("high_freq_factor"),
            original_max_position=rope.integer("original_max_position_embeddings", original),
        )
    raise file.error(f"rotary scaling of type {kind!r} is not supported (only 'linear' and 'llama3')")
