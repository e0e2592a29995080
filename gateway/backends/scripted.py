"""Answers from a script: given text, cut as told, with waits and failures as told. For tests, demos and measurements.

Deterministic: a model is a script, a piece of text is a token, a prompt's tokens are its words. Every request is kept
with what became of it, so that a test can see an abort.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Self

import msgspec

from gateway.backends.choice_text import ChoiceText
from gateway.domain.catalog import ModelCard
from gateway.domain.events import ChoiceFinished, GenerationEvent, TokenChance, TokenLogprob
from gateway.domain.ids import RequestId
from gateway.domain.record import RequestInfo
from gateway.domain.request import Conversation, GenerationRequest, Prompt, Text
from gateway.domain.standing import LiveRequest
from gateway.domain.usage import EngineTimings, FinishReason, TokenUsage
from gateway.errors import ContextLengthExceeded, EngineDown, EvenhandError, ModelNotFound
from gateway.services.ports import Progress, Readiness

LOGPROB = -0.5
"""Of every scripted token; the alternatives are ever half as likely."""


class Say(msgspec.Struct, frozen=True):
    """One token of text, for one choice or for all of them."""

    text: str
    choice: int | None = None


class Pause(msgspec.Struct, frozen=True):
    """Take this long."""

    seconds: float


class Gate(msgspec.Struct, frozen=True):
    """Wait until a test opens the gate of this name."""

    name: str


class Fail(msgspec.Struct, frozen=True):
    """Iteration raises this here: an `EvenhandError` as an engine's end, anything else as a bug of ours."""

    error: Exception


Step = Say | Pause | Gate | Fail


class Script(msgspec.Struct, frozen=True, kw_only=True):
    """What a scripted model does with every request.

    Attributes:
        refuse: raised when a request is started.
        queue: requests wait in the queue until a test opens the gate of this name; nothing is computed for them before.
        num_cached_tokens: said to be found in the cache, for each prompt.
    """

    steps: tuple[Step, ...]
    finish: FinishReason = "stop"
    refuse: EvenhandError | None = None
    queue: str | None = None
    num_cached_tokens: int = 0

    @classmethod
    def saying(cls, *pieces: str, finish: FinishReason = "stop") -> Script:
        return cls(steps=tuple(Say(piece) for piece in pieces), finish=finish)


