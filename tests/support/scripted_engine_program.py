"""An engine process without a model, behind the real protocol: ``scripted_engine_program.py ENDPOINT STEP_MS``.

It says that it serves SmolLM2-135M-Instruct, so that a gateway's tokenizer reads its tokens, and makes one token of
every running request in each step, up to its cap.
"""

from __future__ import annotations

import logging
import sys

from scripted_core import ScriptedCore

from engine.carriers.zeromq_server import ZeroMQServer
from engine.messages import Ready
from engine.process import new_incarnation, serve

MODEL = "smollm2-135m-instruct"
FIRST_TOKEN = 1000
"""Below are special tokens."""


def main(endpoint: str, step_ms: float) -> int:
    logging.basicConfig(level=logging.INFO)
    card = Ready(
        engine_id="engine-0",
        model=MODEL,
        max_model_len=8192,
        vocab_size=49152,
        eos_token_ids=(2,),
        kv_capacity_tokens=1 << 20,
        max_sequences=1024,
        incarnation=new_incarnation(),
    )
    return serve(ScriptedCore(step_ms / 1000, FIRST_TOKEN), ZeroMQServer(endpoint), card)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], float(sys.argv[2])))
