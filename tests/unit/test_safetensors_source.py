"""Models from folders in Hugging Face layout, against folders that transformers itself writes."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config, SmolLM3Config

from engine.errors import ModelLoadError
from engine.models.config import ModelConfig, RopeScaling, required_tensors
from engine.models.registry import open_source
from engine.models.safetensors_source import SafetensorsSource

SIZES: dict[str, Any] = {
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
# Name → transformers' configuration, and what it must become.
MODELS: dict[str, tuple[Any, dict[str, Any]]] = {
    "llama": (LlamaConfig(**SIZES), {"architecture": "llama"}),
    "llama tied": (LlamaConfig(**SIZES, tie_word_embeddings=True), {"architecture": "llama", "tie_embeddings": True}),
    "llama with biases": (
        LlamaConfig(**SIZES, attention_bias=True),
        {"architecture": "llama", "qkv_bias": True, "output_bias": True},
    ),
    "llama3 rope": (
        LlamaConfig(**SIZES, rope_parameters=LLAMA3_ROPE),
        {
            "architecture": "llama",
            "rope_theta": 500000.0,
            "rope_scaling": RopeScaling(kind="llama3", factor=8.0, original_max_position=64),
        },
    ),
    "qwen2": (Qwen2Config(**SIZES), {"architecture": "qwen2", "qkv_bias": True}),
    "qwen3": (Qwen3Config(**SIZES, head_dim=16), {"architecture": "qwen3", "qk_norm": True, "head_dim": 16}),
    "smollm3": (
        SmolLM3Config(**SIZES),
        {
            "architecture": "smollm3",
            "rope_theta": 2000000.0,
            "nope_layers": frozenset({3}),
            "tie_embeddings": True,
        },
    ),
}


def expected_config(changes: dict[str, Any]) -> ModelConfig:
    fields: dict[str, Any] = {
        "vocab_size": 40,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_layers": 4,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 8,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "max_position": 128,
        "bos_token_id": 1,
        "eos_token_ids": (2,),
    }
    return ModelConfig(**(fields | changes))


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., Path]:
    """Write a tiny Llama's folder; keyword arguments change config.json (None removes a field) and tensors."""

    def make_folder(
        config: dict[str, Any] | None = None, tensors: dict[str, torch.Tensor | None] | None = None
    ) -> Path:
        fields = {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "rms_norm_eps": 1e-6,
            "tie_word_embeddings": True,
        }
        fields |= SIZES | (config or {})
        (tmp_path / "config.json").write_text(json.dumps({k: v for k, v in fields.items() if v is not None}))
        shapes = required_tensors(expected_config({"architecture": "llama", "tie_embeddings": True}))
        weights: dict[str, torch.Tensor | None] = {name: torch.ones(shape) for name, shape in shapes.items()}
        kept = {name: tensor for name, tensor in (weights | (tensors or {})).items() if tensor is not None}
        save_file(kept, tmp_path / "model.safetensors")
        return tmp_path

    return make_folder


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("shard_size", ["1GB", "20KB"], ids=["one file", "shards"])
def test_what_transformers_saves_is_read_whole(tmp_path: Path, name: str, shard_size: str) -> None:
    config, changes = MODELS[name]
    torch.manual_seed(5)
    model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(tmp_path, max_shard_size=shard_size)
    source = open_source(tmp_path)
    source.check()

    assert (tmp_path / "model.safetensors.index.json").exists() == (shard_size == "20KB")
    assert source.config == expected_config(changes)
    for tensor in required_tensors(source.config):
        assert torch.equal(model.state_dict()[tensor], source.tensor(tensor)), tensor


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_tensors_keep_their_type(make: Callable[..., Path], dtype: torch.dtype) -> None:
    values = torch.randn(32).to(dtype)
    source = SafetensorsSource(make(tensors={"model.norm.weight": values}))
    source.check()

    assert source.tensor("model.norm.weight").dtype == dtype
    assert torch.equal(values, source.tensor("model.norm.weight"))


def test_a_tensor_belongs_to_the_caller(make: Callable[..., Path]) -> None:
    source = SafetensorsSource(make())
    source.tensor("model.norm.weight").zero_()

    assert torch.equal(torch.ones(32), source.tensor("model.norm.weight"))


