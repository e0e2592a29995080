"""The lines of a recording: a header, then one JSON line for each thing that happened, in the order it happened.

    header                          what the engine was
    told    message, clock, seed    a message that the core took in
    planned clock, plan             a plan, before it is computed
    stepped clock, result           the end of a call of `step`; the plans it made stand in the lines before

`clock` is every time that the core read since the line before, in microseconds of the engine's own clock. Questions
to the core, and requests refused at the door, change nothing and are left out; so are log probabilities, on which no
plan depends.

Fields are only ever added, with a default; anything else is a new `VERSION`.
"""

from __future__ import annotations

from typing import Final

import msgspec

from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.messages import Abort, ChargeExternal, RaiseCap, SetWeight, Submit
from engine.runner.port import Runner
from engine.sched.cost import CostModel
from engine.sched.plan import Chunk, NewRow, StepPlan, StepResult

VERSION: Final = 1
_MOST = 100_000_000

Message = Submit | Abort | RaiseCap | SetWeight | ChargeExternal


class Header(msgspec.Struct, frozen=True, kw_only=True):
    """What plans depend on beside the events.

    Attributes:
        recording: the version of the format.
        model: its name, for people.
        cost: what the policy was told that steps cost.
    """

    recording: int = VERSION
    model: str
    engine_id: str
    policy: str
    max_sequences: int
    max_step_tokens: int
    num_blocks: int
    block_tokens: int
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    prefix_cache: bool
    plans_ahead: bool
    cost: CostModel

    def __post_init__(self) -> None:
        """Raises `ConfigError` for figures that no engine has, before anything is made of that size."""
        for name in ("max_sequences", "max_step_tokens", "num_blocks", "block_tokens", "max_model_len", "vocab_size"):
            if getattr(self, name) < 1:
                raise ConfigError(f"recording: {name} must be at least 1")
        for name in ("max_sequences", "num_blocks"):
            if getattr(self, name) > _MOST:
                raise ConfigError(f"recording: {name} must be {_MOST} at most")

    @classmethod
    def of(
        cls,
        config: EngineConfig,
        runner: Runner,
        *,
        max_model_len: int,
        eos_token_ids: tuple[int, ...],
        cost: CostModel,
    ) -> Header:
        return cls(
            model=config.model_name,
            engine_id=config.engine_id,
            policy=config.policy,
            max_sequences=config.max_sequences,
            max_step_tokens=config.max_step_tokens,
            num_blocks=runner.num_blocks,
            block_tokens=config.block_tokens,
            max_model_len=max_model_len,
            vocab_size=runner.vocab_size,
            eos_token_ids=eos_token_ids,
            prefix_cache=config.prefix_cache,
            plans_ahead=config.plans_ahead,
            cost=cost,
        )


class PackedPlan(msgspec.Struct, frozen=True, omit_defaults=True):
    """A `StepPlan` in a quarter of the space: a chunk is (row, start, num_tokens, samples, block ids ...)."""

    step_id: int
    chunks: tuple[tuple[int, ...], ...]
    new_rows: tuple[NewRow, ...] = ()

    @classmethod
    def of(cls, plan: StepPlan) -> PackedPlan:
        chunks = [(c.row, c.start, c.num_tokens, int(c.samples), *c.new_block_ids) for c in plan.chunks]
        return cls(plan.step_id, tuple(chunks), plan.new_rows)

    def unpacked(self) -> StepPlan:
        """Raises `ValueError` if this was never packed."""
        return StepPlan(
            step_id=self.step_id,
            new_rows=self.new_rows,
            chunks=tuple(
                Chunk(
                    row=row, start=start, num_tokens=num_tokens, new_block_ids=tuple(block_ids), samples=bool(samples)
                )
                for row, start, num_tokens, samples, *block_ids in self.chunks
            ),
        )


class PackedResult(msgspec.Struct, frozen=True):
    """A `StepResult` without what its plan says already: one token for every chunk that samples."""

    token_ids: tuple[int, ...]
    elapsed_us: int

    @classmethod
    def of(cls, result: StepResult) -> PackedResult:
        return cls(result.token_ids, result.elapsed_us)

    def unpacked(self, plan: StepPlan) -> StepResult:
        """The result of this plan."""
        return StepResult(
            step_id=plan.step_id,
            rows=tuple(chunk.row for chunk in plan.chunks if chunk.samples),
            token_ids=self.token_ids,
            logprobs=(None,) * len(self.token_ids),
            elapsed_us=self.elapsed_us,
        )


class Told(msgspec.Struct, frozen=True, kw_only=True, tag="told", omit_defaults=True):
    """
    Attributes:
        seed: what was drawn for a request without one.
        error: what the core raised: it has failed.
    """

    message: Message
    clock: tuple[int, ...] = ()
    seed: int | None = None
    error: str = ""


class Planned(msgspec.Struct, frozen=True, kw_only=True, tag="planned", omit_defaults=True):
    plan: PackedPlan
    clock: tuple[int, ...] = ()


class Stepped(msgspec.Struct, frozen=True, kw_only=True, tag="stepped", omit_defaults=True):
    """
    Attributes:
        result: of the oldest plan without one; None if no plan was in flight, or if computing it failed.
        error: what the core or the runner raised: the engine has failed.
    """

    clock: tuple[int, ...] = ()
    result: PackedResult | None = None
    error: str = ""


Line = Told | Planned | Stepped


def error_text(error: BaseException) -> str:
    """As it stands in a line."""
    return f"{type(error).__name__}: {error}"
