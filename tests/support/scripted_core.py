"""A core without a model, for tests of what is around a core: the server, the client, the process.

It stands in at the server's own port (`engine.server.Core`): token i of choice c is 1000 * c + i (and `first_token`
more, for a tokenizer that has to read them), one for each running choice and step. A request's cache_salt says what
becomes of it:

    ""         runs to its cap
    "uneven"   the same, but choice 0 ends with its first token
    "reject"   can never run
    "wait"     stays in the queue until it is aborted
    "crash"    makes the next step raise
    "block"    makes the next step stand still until `unblock`
"""

from __future__ import annotations

import threading
import time

import msgspec

from engine.errors import RequestRejected
from engine.messages import FinishReason, Output, Stats, Submit, Timings
from engine.standing import Standing

PATIENCE_S = 20.0


class ScriptedCore:
    """`engine.server.Core` without a model. What was told to it can be read from its attributes."""

    def __init__(self, step_s: float = 0.002, first_token: int = 0) -> None:
        self.submitted: dict[str, Submit] = {}
        self.aborted: list[str] = []
        self.weights: list[tuple[str, int]] = []
        self.charges: list[tuple[str, int]] = []
        self.num_checks = 0
        self.unblock = threading.Event()
        self._step_s = step_s
        self._first_token = first_token
        self._num_steps = 0
        self._caps: dict[str, int] = {}
        self._produced: dict[tuple[str, int], int] = {}
        self._held: set[str] = set()
        self._ending: dict[str, FinishReason] = {}

    @property
    def has_work(self) -> bool:
        runnable = (r for r in self._caps if self.submitted[r].cache_salt != "wait" and r not in self._held)
        return bool(self._ending) or any(runnable)

    def submit(self, message: Submit) -> None:
        if message.cache_salt == "reject":
            raise RequestRejected("over_capacity", "the prompt is longer than the KV pool")
        self.submitted[message.request_id] = message
        self._caps[message.request_id] = message.output_cap
        for choice in range(message.num_choices):
            self._produced[message.request_id, choice] = 0

    def abort(self, request_id: str) -> None:
        assert request_id in self._caps, f"abort of '{request_id}', which is not in flight"
        self.aborted.append(request_id)
        self._ending[request_id] = "abort"

    def raise_cap(self, request_id: str, output_cap: int) -> None:
        if output_cap == self._caps[request_id]:
            self._ending[request_id] = "length"
        self._caps[request_id] = output_cap
        self._held.discard(request_id)

    def set_weight(self, node_id: str, weight: int) -> None:
        self.weights.append((node_id, weight))

    def charge_external(self, node_id: str, cost_us: int) -> None:
        self.charges.append((node_id, cost_us))

    def stats(self) -> Stats:
        return Stats(engine_id="", num_running=len(self._caps), num_steps=self._num_steps)

    def standing(self, *request_ids: str) -> Standing:
        """Those that wait have all that came before them ahead, and have waited 1,000 us."""
        for request_id in request_ids:
            if request_id not in self._caps:
                continue
            message = self.submitted[request_id]
            waits = message.cache_salt == "wait"
            earlier = list(self._caps)[: list(self._caps).index(request_id)] if waits else []
            return Standing(
                team_id=message.path[1].id,
                request_class=message.request_class,
                phase="queue" if waits else "at_cap" if request_id in self._held else "decode",
                resource="slot" if waits else "",
                ahead={"interactive": len(earlier)} if earlier else {},
                ahead_of_team=tuple(earlier),
                expected_wait_us=2_500_000 if waits else 0,
                queue_us=1000,
            )
        return Standing()

    def check_integrity(self) -> None:
        self.num_checks += 1

    def step(self) -> list[Output]:
        self._num_steps += 1
        if self._step_s:
            time.sleep(self._step_s)  # a step takes time: this is the engine's work, nobody waits for it
        outputs = []
        for request_id in list(self._caps):
            message = self.submitted[request_id]
            if message.cache_salt == "crash":
                raise RuntimeError("scripted crash")
            if message.cache_salt == "block":
                self.unblock.wait(PATIENCE_S)
            if request_id in self._ending:
                outputs += self._end(request_id, self._ending.pop(request_id))
            elif message.cache_salt != "wait" and request_id not in self._held:
                outputs += self._advance(request_id, message)
        return outputs

    def _advance(self, request_id: str, message: Submit) -> list[Output]:
        outputs, cap = [], self._caps[request_id]
        for choice in range(message.num_choices):
            produced = self._produced[request_id, choice] = self._produced[request_id, choice] + 1
            if message.cache_salt == "uneven" and choice == 0:
                if produced == 1:
                    outputs.append(self._output(request_id, 0, (0,), "stop"))
                continue
            done = produced == cap and not message.hold_at_cap
            outputs.append(
                self._output(
                    request_id,
                    choice,
                    (self._first_token + 1000 * choice + produced - 1,),
                    "length" if done else None,
                )
            )
        if self._produced[request_id, 0] == cap:
            if message.hold_at_cap:
                self._held.add(request_id)
                outputs = [msgspec.structs.replace(output, held_at_cap=True) for output in outputs]
            else:
                del self._caps[request_id]
        return outputs

    def _end(self, request_id: str, finish: FinishReason) -> list[Output]:
        del self._caps[request_id]
        self._held.discard(request_id)
        uneven = self.submitted[request_id].cache_salt == "uneven"
        choices = range(1 if uneven else 0, self.submitted[request_id].num_choices)
        return [self._output(request_id, choice, (), finish) for choice in choices]

    def _output(self, request_id: str, choice: int, token_ids: tuple[int, ...], finish: FinishReason | None) -> Output:
        num_prompt, produced = len(self.submitted[request_id].token_ids), self._produced[request_id, choice]
        return Output(
            request_id=request_id,
            choice=choice,
            token_ids=token_ids,
            num_prompt_tokens=num_prompt,
            num_computed_tokens=num_prompt + produced,
            num_delivered_tokens=produced,
            finish=finish,
            timings=Timings(queue_us=1, prefill_us=2, decode_us=3, engine_us=produced) if finish else None,
        )
