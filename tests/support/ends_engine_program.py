"""An engine process without a model, whose requests end as they ask: ``ends_engine_program.py ENDPOINT STEP_MS``.

Like `scripted_engine_program`, but a request's seed says how it ends (`endings`), and deadlines pass.
"""

from __future__ import annotations

import logging
import sys
import time

import msgspec
from endings import EOS, Ending, plot_of
from scripted_core import ScriptedCore
from scripted_engine_program import FIRST_TOKEN, MODEL

from engine.carriers.zeromq_server import ZeroMQServer
from engine.errors import RequestRejected
from engine.messages import Output, Ready, Submit
from engine.process import new_incarnation, serve


class EndsCore(ScriptedCore):
    """A `ScriptedCore` that reads plots."""

    def __init__(self, step_s: float, first_token: int) -> None:
        super().__init__(step_s, first_token)
        self._deadlines: dict[str, float] = {}

    @property
    def has_work(self) -> bool:
        if self._ending or self._deadlines:
            return True
        return any(not self._stands(request_id) for request_id in self._caps if request_id not in self._held)

    def submit(self, message: Submit) -> None:
        if plot_of(message.sampling.seed).ending is Ending.REJECT:
            raise RequestRejected("over_capacity", "the prompt is longer than the KV pool")
        # What the parent's own scripts go by is not ours to choose through the API.
        super().submit(msgspec.structs.replace(message, cache_salt=""))
        if message.deadline_ms is not None:
            self._deadlines[message.request_id] = time.monotonic() + message.deadline_ms / 1000

    def abort(self, request_id: str) -> None:
        if request_id in self._caps:  # a turn may bring two reasons for it
            super().abort(request_id)

    def step(self) -> list[Output]:
        now = time.monotonic()
        for request_id, deadline in list(self._deadlines.items()):
            if request_id not in self._caps:
                del self._deadlines[request_id]
            elif now >= deadline:
                self._ending.setdefault(request_id, "deadline")
        return super().step()

    def _stands(self, request_id: str) -> bool:
        plot = plot_of(self.submitted[request_id].sampling.seed)
        return plot.ending is Ending.STALL and self._produced[request_id, 0] >= plot.after

    def _advance(self, request_id: str, message: Submit) -> list[Output]:
        plot, produced = plot_of(message.sampling.seed), self._produced[request_id, 0]
        if self._stands(request_id):
            return []
        if plot.ending is Ending.FAIL and produced >= plot.after:
            return self._end(request_id, "error")
        if plot.ending is Ending.STOP and produced + 1 >= plot.after:
            return self._stop(request_id, message)
        return super()._advance(request_id, message)

    def _stop(self, request_id: str, message: Submit) -> list[Output]:
        del self._caps[request_id]
        outputs = []
        for choice in range(message.num_choices):
            self._produced[request_id, choice] += 1
            output = self._output(request_id, choice, (EOS,), "stop")
            outputs.append(msgspec.structs.replace(output, stop_token_id=EOS))
        return outputs

    def _output(self, request_id: str, choice: int, token_ids: tuple[int, ...], finish: object) -> Output:
        output = super()._output(request_id, choice, token_ids, finish)  # type: ignore[arg-type]
        cached = plot_of(self.submitted[request_id].sampling.seed).cached
        return msgspec.structs.replace(output, num_cached_tokens=min(cached, output.num_prompt_tokens))


def main(endpoint: str, step_ms: float) -> int:
    logging.basicConfig(level=logging.INFO)
    card = Ready(
        engine_id="engine-0",
        model=MODEL,
        max_model_len=8192,
        vocab_size=49152,
        eos_token_ids=(EOS,),
        kv_capacity_tokens=1 << 20,
        max_sequences=1024,
        incarnation=new_incarnation(),
    )
    return serve(EndsCore(step_ms / 1000, FIRST_TOKEN), ZeroMQServer(endpoint), card)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], float(sys.argv[2])))
