"""The engine's configuration: one frozen record, read once, passed down."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from engine.errors import ConfigError

BLOCK_TOKENS = 16
"""Tokens in one KV block; fixed, so that a block is one contiguous byte range over its layers."""

POLICIES = ("fair", "fcfs", "static")
DEVICES = ("cpu", "cuda")
DTYPES = ("auto", "bfloat16", "float32")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Settings of one engine process.

    Attributes:
        model: a folder of safetensors or a GGUF file.
        model_name: the name under which the model is served.
        device: ``cpu`` or ``cuda``.
        dtype: of weights and KV; ``auto`` is bfloat16.
        policy: who gets the next tokens; ``fair`` goes by weight, ``fcfs`` is arrival order, ``static`` whole batches
            (for comparison only).
        max_sequences: sequence slots: requests that may be resident in one step.
        max_step_tokens: token budget of a step (prefill and decode together).
        max_model_len: the window; None takes the model's own.
        kv_cache_bytes: size of the device's KV pool.
        host_kv_bytes: size of the host tier; 0 has none.
        record: a file that events, plans and results are written to, to be replayed; None writes none.
        cost_model: a file of `evenhand bench calibrate` that says what steps cost here; None takes built-in figures.
        engine_id: name of this engine in messages.
        plan_ahead: plan step n+1 before step n is applied; None does so on CUDA only.
        num_threads: CPU threads of torch; 0 lets torch choose.
        prefix_cache: keep computed blocks for requests that begin alike.
    """

    model: Path
    model_name: str = "smollm2-135m-instruct"
    device: str = "cpu"
    dtype: str = "auto"
    policy: str = "fair"
    max_sequences: int = 64
    max_step_tokens: int = 512
    max_model_len: int | None = None
    kv_cache_bytes: int = 2 << 30
    host_kv_bytes: int = 0
    record: Path | None = None
    cost_model: Path | None = None
    engine_id: str = "engine-0"
    plan_ahead: bool | None = None
    num_threads: int = 0
    prefix_cache: bool = True
    block_tokens: int = field(default=BLOCK_TOKENS, init=False)

    def __post_init__(self) -> None:
        """Raise `ConfigError` for a value that cannot work."""
        _one_of("device", self.device, DEVICES)
        _one_of("dtype", self.dtype, DTYPES)
        _one_of("policy", self.policy, POLICIES)
        for name in ("max_sequences", "max_step_tokens", "kv_cache_bytes"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.max_model_len is not None and self.max_model_len < 2:
            raise ConfigError(f"max_model_len must be at least 2, not {self.max_model_len}")
        if self.host_kv_bytes < 0 or self.num_threads < 0:
            raise ConfigError("host_kv_bytes and num_threads must be 0 or more")

    @property
    def plans_ahead(self) -> bool:
        return self.device != "cpu" if self.plan_ahead is None else self.plan_ahead


def _one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ConfigError(f"{name} must be one of {', '.join(allowed)}, not '{value}'")
