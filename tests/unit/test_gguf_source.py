"""Models from GGUF files, against files written here the way llama.cpp's converter writes them."""

from __future__ import annotations

import dataclasses
import math
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Q
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from engine.errors import ModelLoadError
from engine.models.config import ModelConfig, RopeScaling, required_tensors
from engine.models.gguf_source import GGUFSource
from engine.models.registry import open_source

TINY = ModelConfig(
    architecture="llama",
    vocab_size=40,
    hidden_size=32,
    intermediate_size=64,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    rms_norm_eps=1e-5,
    rope_theta=10000.0,
    max_position=128,
    tie_embeddings=True,
    eos_token_ids=(2,),
    bos_token_id=1,
)
CONFIGS = {
    "llama": TINY,
    "llama untied": dataclasses.replace(TINY, tie_embeddings=False),
    "llama with biases": dataclasses.replace(TINY, qkv_bias=True, output_bias=True),
    "qwen2": dataclasses.replace(TINY, architecture="qwen2", qkv_bias=True, rope_theta=1e6, rms_norm_eps=1e-6),
    "qwen3": dataclasses.replace(TINY, architecture="qwen3", qk_norm=True, head_dim=16, tie_embeddings=False),
    "smollm3": dataclasses.replace(TINY, architecture="smollm3", num_layers=5, nope_layers=frozenset({3})),
}

NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "model.layers": "blk",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name: str) -> str:
    for ours, theirs in NAMES.items():
        name = name.replace(ours, theirs)
    return name


def permute(weights: np.ndarray, num_heads: int) -> np.ndarray:
    """What llama.cpp's converter does to query and key rows of Llama-like models."""
    halves = weights.reshape(num_heads, 2, weights.shape[0] // num_heads // 2, *weights.shape[1:])
    return halves.swapaxes(1, 2).reshape(weights.shape)


def random_weights(config: ModelConfig) -> dict[str, np.ndarray]:
    """By canonical name, rows in the order of Hugging Face files."""
    rng = np.random.default_rng(7)
    return {name: rng.standard_normal(shape, np.float32) for name, shape in required_tensors(config).items()}


def to_gguf(config: ModelConfig, weights: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    tensors = {}
    for name, values in weights.items():
        permuted = values
        if config.architecture in ("llama", "smollm3"):
            if "q_proj" in name:
                permuted = permute(values, config.num_heads)
            elif "k_proj" in name:
                permuted = permute(values, config.num_kv_heads)
        tensors[gguf_name(name)] = permuted
    return tensors


def metadata_of(config: ModelConfig) -> dict[str, Any]:
    arch = config.architecture
    return {
        f"{arch}.block_count": config.num_layers,
        f"{arch}.context_length": config.max_position,
        f"{arch}.embedding_length": config.hidden_size,
        f"{arch}.feed_forward_length": config.intermediate_size,
        f"{arch}.attention.head_count": config.num_heads,
        f"{arch}.attention.head_count_kv": config.num_kv_heads,
        f"{arch}.attention.key_length": config.head_dim,
        f"{arch}.attention.value_length": config.head_dim,
        f"{arch}.attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        f"{arch}.rope.freq_base": config.rope_theta,
        f"{arch}.rope.dimension_count": config.head_dim,
        f"{arch}.vocab_size": config.vocab_size,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.bos_token_id": 1,
    }


def write(
    path: Path,
    architecture: str,
    metadata: dict[str, Any],
    tensors: dict[str, np.ndarray],
    types: dict[str, Q] | None = None,
) -> Path:
    """`types`: tensors that are packed bytes of a quantization type."""
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in metadata.items():
        match value:
            case bool():
                writer.add_bool(key, value)
            case int():
                writer.add_uint32(key, value)
            case float():
                writer.add_float32(key, value)
            case str():
                writer.add_string(key, value)
            case _:
                writer.add_array(key, value)
    for name, values in tensors.items():
        writer.add_tensor(name, values, raw_dtype=(types or {}).get(name))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., Path]:
    """Write a tiny model; keyword arguments change its metadata (None removes) and tensors (None removes)."""

    def make_model(
        config: ModelConfig = TINY, metadata: dict[str, Any] | None = None, tensors: dict[str, Any] | None = None
    ) -> Path:
        values = metadata_of(config) | (metadata or {})
        weights = to_gguf(config, random_weights(config)) | (tensors or {})
        return write(
            tmp_path / "tiny.gguf",
            config.architecture,
            {key: value for key, value in values.items() if value is not None},
            {name: tensor for name, tensor in weights.items() if tensor is not None},
        )

    return make_model


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_metadata_give_the_configuration(make: Callable[..., Path], config: ModelConfig) -> None:
    source = open_source(make(config))
    source.check()

    assert config == source.config


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_every_tensor_comes_back_bit_for_bit_with_rows_in_hugging_face_order(
    make: Callable[..., Path], config: ModelConfig
) -> None:
    source = GGUFSource(make(config))

    for name, values in random_weights(config).items():
        assert np.array_equal(values, source.tensor(name).numpy()), name


@pytest.mark.parametrize("name", ["llama", "qwen2"])
def test_transformers_reads_the_same_weights(make: Callable[..., Path], name: str) -> None:
    config = CONFIGS[name]
    path = make(config, metadata={"tokenizer.ggml.tokens": [f"t{i}" for i in range(40)]})
    settings = load_gguf_checkpoint(str(path))["config"]
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**settings))
    expected = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=model)["tensors"]
    source = GGUFSource(path)

    for tensor in required_tensors(config):
        assert torch.equal(expected[tensor], source.tensor(tensor)), tensor


