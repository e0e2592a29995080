"""Does a configuration fit together? Asked by both sources, so that the decoder need not. Torch-free."""

from __future__ import annotations

from pathlib import Path

from engine.errors import ModelLoadError
from engine.models.config import ModelConfig


def consistent(config: ModelConfig, path: Path) -> ModelConfig:
    """The configuration itself. Raises `ModelLoadError` if its numbers contradict each other."""
    problem = None
    if config.num_heads % config.num_kv_heads:
        problem = f"{config.num_heads} heads cannot share {config.num_kv_heads} key-value heads evenly"
    elif config.head_dim % 2:
        problem = f"a head of {config.head_dim} dimensions cannot be rotated in pairs"
    elif any(token_id >= config.vocab_size for token_id in config.eos_token_ids):
        problem = f"end tokens {list(config.eos_token_ids)} lie outside the vocabulary of {config.vocab_size}"
    if problem is not None:
        raise ModelLoadError(problem, file=str(path))
    return config
