"""The decoder against transformers: tiny random models of every architecture, and SmolLM2 in bfloat16."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import transformers
from torch import Tensor

from engine.layers.decoder import Decoder
from engine.models.config import required_tensors
from engine.models.registry import open_source
from kernels.dispatch import select

BLOCK = 16
TINY = {
    "vocab_size": 211,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
MODELS = {
    "llama": ("Llama", {}),
    "llama-tied": ("Llama", {"tie_word_embeddings": True}),
    "llama-biased": ("Llama", {"attention_bias": True}),
    "llama-head-dim": ("Llama", {"head_dim": 16, "num_attention_heads": 4, "num_key_value_heads": 1}),
    "llama-3.1-rope": ("Llama", {"rope_parameters": LLAMA3}),
    "llama-linear-rope": (
        "Llama",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}},
    ),
    "smollm": ("Llama", {"tie_word_embeddings": True, "num_attention_heads": 3, "num_key_value_heads": 1}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {"head_dim": 24}),
    "smollm3": ("SmolLM3", {"no_rope_layers": [1, 0, 1], "use_sliding_window": False}),
}


@dataclass(frozen=True)
class Loaded:
    """A decoder with a pool of its own, driven chunk by chunk."""

    decoder: Decoder
    pool: Tensor

    @classmethod
    def of(cls, path: Path, dtype: torch.dtype, num_blocks: int = 40) -> Loaded:
        source = open_source(path)
        source.check()
        c = source.config
        pool = torch.zeros(num_blocks, c.num_layers, 2, c.num_kv_heads, BLOCK, c.head_dim, dtype=dtype)
        with torch.inference_mode():
            return cls(Decoder(source, select("cpu"), dtype, 512), pool)

    @torch.inference_mode()
    def logits(self, ids: list[int], table: list[int], start: int, chunk: int) -> Tensor:
        """Logits [len(ids) - start, vocab], computed chunk tokens at a time; KV before start is there already."""
        kernels, out = self.decoder.kernels, []
        for at in range(start, len(ids), chunk):
            num = min(chunk, len(ids) - at)
            rows = kernels.padded_rows(num, self.decoder.dtype)
            tokens, positions = torch.zeros(rows, dtype=torch.int64), torch.zeros(rows, dtype=torch.int64)
            tokens[:num], positions[:num] = torch.tensor(ids[at : at + num]), torch.arange(at, at + num)
            blocks = torch.tensor([table[p // BLOCK] for p in range(at, at + num)])
            index = kernels.plan_kv_write(self.pool, blocks, positions[:num] % BLOCK)
            plan = kernels.plan_attention(self.pool, [(at, num, table)], rows, kernels.workspace())
            out.append(self.decoder.forward(tokens, positions, self.pool, index, plan, torch.arange(rows))[:num])
        return torch.cat(out)


def _save_tiny(kind: str, overrides: dict[str, object], folder: Path) -> torch.nn.Module:
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**{**TINY, **overrides})
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # Fresh models have unit norms and zero biases, which would hide a mistake in either.
            spread = 0.3 if "norm" in name or "bias" in name else 0.15
            parameter.copy_(torch.randn_like(parameter) * spread + (1.0 if "norm" in name else 0.0))
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize("name", MODELS)
def test_tiny_models_agree_with_transformers_in_every_logit(name: str, tmp_path: Path) -> None:
    model = _save_tiny(*MODELS[name], tmp_path)
    ids = torch.randint(0, TINY["vocab_size"], (300,), generator=torch.Generator().manual_seed(1)).tolist()
    with torch.no_grad():
        expected = model(torch.tensor([ids])).logits[0]
    loaded = Loaded.of(tmp_path, torch.float32)
    first, second = list(range(5, 24)), [*range(5, 13), *range(24, 35)]

    one_shot = loaded.logits(ids, first, 0, len(ids))
    in_sevens = loaded.logits(ids, list(range(20, 39)), 0, 7)
    with_prefix_hit = loaded.logits(ids, second, 8 * BLOCK, len(ids))

    torch.testing.assert_close(one_shot, expected, atol=1e-3, rtol=0)
    torch.testing.assert_close(in_sevens, expected, atol=1e-3, rtol=0)
    torch.testing.assert_close(with_prefix_hit, expected[8 * BLOCK :], atol=1e-3, rtol=0)
    assert expected.std() > 0.05, "flat logits would agree with anything"


PROMPTS = [
    "What is the capital of France?",
    "Write a short poem about the sea.",
    "Explain recursion to a child.",
    "List three primary colors.",
    "Who wrote Hamlet, and when?",
    "Translate 'good morning' into Spanish.",
    "def fibonacci(n):",
    "Summarize the water cycle in two sentences.",
    "What is 17 plus 25?",
    "Name a famous painter and one of their works.",
    "Once upon a time, in a village by the mountains,",
    "Give me a recipe for pancakes.",
    "Why is the sky blue?",
    "The three laws of thermodynamics are",
    "How do I sort a list in Python?",
    "What are the benefits of regular exercise?",
    "Describe a robot that learns to paint.",
    "SELECT name FROM users WHERE",
    "Compare cats and dogs as pets.",
    "What should I see in Rome in one day?",
]


@pytest.mark.model
@pytest.mark.slow
def test_smollm2_in_bfloat16_stays_within_the_top_five_of_transformers(smollm2_path: Path) -> None:
    """Greedy, 20 prompts, 64 tokens; at the first difference each side's token is in the other's top five."""
    from engine.text.assets import load_text

    source = open_source(smollm2_path)
    c = source.config
    config = transformers.LlamaConfig(
        vocab_size=c.vocab_size,
        hidden_size=c.hidden_size,
        intermediate_size=c.intermediate_size,
        num_hidden_layers=c.num_layers,
        num_attention_heads=c.num_heads,
        num_key_value_heads=c.num_kv_heads,
        rms_norm_eps=c.rms_norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": c.rope_theta},
        max_position_embeddings=c.max_position,
        tie_word_embeddings=True,
    )
    model = transformers.LlamaForCausalLM(config).to(torch.bfloat16).eval()
    weights = {name: source.tensor(name).bfloat16() for name in required_tensors(c)}
    assert model.load_state_dict(weights, strict=False).missing_keys == ["lm_head.weight"]
    model.tie_weights()
    text = load_text(smollm2_path)
    loaded = Loaded.of(smollm2_path, torch.bfloat16)
    num_same = 0
    for prompt in PROMPTS:
        ids = text.tokenizer.encode(text.chat_template.render([{"role": "user", "content": prompt}]))
        num_same += _follow(loaded, model, ids, 64)
    assert num_same > len(PROMPTS) * 8, "agreement this short would mean that something is wrong"


def _follow(loaded: Loaded, model: torch.nn.Module, ids: list[int], num_tokens: int) -> int:
    """Generate greedily on both sides until they differ; returns how many tokens were the same."""
    table, known = list(range(40)), list(ids)
    ours = loaded.logits(known, table, 0, len(known))[-1]
    with torch.no_grad():
        state = model(torch.tensor([known]), use_cache=True)
    for step in range(num_tokens):
        theirs = state.logits[0, -1].float()
        mine, other = int(ours.argmax()), int(theirs.argmax())
        if mine != other:
            assert other in ours.topk(5).indices.tolist(), f"token {step}"
            assert mine in theirs.topk(5).indices.tolist(), f"token {step}"
            return step
        known.append(mine)
        ours = loaded.logits(known, table, len(known) - 1, 1)[-1]
        with torch.no_grad():
            state = model(torch.tensor([[mine]]), cache=state.past_key_values, use_cache=True)
    return num_tokens