def test_head_size_without_a_key_is_the_even_share(make: Callable[..., Path]) -> None:
    source = GGUFSource(make(metadata={"llama.attention.key_length": None, "llama.attention.value_length": None}))

    assert source.config.head_dim == 8


def test_the_vocabulary_is_counted_where_the_file_holds_it(make: Callable[..., Path]) -> None:
    tokens = [f"t{i}" for i in range(40)]
    source = GGUFSource(make(metadata={"tokenizer.ggml.tokens": tokens, "llama.vocab_size": None}))

    assert source.config.vocab_size == 40


def test_end_of_turn_and_of_message_end_a_generation_too(make: Callable[..., Path]) -> None:
    ends = {"tokenizer.ggml.eot_token_id": 3, "tokenizer.ggml.eom_token_id": 2}

    assert GGUFSource(make(metadata=ends)).config.eos_token_ids == (2, 3)


def test_a_tensor_belongs_to_the_caller(make: Callable[..., Path]) -> None:
    source = GGUFSource(make())
    before = source.tensor("model.norm.weight").clone()
    source.tensor("model.norm.weight").zero_()

    assert torch.equal(before, source.tensor("model.norm.weight"))


@pytest.mark.parametrize(
    "quantization",
    [Q.Q4_0, Q.Q4_1, Q.Q5_0, Q.Q5_1, Q.Q8_0, Q.Q2_K, Q.Q3_K, Q.Q4_K, Q.Q5_K, Q.Q6_K, Q.IQ4_NL, Q.IQ4_XS, Q.MXFP4],
    ids=lambda q: q.name,
)
def test_dequantization_is_that_of_the_gguf_package_bit_for_bit(tmp_path: Path, quantization: Q) -> None:
    config = dataclasses.replace(TINY, intermediate_size=512)
    block, block_bytes = gguf.GGML_QUANT_SIZES[quantization]
    packed = np.random.default_rng(3).integers(0, 256, (32, 512 // block * block_bytes), np.uint8)
    name = "blk.1.ffn_down.weight"
    tensors = to_gguf(config, random_weights(config)) | {name: packed}
    source = GGUFSource(write(tmp_path / "q.gguf", "llama", metadata_of(config), tensors, {name: quantization}))
    source.check()
    # Random bytes hold any scale, infinite ones too.
    with np.errstate(all="ignore"):
        expected = gguf.dequantize(packed, quantization)
        found = source.tensor("model.layers.1.mlp.down_proj.weight")

    assert found.shape == (32, 512)
    assert np.array_equal(expected.view(np.uint32), found.numpy().view(np.uint32))


@pytest.mark.parametrize("quantization", [Q.F32, Q.F16, Q.BF16], ids=lambda q: q.name)
def test_float_tensors_keep_their_bits(tmp_path: Path, quantization: Q) -> None:
    values = random_weights(TINY)["model.layers.0.mlp.up_proj.weight"]
    packed = gguf.quantize(values, quantization)
    name = "blk.0.ffn_up.weight"
    tensors = to_gguf(TINY, random_weights(TINY)) | {name: packed}
    source = GGUFSource(write(tmp_path / "f.gguf", "llama", metadata_of(TINY), tensors, {name: quantization}))
    source.check()
    found = source.tensor("model.layers.0.mlp.up_proj.weight")

    assert {Q.F32: torch.float32, Q.F16: torch.float16, Q.BF16: torch.bfloat16}[quantization] == found.dtype
    assert np.array_equal(gguf.dequantize(packed, quantization), found.float().numpy())


def test_quantized_query_rows_are_reordered_as_float_ones_are(tmp_path: Path) -> None:
    tensors = to_gguf(TINY, random_weights(TINY))
    name = "blk.0.attn_q.weight"
    rows = gguf.quantize(random_weights(TINY)["model.layers.0.self_attn.q_proj.weight"], Q.Q8_0)
    tensors[name] = permute(rows, TINY.num_heads)
    source = GGUFSource(write(tmp_path / "q.gguf", "llama", metadata_of(TINY), tensors, {name: Q.Q8_0}))

    found = source.tensor("model.layers.0.self_attn.q_proj.weight").numpy()
    assert np.array_equal(gguf.dequantize(rows, Q.Q8_0), found)


def llama3_factors(theta: float, head_dim: int, factor: float, original: int = 8192) -> np.ndarray:
    """As llama.cpp's converter computes `rope_freqs.weight`."""
    factors = []
    for frequency in 1.0 / theta ** (np.arange(0, head_dim, 2, np.float32) / head_dim):
        wavelength = 2 * math.pi / frequency
        smooth = (original / wavelength - 1.0) / (4.0 - 1.0)
        if wavelength < original / 4.0:
            factors.append(1.0)
        elif wavelength > original / 1.0:
            factors.append(factor)
        else:
            factors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(factors, np.float32)


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama3_scaling_is_recovered_from_its_factors(make: Callable[..., Path], factor: float) -> None:
    config = dataclasses.replace(TINY, head_dim=64, rope_theta=500000.0)
    source = GGUFSource(make(config, tensors={"rope_freqs.weight": llama3_factors(500000.0, 64, factor)}))
    source.check()

    assert RopeScaling(kind="llama3", factor=factor) == source.config.rope_scaling


def test_factors_of_one_scale_nothing(make: Callable[..., Path]) -> None:
    source = GGUFSource(make(tensors={"rope_freqs.weight": np.ones(4, np.float32)}))
    source.check()

    assert source.config.rope_scaling is None


@pytest.mark.parametrize(
    "factors", [llama3_factors(500000.0, 64, 8.0, original=4096), np.ones(31, np.float32), np.ones(32, np.float16)]
)
def test_other_rotary_factors_are_refused(make: Callable[..., Path], factors: np.ndarray) -> None:
    config = dataclasses.replace(TINY, head_dim=64, rope_theta=500000.0)
    with pytest.raises(ModelLoadError, match=r"tiny\.gguf: tensor 'rope_freqs\.weight': "):
        GGUFSource(make(config, tensors={"rope_freqs.weight": factors}))


def test_linear_scaling_is_read(make: Callable[..., Path]) -> None:
    source = GGUFSource(make(metadata={"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}))

    assert RopeScaling(kind="linear", factor=4.0) == source.config.rope_scaling


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"llama.block_count": None}, "'llama.block_count' is missing"),
        ({"llama.block_count": 0}, "'llama.block_count' must be at least 1"),
        ({"llama.block_count": "two"}, "'llama.block_count' is not an integer"),
        ({"llama.attention.head_count": [4, 4]}, "'llama.attention.head_count' is not an integer"),
        ({"llama.attention.head_count_kv": 3}, "4 heads cannot share 3"),
        ({"llama.attention.layer_norm_rms_epsilon": None}, "layer_norm_rms_epsilon' is missing"),
        ({"llama.attention.sliding_window": 64}, "'llama.attention.sliding_window' = 64 is not supported"),
        ({"llama.attention.value_length": 16}, "'llama.attention.value_length' = 16 is not supported"),
        ({"llama.rope.dimension_count": 4}, "'llama.rope.dimension_count' = 4 is not supported"),
        ({"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 4.0}, "type 'yarn' is not supported"),
        ({"llama.expert_count": 8}, "'llama.expert_count' = 8 is not supported"),
        ({"llama.logit_scale": 0.5}, "'llama.logit_scale' = 0.5 is not supported"),
        ({"llama.attention.causal": False}, "'llama.attention.causal' = False is not supported"),
        ({"split.count": 2}, "split over 2 files"),
        ({"tokenizer.ggml.eos_token_id": 40}, "outside the vocabulary"),
    ],
)
def test_what_the_decoder_cannot_do_is_refused_by_name(
    make: Callable[..., Path], metadata: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelLoadError, match=message) as caught:
        GGUFSource(make(metadata=metadata))
    assert caught.value.file.endswith("tiny.gguf")


def test_an_unknown_architecture_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="architecture 'mamba' is not supported"):
        GGUFSource(write(tmp_path / "m.gguf", "mamba", {}, {}))


@pytest.mark.parametrize("name", ["token_embd.weight", "blk.1.attn_k.weight", "blk.0.ffn_norm.weight"])
def test_a_missing_tensor_is_named(make: Callable[..., Path], name: str) -> None:
    with pytest.raises(ModelLoadError, match=rf"tiny\.gguf: tensor '{name}': is missing") as caught:
        GGUFSource(make(tensors={name: None})).check()
    assert name == caught.value.tensor


def test_a_mis_shaped_tensor_is_named_with_both_shapes(make: Callable[..., Path]) -> None:
    source = GGUFSource(make(tensors={"blk.1.ffn_up.weight": np.zeros((32, 64), np.float32)}))
    with pytest.raises(ModelLoadError, match=r"'blk\.1\.ffn_up\.weight': has shape \[32, 64\], must be \[64, 32\]"):
        source.check()


def test_a_tensor_the_decoder_does_not_know_is_named(make: Callable[..., Path]) -> None:
    source = GGUFSource(make(tensors={"blk.0.attn_q_norm.weight": np.zeros(8, np.float32)}))
    with pytest.raises(ModelLoadError, match=r"'blk\.0\.attn_q_norm\.weight': the llama decoder has no use for it"):
        source.check()


def test_a_tensor_of_a_type_that_is_not_numbers_of_a_model_is_named(make: Callable[..., Path]) -> None:
    source = GGUFSource(make(tensors={"blk.0.attn_norm.weight": np.zeros(32, np.int32)}))
    with pytest.raises(ModelLoadError, match=r"'blk\.0\.attn_norm\.weight': type I32 is not supported"):
        source.check()


def test_a_tensor_of_a_type_nobody_knows_is_named(make: Callable[..., Path]) -> None:
    path = make()
    data = path.read_bytes()
    name = b"blk.0.attn_norm.weight"
    at = data.index(name) + len(name) + 4 + 8  # behind the number of dimensions and the one dimension
    path.write_bytes(data[:at] + struct.pack("<I", 999) + data[at + 4 :])
    source = GGUFSource(path)
    with pytest.raises(ModelLoadError, match=r"'blk\.0\.attn_norm\.weight': type number 999 is not supported"):
        source.check()
    with pytest.raises(ModelLoadError, match=r"'blk\.0\.attn_norm\.weight': type number 999 is not supported"):
        source.tensor("model.layers.0.input_layernorm.weight")


def test_a_file_cut_off_in_its_data_names_the_first_tensor_that_is_not_whole(make: Callable[..., Path]) -> None:
    path = make()
    data = path.read_bytes()
    path.write_bytes(data[:-4000])
    source = GGUFSource(path)
    with pytest.raises(ModelLoadError, match="the file is truncated") as caught:
        source.check()
    assert caught.value.tensor is not None
    name = next(name for name in required_tensors(TINY) if gguf_name(name) == caught.value.tensor)
    with pytest.raises(ModelLoadError, match="the file is truncated"):
        source.tensor(name)


def test_a_file_cut_off_anywhere_in_its_header_is_refused(make: Callable[..., Path]) -> None:
    path = make()
    data = path.read_bytes()
    header = data.index(b"output_norm.weight") + len("output_norm.weight") + 4
    for length in range(0, header, 7):
        path.write_bytes(data[:length])
        with pytest.raises(ModelLoadError, match=r"truncated|too short"):
            GGUFSource(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"PK\x03\x04 something else", "does not begin with 'GGUF'"),
        (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "version 1 is not supported"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "version 50331648 is not supported"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1 << 60), "truncated"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1) + b"k" + struct.pack("<I", 77), "value type 77"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1) + b"k" + struct.pack("<IIQ", 9, 9, 1), "array of value type 9"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1) + b"k" + struct.pack("<IIQ", 9, 4, 1 << 62), "truncated"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 2) + b"\xff\xff", "not UTF-8"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 1, 0, 1) + b"t" + struct.pack("<I", 99), "99 dimensions"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 0), "'general.architecture' is missing"),
    ],
)
def test_a_damaged_header_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelLoadError, match=message):
        open_source(path)


def test_what_is_no_model_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.bin").write_bytes(b"weights")
    with pytest.raises(ModelLoadError, match=r"model\.bin: is neither a \.gguf file nor a folder"):
        open_source(tmp_path / "model.bin")
    with pytest.raises(ModelLoadError, match=r"absent\.gguf: there is no such file"):
        open_source(tmp_path / "absent.gguf")


@pytest.mark.model
def test_smollm2_is_read_as_the_gguf_package_reads_it(smollm2_path: Path) -> None:
    source = open_source(smollm2_path)
    source.check()
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(smollm2_path).tensors}

    assert source.config == dataclasses.replace(
        TINY,
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_layers=30,
        num_heads=9,
        num_kv_heads=3,
        head_dim=64,
        rope_theta=100000.0,
        max_position=8192,
    )
    for name in required_tensors(source.config):
        stored = tensors[gguf_name(name)]
        found = source.tensor(name).float().numpy()
        heads = 9 if "q_proj" in name else 3 if "k_proj" in name else None
        again = found if heads is None else permute(found, heads)

        assert np.array_equal(gguf.dequantize(stored.data, stored.tensor_type), again), name