@pytest.mark.parametrize(
    ("fields", "theta", "scaling"),
    [
        ({}, 10000.0, None),
        ({"rope_theta": 1e6}, 1e6, None),
        ({"rope_theta": 1e6, "rope_scaling": None}, 1e6, None),
        (
            {"rope_theta": 1e6, "rope_scaling": {"type": "linear", "factor": 2.0}},
            1e6,
            RopeScaling(kind="linear", factor=2.0),
        ),
        (
            {"rope_theta": 500000.0, "rope_scaling": {k: v for k, v in LLAMA3_ROPE.items() if k != "rope_theta"}},
            500000.0,
            RopeScaling(kind="llama3", factor=8.0, original_max_position=64),
        ),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}, 1e6, None),
        (
            {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e6, "factor": 4.0}},
            1e6,
            RopeScaling(kind="linear", factor=4.0),
        ),
    ],
)
def test_rotary_settings_are_read_in_the_old_and_the_new_spelling(
    make: Callable[..., Path], fields: dict[str, Any], theta: float, scaling: RopeScaling | None
) -> None:
    config = SafetensorsSource(make(fields)).config

    assert (theta, scaling) == (config.rope_theta, config.rope_scaling)


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [
        ({"eos_token_id": [7, 5, 7]}, 2, (7, 5)),
        ({"eos_token_id": 9}, 2, (9,)),
        ({}, [3, 4], (3, 4)),
        (None, 2, (2,)),
        (None, None, ()),
    ],
)
def test_end_tokens_are_those_of_the_generation_settings_or_else_of_the_model(
    make: Callable[..., Path], generation: dict[str, Any] | None, config: Any, expected: tuple[int, ...]
) -> None:
    folder = make({"eos_token_id": config})
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))

    assert SafetensorsSource(folder).config.eos_token_ids == expected


def test_layers_without_rotation_follow_the_list_or_the_interval(make: Callable[..., Path]) -> None:
    smollm3 = {"architectures": ["SmolLM3ForCausalLM"]}

    assert SafetensorsSource(make(smollm3)).config.nope_layers == {3}
    assert SafetensorsSource(make(smollm3 | {"no_rope_layer_interval": 2})).config.nope_layers == {1, 3}
    assert SafetensorsSource(make(smollm3 | {"no_rope_layers": [0, 1, 1, 1]})).config.nope_layers == {0}


def test_a_second_copy_of_tied_embeddings_is_ignored(make: Callable[..., Path]) -> None:
    folder = make(tensors={"lm_head.weight": torch.ones(40, 32), "model.rotary_emb.inv_freq": torch.ones(4)})

    SafetensorsSource(folder).check()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"architectures": ["MambaForCausalLM"]}, "architecture MambaForCausalLM is not supported"),
        ({"architectures": None}, "'architectures' is missing"),
        ({"hidden_size": None}, "'hidden_size' is missing"),
        ({"hidden_size": "32"}, "'hidden_size' must be a whole number"),
        ({"num_hidden_layers": 0}, "'num_hidden_layers' must be a whole number of at least 1"),
        ({"rms_norm_eps": None}, "'rms_norm_eps' is missing"),
        ({"rms_norm_eps": -1.0}, "'rms_norm_eps' must be a number greater than 0"),
        ({"num_key_value_heads": 3}, "4 heads cannot share 3"),
        ({"head_dim": 7}, "7 dimensions"),
        ({"hidden_act": "gelu"}, "'hidden_act' = 'gelu' is not supported"),
        ({"mlp_bias": True}, "'mlp_bias' = true is not supported"),
        ({"mlp_bias": 1}, "'mlp_bias' must be true or false"),
        ({"tie_word_embeddings": "yes"}, "'tie_word_embeddings' must be true or false"),
        ({"quantization_config": {"quant_method": "awq"}}, "'quantization_config' is not supported"),
        ({"use_sliding_window": True, "sliding_window": 64}, "sliding attention window"),
        ({"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 2}, "sliding attention window"),
        ({"layer_types": ["full_attention", "sliding_attention"] * 2}, "sliding attention window"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "type 'yarn' is not supported"),
        ({"rope_scaling": {"type": "dynamic", "factor": 4.0}}, "type 'dynamic' is not supported"),
        ({"rope_scaling": {"type": "linear"}}, "'factor' is missing"),
        ({"rope_scaling": "linear"}, "'rope_scaling' must be an object"),
        ({"partial_rotary_factor": 0.5}, "'partial_rotary_factor' is not supported"),
        ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "'partial_rotary_factor'"),
        ({"eos_token_id": "</s>"}, "'eos_token_id' must be a token id"),
        ({"eos_token_id": 40}, "outside the vocabulary"),
        ({"architectures": ["SmolLM3ForCausalLM"], "no_rope_layers": [1]}, "must list all 4 layers"),
    ],
)
def test_what_the_decoder_cannot_do_is_refused_by_name(
    make: Callable[..., Path], fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelLoadError, match=message) as caught:
        SafetensorsSource(make(fields))
    assert caught.value.file.endswith("config.json")