class ScriptedBackend:
    """Implements `gateway.services.ports.Backend`.

    Args:
        num_kept: how many of the last requests are remembered; None is all of them.

    Attributes:
        is_up: set it to False and requests are refused as if the engine were down.
        generations: the requests that were started, oldest first.
    """

    def __init__(
        self,
        scripts: Mapping[str, Script],
        *,
        window: int = 4096,
        num_kept: int | None = None,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._scripts = scripts
        self.window = window
        self._gates: dict[str, asyncio.Event] = {}
        self._changed = asyncio.Event()
        self._num_waiting = 0
        self.sleep = sleep
        self.is_up = True
        self.generations: deque[ScriptedGeneration] = deque(maxlen=num_kept)

    def cards(self) -> Sequence[ModelCard]:
        return [ModelCard(id=name, created=0, max_model_len=self.window) for name in self._scripts]

    def readiness(self) -> Readiness:
        return Readiness(self.is_up, "" if self.is_up else "the scripted engine is down")

    async def standing(self, request_id: RequestId) -> LiveRequest | None:
        """A request that has not ended is said to run."""
        if not self.is_up:
            raise EngineDown("The engine is not available right now. Please try again shortly.", retry_after_s=2)
        for generation in self.generations:
            if generation.info.request_id == request_id and not generation.ended:
                return LiveRequest(
                    request_id=request_id,
                    team_id=generation.info.principal.team_id,
                    request_class=generation.info.request_class,
                    status="running",
                    waiting_for=None,
                    ahead={},
                    ahead_of_team=(),
                    expected_wait_us=0,
                    timings=EngineTimings(),
                )
        return None

    async def prepare(self, request: GenerationRequest) -> ScriptedPrepared:
        script = self._scripts.get(request.model)
        if script is None:
            raise ModelNotFound(request.model)
        if not self.is_up:
            raise EngineDown("The engine is not available right now. Please try again shortly.", retry_after_s=2)
        for prompt in request.prompts:
            if num_tokens(prompt) >= self.window:
                raise ContextLengthExceeded(window=self.window, num_prompt_tokens=num_tokens(prompt))
        return ScriptedPrepared(self, script, request)

    def gate(self, name: str) -> asyncio.Event:
        """The gate of this name; set it to let requests through."""
        return self._gates.setdefault(name, asyncio.Event())

    def reset(self) -> None:
        """Forget every request and close every gate."""
        self.generations.clear()
        for gate in self._gates.values():
            gate.clear()

    def note_change(self) -> None:
        if self._num_waiting:
            self._changed.set()
            self._changed = asyncio.Event()

    async def wait_until(self, is_so: Callable[[], bool]) -> None:
        """Until something is so of the requests; looks again whenever one of them changes."""
        self._num_waiting += 1
        try:
            while not is_so():
                await self._changed.wait()
        finally:
            self._num_waiting -= 1


class ScriptedPrepared:
    """Implements `gateway.services.ports.Prepared`."""

    def __init__(self, backend: ScriptedBackend, script: Script, request: GenerationRequest) -> None:
        self.model = request.model
        self.prompt_lengths = [num_tokens(prompt) for prompt in request.prompts]
        self.num_prompt_tokens = sum(self.prompt_lengths)
        self.output_caps = [
            room if request.max_output_tokens is None else min(request.max_output_tokens, room)
            for room in (backend.window - length for length in self.prompt_lengths)
        ]
        self.num_parts = len(request.prompts)
        self.echo_texts = [_text(prompt) for prompt in request.prompts] if request.echo else []
        self._backend = backend
        self._script = script
        self._request = request

    def start(
        self, info: RequestInfo, output_caps: Sequence[int] | None = None, held_cap: int | None = None
    ) -> ScriptedGeneration:
        if self._script.refuse is not None:
            raise self._script.refuse
        caps = [
            cap
            for cap in (self.output_caps if output_caps is None else output_caps)
            for _ in range(self._request.num_choices)
        ]
        generation = ScriptedGeneration(
            self._backend, self._script, self._request, info, self.num_prompt_tokens, caps, held_cap
        )
        self._backend.generations.append(generation)
        self._backend.note_change()
        return generation


class ScriptedGeneration:
    """Implements `gateway.services.ports.Generation`.

    Attributes:
        num_told: events handed out so far.
        aborted: somebody stopped it before its end.
        ended: as the port says.
    """

    def __init__(
        self,
        backend: ScriptedBackend,
        script: Script,
        request: GenerationRequest,
        info: RequestInfo,
        num_prompt_tokens: int,
        caps: Sequence[int],
        held_cap: int | None,
    ) -> None:
        """
        Args:
            caps: most output tokens of each answer.
            held_cap: all of them wait there, until it is raised.
        """
        self._caps = caps
        self._held_cap = held_cap
        self._is_last_word = False
        self._raised = asyncio.Event()
        self._is_queued = script.queue is not None
        self._stop_waiting: Callable[[], object] = lambda: None
        self._call_held: Callable[[], None] | None = None
        self.request = request
        self.info = info
        self.num_told = 0
        self.aborted = False
        self.ended = False
        self._backend = backend
        self._script = script
        self._num_prompt_tokens = num_prompt_tokens
        self._choices = [ChoiceText(i, request.stop) for i in range(request.num_answers)]
        self._open = dict.fromkeys(range(request.num_answers))
        self._position = 0

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Sequence[GenerationEvent]:
        steps = self._script.steps
        if self._is_queued and self._script.queue is not None:
            await self._until(self._backend.gate(self._script.queue))
            self._is_queued = self.aborted
        while self._open:
            if self.aborted:
                raise EngineDown("The engine failed while it worked on this request.", retry_after_s=2)
            if (held := self._held()) is not None:
                events = await self._wait_at_cap(held)
                if events:
                    return self._told(events)
                continue
            step = steps[self._position] if self._position < len(steps) else None
            if isinstance(step, Say):
                await asyncio.sleep(0)  # a real engine is waited for, too
                self._position += 1
                events = self._said(step)
            else:
                events = await self._step(step)
            if events:
                return self._told(events)
        raise StopAsyncIteration

    def raise_cap(self, output_cap: int) -> None:
        if self._held_cap is not None and output_cap > self._held_cap:
            self._held_cap = output_cap
        else:
            self._is_last_word = True
        self._raised.set()

    def on_held(self, call: Callable[[], None]) -> None:
        self._call_held = call

    @property
    def progress(self) -> Progress:
        sizes = [choice.num_tokens for choice in self._choices]
        return Progress(
            num_open=len(self._open),
            ended_tokens=sum(size for i, size in enumerate(sizes) if i not in self._open),
            most_tokens=max((sizes[i] for i in self._open), default=0),
        )

    def _held(self) -> list[int] | None:
        """The answers that are at the held cap, if there are any; all wait for them then."""
        if self._held_cap is None:
            return None
        at_cap = [i for i in self._open if self._choices[i].num_tokens >= self._held_cap]
        return at_cap or None

    async def _wait_at_cap(self, held: list[int]) -> list[GenerationEvent]:
        if self._is_last_word:
            return [event for i in held for event in self._close(i, "length")]
        self._raised.clear()
        if self._call_held is not None:
            self._call_held()
        await self._until(self._raised)
        return []

    async def _until(self, event: asyncio.Event) -> None:
        """Or until somebody stops the request."""
        if self.aborted:
            return
        waiting = asyncio.create_task(event.wait())
        self._stop_waiting = waiting.cancel
        try:
            await asyncio.wait({waiting})
        finally:
            waiting.cancel()

    def _told(self, events: list[GenerationEvent]) -> list[GenerationEvent]:
        self.num_told += len(events)
        self.ended = self.ended or not self._open
        self._backend.note_change()
        return events

    def abort(self) -> None:
        if not self.ended:
            self.aborted = self.ended = True
            self._stop_waiting()
            self._backend.note_change()

    async def wait_ended(self, timeout_s: float) -> None:
        del timeout_s  # an abort is final at once

    @property
    def usage(self) -> TokenUsage:
        if self._is_queued:
            return TokenUsage()
        return TokenUsage(
            prompt_tokens=self._num_prompt_tokens,
            completion_tokens=sum(choice.num_tokens for choice in self._choices),
            cached_tokens=min(self._script.num_cached_tokens * len(self.request.prompts), self._num_prompt_tokens),
        )

    @property
    def timings(self) -> EngineTimings | None:
        return EngineTimings() if self.ended else None

    def _said(self, step: Say) -> list[GenerationEvent]:
        if step.choice is not None:
            return self._say(step.choice, step.text) if step.choice in self._open else []
        if len(self._choices) == 1:
            return self._say(0, step.text)
        return [event for i in list(self._open) for event in self._say(i, step.text)]

    async def _step(self, step: Step | None) -> list[GenerationEvent]:
        """Any other step, or the end. The position moves on only after a wait, so a cancelled wait loses nothing."""
        match step:
            case None:
                return [event for i in list(self._open) for event in self._close(i, self._script.finish)]
            case Pause(seconds):
                await self._backend.sleep(seconds)
            case Gate(name):
                await self._until(self._backend.gate(name))
            case Fail(error):
                self.ended = True
                self._backend.note_change()
                raise error
        self._position += 1
        return []

    def _say(self, index: int, piece: str) -> list[GenerationEvent]:
        choice = self._choices[index]
        choice.push(piece, self._logprob(piece))
        if choice.stopped or choice.num_tokens == self._caps[index]:
            return self._close(index, "stop" if choice.stopped else "length")
        delta = choice.take(last=False)
        return [] if delta is None else [delta]

    def _close(self, index: int, reason: FinishReason) -> list[GenerationEvent]:
        choice = self._choices[index]
        del self._open[index]
        choice.end()
        delta = choice.take(last=True)
        return [*([] if delta is None else [delta]), ChoiceFinished(index, "stop" if choice.stopped else reason)]

    def _logprob(self, piece: str) -> TokenLogprob | None:
        num = self.request.sampling.num_logprobs
        if num is None:
            return None
        others = [f"{piece}{rank}" for rank in range(1, num)]
        chances = [_chance(text, LOGPROB * (rank + 1)) for rank, text in enumerate([piece, *others])]
        return TokenLogprob(chances[0], tuple(chances[:num]))


def num_tokens(prompt: Prompt) -> int:
    """A scripted model's tokens are words."""
    if isinstance(prompt, Conversation):
        return sum(len(message.content.split()) for message in prompt.messages)
    return len(prompt.text.split()) if isinstance(prompt, Text) else len(prompt.token_ids)


def _text(prompt: Prompt) -> str:
    if isinstance(prompt, Conversation):
        return "\n".join(message.content for message in prompt.messages)
    return prompt.text if isinstance(prompt, Text) else " ".join(map(str, prompt.token_ids))


def _chance(text: str, logprob: float) -> TokenChance:
    return TokenChance(text, logprob, text.encode())
