"""An engine process with real core and fair policy but no model: ``fair_engine_program.py ENDPOINT SLOTS``.

It says that it serves SmolLM2-135M-Instruct, so that a gateway's tokenizer reads its tokens. A step takes as long as
the cost model says.
"""

from __future__ import annotations

import logging
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from engine.carriers.zeromq_server import ZeroMQServer
from engine.config import EngineConfig
from engine.core import EngineCore
from engine.messages import Ready
from engine.process import new_incarnation, serve
from engine.sched.cost import PROFILES
from engine.sched.plan import StepPlan, StepResult

MODEL = "smollm2-135m-instruct"
TOKEN = 1000
"""The only one that it makes; below are special tokens."""
WINDOW = 8192
COST = PROFILES["cpu"]


@dataclass
class _Pending:
    plan: StepPlan
    num_prompt_tokens: dict[int, int]

    def wait(self) -> StepResult:
        chunks = self.plan.chunks
        costs = [COST.marginal_us(c.start, c.start + c.num_tokens, self.num_prompt_tokens[c.row]) for c in chunks]
        elapsed_us = COST.step_us(costs)
        time.sleep(elapsed_us / 1e6)  # a step takes time: this is the engine's work, nobody waits for it
        rows = tuple(chunk.row for chunk in chunks if chunk.samples)
        return StepResult(
            step_id=self.plan.step_id,
            rows=rows,
            token_ids=(TOKEN,) * len(rows),
            logprobs=(None,) * len(rows),
            elapsed_us=elapsed_us,
        )


class TimedRunner:
    """A `Runner` that computes nothing and takes its time over it."""

    vocab_size = 49152
    num_blocks = 1 << 16

    def __init__(self) -> None:
        self._num_prompt_tokens: dict[int, int] = {}

    def submit(self, plan: StepPlan) -> _Pending:
        self._num_prompt_tokens.update((new.row, new.num_prompt_tokens) for new in plan.new_rows)
        return _Pending(plan, self._num_prompt_tokens)

    def close(self) -> None:
        """It holds nothing."""


def main(endpoint: str, num_slots: int) -> int:
    logging.basicConfig(level=logging.INFO)
    config = EngineConfig(model=Path("none"), policy="fair", max_sequences=num_slots)
    core = EngineCore(
        config,
        TimedRunner(),
        max_model_len=WINDOW,
        eos_token_ids=(2,),
        clock=lambda: time.monotonic_ns() // 1000,
    )
    card = Ready(
        engine_id=config.engine_id,
        model=MODEL,
        max_model_len=WINDOW,
        vocab_size=TimedRunner.vocab_size,
        eos_token_ids=(2,),
        kv_capacity_tokens=core.kv_capacity_tokens,
        max_sequences=num_slots,
        incarnation=new_incarnation(),
    )
    return serve(core, ZeroMQServer(endpoint), card)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2])))
