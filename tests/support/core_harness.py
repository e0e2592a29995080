"""Drives an `EngineCore` over a `FakeRunner` and holds all it tells against what each request would say alone."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from fake_runner import EOS, STEP_US, FakeRunner, reference_tokens
from msgspec import structs

from engine.config import EngineConfig
from engine.core import EngineCore
from engine.messages import FinishReason, Output, PathNode, RequestClass, Submit
from engine.sampling_params import SamplingParams
from engine.sched.policy import Policy

ENGINE_ID = "engine-0"
PATH = (PathNode("org"), PathNode("team", 2), PathNode("key"))


@dataclass
class Answer:
    """One choice: what was asked, and all that was told.

    Attributes:
        cap: its output cap as raised so far.
        is_final: a cap that was not higher has been the last word.
        ended_us: when it must have ended, if something from outside ended it.
    """

    message: Submit
    seed: int
    arrival_us: int
    cap: int
    is_final: bool = False
    is_held: bool = False
    ended_us: int | None = None
    outputs: list[Output] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)

    @property
    def finish(self) -> FinishReason | None:
        return self.outputs[-1].finish if self.outputs else None

    @property
    def stops(self) -> set[int]:
        sampling = self.message.sampling
        return {*sampling.stop_token_ids, *(() if sampling.ignore_eos else (EOS,))}


class CoreHarness:
    """One core, one fake runner, a clock that moves by STEP_US a step. Books are checked after every step."""

    def __init__(
        self,
        *,
        num_blocks: int = 64,
        max_sequences: int = 8,
        max_step_tokens: int = 64,
        window: int = 512,
        eos_every: int = 0,
        plan_ahead: bool = False,
        prefix_cache: bool = True,
        policy: str | Policy = "fcfs",
    ) -> None:
        self.now_us = 5_000_000
        self.eos_every = eos_every
        self.window = window
        self.plan_ahead = plan_ahead
        self.runner = FakeRunner(
            num_blocks,
            max_sequences=max_sequences,
            max_step_tokens=max_step_tokens,
            eos_every=eos_every,
            on_wait=self._pass_step_time,
        )
        self.core = EngineCore(
            EngineConfig(
                model=Path("no-model"),
                policy=policy if isinstance(policy, str) else "fcfs",
                max_sequences=max_sequences,
                max_step_tokens=max_step_tokens,
                plan_ahead=plan_ahead,
                prefix_cache=prefix_cache,
            ),
            self.runner,
            max_model_len=window,
            eos_token_ids=(EOS,),
            clock=lambda: self.now_us,
            policy=None if isinstance(policy, str) else policy,
            draw_seed=self._draw_seed,
        )
        self.answers: dict[tuple[str, int], Answer] = {}
        self.num_steps = 0
        self._num_seeds = 0

    def submit(
        self,
        prompt: list[int],
        output_cap: int = 8,
        *,
        request_id: str | None = None,
        seed: int | None = None,
        num_choices: int = 1,
        cache_salt: str = "",
        hold_at_cap: bool = False,
        deadline_ms: int | None = None,
        path: tuple[PathNode, ...] = PATH,
        request_class: RequestClass = "interactive",
        **sampling: object,
    ) -> str:
        """Returns the request id. Raises `RequestRejected` as the core does."""
        if request_id is None:
            request_id = f"r{len(self.answers)}"
        message = Submit(
            engine_id=ENGINE_ID,
            request_id=request_id,
            token_ids=list(prompt),
            sampling=SamplingParams(seed=seed, **sampling),
            path=path,
            request_class=request_class,
            output_cap=output_cap,
            cache_salt=cache_salt,
            num_choices=num_choices,
            hold_at_cap=hold_at_cap,
            deadline_ms=deadline_ms,
        )
        self.core.submit(message)
        seed = seed if seed is not None else self._num_seeds
        for choice in range(num_choices):
            self.answers[request_id, choice] = Answer(message, seed, self.now_us, output_cap)
        return request_id

    def abort(self, request_id: str) -> None:
        self.core.abort(request_id)
        for answer in self._of(request_id):
            answer.ended_us = self.now_us

    def raise_cap(self, request_id: str, output_cap: int) -> None:
        self.core.raise_cap(request_id, output_cap)
        for answer in self._of(request_id):
            if not answer.message.hold_at_cap or answer.is_final:
                continue
            if output_cap > answer.cap:
                answer.cap, answer.is_held = output_cap, False
            else:
                answer.is_final = True
                answer.ended_us = self.now_us if answer.is_held else None

    def step(self) -> list[Output]:
        self.num_steps += 1
        before_us = self.now_us
        outputs = self.core.step()
        for output in outputs:
            self._record(output, before_us)
        self.core.check_integrity()
        return outputs

    def drain(self, most_steps: int = 2000) -> None:
        """Step until nothing is left to do but to wait for `raise_cap`."""
        last = self.num_steps + most_steps
        while self.core.has_work:
            assert self.num_steps < last, f"not done after {most_steps} steps"
            self.step()

    def finish(self, request_id: str, choice: int = 0) -> FinishReason | None:
        return self.answers[request_id, choice].finish

    def tokens(self, request_id: str, choice: int = 0) -> list[int]:
        return self.answers[request_id, choice].token_ids

    def last(self, request_id: str, choice: int = 0) -> Output:
        return self.answers[request_id, choice].outputs[-1]

    def alone(self, answer: Answer, choice: int) -> list[int]:
        """What the choice would say alone: up to its first stop, and no more than cap, window and pool allow."""
        message = answer.message
        limit = min(self.window, self.core.kv_capacity_tokens) - len(message.token_ids)
        sampling = structs.replace(message.sampling, seed=answer.seed)
        tokens = reference_tokens(message.token_ids, sampling, choice, min(limit, answer.cap), self.eos_every)
        for i, token_id in enumerate(tokens):
            if token_id in answer.stops:
                return tokens[: i + 1]
        return tokens

    def check_ended(self) -> None:
        """Every request has ended rightly, the totals are the sums of what was told, and nothing is left behind."""
        for (_, choice), answer in self.answers.items():
            self._check_answer(answer, choice)
        stats = self.core.stats()
        lasts = [answer.outputs[-1] for answer in self.answers.values()]
        assert (stats.num_running, stats.num_waiting) == (0, 0)
        assert stats.num_free_blocks + stats.num_cached_blocks == stats.num_blocks == self.runner.num_blocks
        num_useful = stats.num_prefill_tokens + stats.num_decode_tokens
        num_told = sum(o.num_computed_tokens for o in lasts)
        # Less was computed than told only where a preempted request came back to find what others had computed.
        assert num_useful == num_told or (num_useful < num_told and stats.num_preemptions)
        assert stats.num_cached_tokens == sum(o.num_cached_tokens for o in lasts)
        assert stats.num_steps == len(self.runner.plans)
        assert stats.busy_us == STEP_US * len(self.runner.plans)
        assert stats.busy_us == sum(o.timings.engine_us for o in lasts if o.timings) + stats.unshared_us
        assert stats.unshared_us == 0 or self.plan_ahead
        assert not self.core.has_work
        assert not self.core._live
        assert not self.core._held
        self.core.check_integrity()

    def _check_answer(self, answer: Answer, choice: int) -> None:
        last, alone = answer.outputs[-1], self.alone(answer, choice)
        num_prompt_tokens = len(answer.message.token_ids)
        num_processed = last.num_cached_tokens + last.num_computed_tokens
        assert last.finish is not None
        assert last.num_prompt_tokens == num_prompt_tokens
        assert last.num_cached_tokens < num_prompt_tokens
        if last.finish in ("stop", "length"):
            assert answer.token_ids == alone
            assert num_processed == num_prompt_tokens + len(alone) - 1  # the last token's own KV is never needed
        else:
            assert answer.token_ids == alone[: len(answer.token_ids)]
            assert not last.token_ids
            assert num_processed <= num_prompt_tokens + len(answer.token_ids)
        is_stopped = bool(answer.token_ids) and answer.token_ids[-1] in answer.stops
        assert (last.finish == "stop") == is_stopped
        assert last.stop_token_id == (answer.token_ids[-1] if is_stopped else None)

    def _record(self, output: Output, before_us: int) -> None:
        answer = self.answers[output.request_id, output.choice]
        assert answer.finish is None, "news after the end"
        assert not answer.is_held or output.finish, "news of a choice that is held"
        if answer.outputs:
            assert output.num_computed_tokens >= answer.outputs[-1].num_computed_tokens
            assert output.num_cached_tokens == answer.outputs[-1].num_cached_tokens
        answer.outputs.append(output)
        answer.token_ids.extend(output.token_ids)
        assert output.num_delivered_tokens == len(answer.token_ids)
        assert (output.logprobs is not None) == (
            answer.message.sampling.num_logprobs is not None and bool(output.token_ids)
        )
        if output.held_at_cap:
            assert answer.message.hold_at_cap
            assert len(answer.token_ids) == answer.cap
            answer.is_held = True
        assert (output.timings is not None) == (output.finish is not None)
        if output.timings is not None:
            parts = output.timings
            ended_us = (
                self.now_us if output.token_ids else before_us if output.finish == "deadline" else answer.ended_us
            )
            assert ended_us is not None
            assert min(parts.queue_us, parts.prefill_us, parts.decode_us, parts.preempted_us, parts.parked_us) >= 0
            assert parts.queue_us + parts.prefill_us + parts.decode_us + parts.preempted_us + parts.parked_us == (
                ended_us - answer.arrival_us
            )

    def _of(self, request_id: str) -> list[Answer]:
        return [
            a
            for (known, _), a in self.answers.items()
            if known == request_id and a.finish is None and a.ended_us is None
        ]

    def _pass_step_time(self) -> None:
        self.now_us += STEP_US

    def _draw_seed(self) -> int:
        self._num_seeds += 1
        return self._num_seeds