def test_a_window_that_begins_behind_the_last_layer_is_not_in_use(make: Callable[..., Path]) -> None:
    SafetensorsSource(make({"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 4})).check()


def test_a_tensor_the_decoder_does_not_know_is_named(make: Callable[..., Path]) -> None:
    source = SafetensorsSource(make(tensors={"model.layers.0.mlp.up_proj.bias": torch.ones(64)}))
    with pytest.raises(ModelLoadError, match=r"'model\.layers\.0\.mlp\.up_proj\.bias': the llama decoder has no use"):
        source.check()


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_missing_file_is_named(make: Callable[..., Path], name: str) -> None:
    folder = make()
    (folder / name).unlink()
    with pytest.raises(ModelLoadError, match=name.replace(".", r"\.")):
        SafetensorsSource(folder)


@pytest.mark.parametrize("content", ["", "{", "[]", '{"a": \udcff}'], ids=repr)
def test_a_malformed_config_is_named(make: Callable[..., Path], content: str) -> None:
    folder = make()
    (folder / "config.json").write_bytes(content.encode("utf-8", "surrogateescape"))
    with pytest.raises(ModelLoadError, match=r"config\.json: is not"):
        SafetensorsSource(folder)


def test_a_missing_tensor_is_named(make: Callable[..., Path]) -> None:
    source = SafetensorsSource(make(tensors={"model.layers.2.mlp.up_proj.weight": None}))
    with pytest.raises(ModelLoadError, match=r"'model\.layers\.2\.mlp\.up_proj\.weight': is missing"):
        source.check()
    with pytest.raises(ModelLoadError, match="is missing"):
        source.tensor("model.layers.2.mlp.up_proj.weight")


def test_untied_embeddings_need_an_output_matrix(make: Callable[..., Path]) -> None:
    with pytest.raises(ModelLoadError, match=r"'lm_head\.weight': is missing"):
        SafetensorsSource(make({"tie_word_embeddings": False})).check()


def test_a_mis_shaped_tensor_is_named_with_both_shapes(make: Callable[..., Path]) -> None:
    source = SafetensorsSource(make(tensors={"model.norm.weight": torch.ones(33)}))
    with pytest.raises(
        ModelLoadError, match=r"model\.safetensors: tensor 'model\.norm\.weight': has shape \[33\], must"
    ):
        source.check()


@pytest.mark.parametrize("dtype", [torch.float64, torch.int8, torch.float8_e4m3fn])
def test_a_tensor_of_a_type_we_do_not_read_is_named(make: Callable[..., Path], dtype: torch.dtype) -> None:
    source = SafetensorsSource(make(tensors={"model.norm.weight": torch.ones(32).to(dtype)}))
    with pytest.raises(ModelLoadError, match=r"'model\.norm\.weight': type \w+ is not supported"):
        source.check()


def test_a_file_cut_off_in_its_data_names_a_tensor(make: Callable[..., Path]) -> None:
    path = make() / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-5000])
    source = SafetensorsSource(path.parent)
    with pytest.raises(ModelLoadError, match="the file is truncated") as caught:
        source.check()
    assert caught.value.tensor in required_tensors(source.config)
    assert caught.value.file == str(path)
    with pytest.raises(ModelLoadError, match=r"tensor 'model\.norm\.weight': cannot be read"):
        source.tensor("model.norm.weight")


@pytest.mark.parametrize("length", [0, 7, 8, 100])
def test_a_file_cut_off_in_its_header_is_refused(make: Callable[..., Path], length: int) -> None:
    path = make() / "model.safetensors"
    path.write_bytes(path.read_bytes()[:length])
    with pytest.raises(ModelLoadError, match=r"model\.safetensors: the file is truncated"):
        SafetensorsSource(path.parent)


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (b"not JSON", "its header is not JSON"),
        (b"[]      ", "its header is not a JSON object"),
        (b'{"t": {"dtype": "F32"}}', "tensor 't': its entry in the header is damaged"),
        (b'{"t": {"dtype": "F32", "shape": [1], "data_offsets": [0]}}', "tensor 't': its entry in the header"),
    ],
)
def test_a_damaged_header_is_refused(make: Callable[..., Path], header: bytes, message: str) -> None:
    path = make() / "model.safetensors"
    path.write_bytes(struct.pack("<Q", len(header)) + header)
    with pytest.raises(ModelLoadError, match=message):
        SafetensorsSource(path.parent)


def test_offsets_that_contradict_the_shape_are_refused_before_loading(make: Callable[..., Path]) -> None:
    path = make() / "model.safetensors"
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    begin, end = header["model.norm.weight"]["data_offsets"]
    header["model.norm.weight"]["data_offsets"] = [begin, end - 4]
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])
    with pytest.raises(ModelLoadError, match=r"model\.safetensors: is damaged"):
        SafetensorsSource(path.parent).check()


@pytest.fixture
def sharded(make: Callable[..., Path]) -> Path:
    folder = make()
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(weights)
    files = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, members in files.items():
        save_file({name: weights[name] for name in members}, folder / file)
    weight_map = {name: file for file, members in files.items() for name in members}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


def test_a_missing_shard_is_named(sharded: Path) -> None:
    SafetensorsSource(sharded).check()
    (sharded / "b.safetensors").unlink()
    with pytest.raises(ModelLoadError, match=r"b\.safetensors: is missing"):
        SafetensorsSource(sharded)


def test_a_tensor_that_its_shard_lacks_is_named(sharded: Path) -> None:
    save_file({"other": torch.ones(1)}, sharded / "b.safetensors")
    with pytest.raises(ModelLoadError, match=r"b\.safetensors: tensor '.*': is missing, though the index names it"):
        SafetensorsSource(sharded)


@pytest.mark.parametrize("file_name", ["../outside.safetensors", "/etc/hostname", 5])
def test_an_index_cannot_name_a_file_outside_its_folder(sharded: Path, file_name: Any) -> None:
    index = sharded / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"model.norm.weight": file_name}}))
    with pytest.raises(ModelLoadError, match="names the file"):
        SafetensorsSource(sharded)
