"""What the engine says of a running request, as events: ids to text, stop strings, counts.

One generation may span several engine requests (a completion's list of prompts); its choices are numbered through.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Protocol, Self

from engine.errors import EngineError, RequestRejected
from engine.messages import Output, Timings, TokenLogprobs
from engine.text.detokenizer import Detokenizer
from engine.text.tokenizer import Tokenizer
from gateway.backends.choice_text import ChoiceText
from gateway.domain.events import ChoiceFinished, GenerationEvent, TokenChance, TokenLogprob
from gateway.domain.usage import EngineTimings, TokenUsage, over_parts
from gateway.errors import DeadlineExceeded, EngineDown, EvenhandError, InvalidRequest
from gateway.services.ports import Progress

RETRY_AFTER_S = 5
"""An engine that is started again is up after about this long, or twice."""


class Stream(Protocol):
    """What we use of `engine.stream.OutputStream`."""

    async def __anext__(self) -> Output: ...

    def abort(self) -> None: ...

    def raise_cap(self, output_cap: int) -> None: ...


def to_gateway_error(
    error: EngineError, lost: str = "The engine is not available right now. Please try again shortly."
) -> EvenhandError:
    """What a caller is told when the engine does not take a request, or is lost while it runs."""
    if isinstance(error, RequestRejected):
        # Nearly all of these were found out before the request was handed over.
        return InvalidRequest(f"The engine cannot run this request: {error}.")
    return EngineDown(lost, retry_after_s=RETRY_AFTER_S)


class LocalGeneration:
    """Implements `gateway.services.ports.Generation`.

    Args:
        streams: one for each prompt, each with `num_choices` choices.
        prompt_lengths: tokens of each prompt.
        output_caps: for each prompt: most output tokens of one answer, whatever is raised.
    """

    def __init__(
        self,
        streams: Sequence[Stream],
        *,
        tokenizer: Tokenizer,
        stops: Sequence[str],
        num_choices: int,
        prompt_lengths: Sequence[int],
        output_caps: Sequence[int],
    ) -> None:
        self._streams = streams
        self._source: _Single | _Several = _Single(streams[0]) if len(streams) == 1 else _Several(streams)
        self._tokenizer = tokenizer
        self._num_choices = num_choices
        self._prompt_lengths = prompt_lengths
        self._output_caps = output_caps
        self._call_held: Callable[[], None] | None = None
        self._choices = [_Choice(i, tokenizer, stops) for i in range(len(streams) * num_choices)]
        self._num_open = self._num_unsettled = len(self._choices)
        self._is_lost = False
        self._timings: list[EngineTimings] = []

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Sequence[GenerationEvent]:
        while self._num_open:
            if events := self._take(*await self._next()):
                return events
        raise StopAsyncIteration

    def abort(self) -> None:
        for stream in self._streams:
            stream.abort()

    def raise_cap(self, output_cap: int) -> None:
        for stream, most in zip(self._streams, self._output_caps, strict=True):
            stream.raise_cap(min(output_cap, most))
            if output_cap >= most:
                stream.raise_cap(most)  # the last word: it may have no more than it asked for

    def on_held(self, call: Callable[[], None]) -> None:
        self._call_held = call

    @property
    def progress(self) -> Progress:
        is_open = [choice for choice in self._choices if choice.is_open]
        return Progress(
            num_open=len(is_open),
            ended_tokens=sum(choice.num_tokens for choice in self._choices if not choice.is_open),
            most_tokens=max((choice.num_tokens for choice in is_open), default=0),
        )

    async def wait_ended(self, timeout_s: float) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                while not self.ended:
                    self._settle(*await self._next())
        except (TimeoutError, EvenhandError):
            return  # what is known by now has to do

    @property
    def ended(self) -> bool:
        return self._num_unsettled == 0 or self._is_lost

    @property
    def usage(self) -> TokenUsage:
        n = self._num_choices
        groups = [self._choices[i : i + n] for i in range(0, len(self._choices), n)]
        return TokenUsage(
            prompt_tokens=sum(map(_prompt_tokens, self._prompt_lengths, groups)),
            completion_tokens=sum(choice.num_tokens for choice in self._choices),
            cached_tokens=sum(map(_cached_tokens, groups)),
        )

    @property
    def timings(self) -> EngineTimings | None:
        return over_parts(self._timings) if self._timings else None

    async def _next(self) -> tuple[_Choice, Output]:
        """The engine's next news; raises `EvenhandError` when there will be none."""
        try:
            stream, output = await self._source.next()
        except EngineError as e:
            self._is_lost = True
            raise to_gateway_error(e, "The engine was lost while it worked on this request. Please try again.") from e
        return self._choices[stream * self._num_choices + output.choice], output

    def _take(self, choice: _Choice, output: Output) -> list[GenerationEvent]:
        """What the output adds to its choice; raises `EvenhandError` if it ends the request."""
        if not choice.is_open:
            self._settle(choice, output)
            return []
        choice.read(output, self._tokenizer)
        if output.held_at_cap and not choice.text.stopped and self._call_held is not None:
            self._call_held()
        finish = output.finish
        if finish in ("abort", "deadline", "error"):
            self._settle(choice, output)
            if finish == "deadline":
                raise DeadlineExceeded("The request's deadline passed before its answer was complete.")
            raise EngineDown("The engine failed while it worked on this request.", retry_after_s=RETRY_AFTER_S)
        is_over = choice.text.stopped or finish is not None
        events: list[GenerationEvent] = []
        if (delta := choice.text.take(last=is_over)) is not None:
            events.append(delta)
        if is_over:
            choice.is_open = False
            self._num_open -= 1
            events.append(ChoiceFinished(choice.index, "length" if self._is_cut(choice, finish) else "stop"))
            self._settle(choice, output)
            self._stop_unread(choice.index // self._num_choices)
        return events

    def _stop_unread(self, prompt: int) -> None:
        """Abort the engine's request if none of its choices is read any more: it does not know our stop strings."""
        choices = self._choices[prompt * self._num_choices : (prompt + 1) * self._num_choices]
        if any(not choice.is_settled for choice in choices) and not any(choice.is_open for choice in choices):
            self._streams[prompt].abort()

    @staticmethod
    def _is_cut(choice: _Choice, finish: str | None) -> bool:
        return finish == "length" and not choice.text.stopped

    def _settle(self, choice: _Choice, output: Output) -> None:
        """Keep the final counts, if these are they."""
        choice.note_counts(output)
        if choice.is_open:
            choice.num_tokens = max(choice.num_tokens, output.num_delivered_tokens)
        if output.finish is not None:
            choice.is_settled = True
            self._num_unsettled -= 1
            if output.timings is not None:
                self._timings.append(_timings(output.timings))


class _Choice:
    """One choice of the generation.

    Attributes:
        is_open: its text goes on.
        is_settled: the engine has ended it.
        num_tokens: output tokens that count.
        num_cached_tokens: prompt tokens that this choice found in the cache; None before it has run.
        num_computed_tokens: tokens that the engine has computed or found in the cache for it.
    """

    __slots__ = (
        "_detokenizer",
        "index",
        "is_open",
        "is_settled",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_tokens",
        "text",
    )

    def __init__(self, index: int, tokenizer: Tokenizer, stops: Sequence[str]) -> None:
        self.index = index
        self.text = ChoiceText(index, stops)
        self.is_open = True
        self.is_settled = False
        self.num_tokens = 0
        self.num_cached_tokens: int | None = None
        self.num_computed_tokens = 0
        self._detokenizer = Detokenizer(tokenizer)

    def read(self, output: Output, tokenizer: Tokenizer) -> None:
        """Add the output's tokens to the text, up to the one that completes a stop string."""
        text, last = self.text, len(output.token_ids) - 1
        for i, token_id in enumerate(output.token_ids):
            if i == last and token_id == output.stop_token_id:
                text.push_silent()
                break
            logprob = None if output.logprobs is None else _logprob(token_id, output.logprobs[i], tokenizer)
            text.push(self._detokenizer.push(token_id), logprob)
            if text.stopped:
                break
        if output.finish in ("stop", "length"):
            text.end(self._detokenizer.flush())
        self.num_tokens = text.num_tokens
        self.note_counts(output)

    def note_counts(self, output: Output) -> None:
        self.num_cached_tokens = output.num_cached_tokens
        self.num_computed_tokens = max(output.num_computed_tokens, output.num_cached_tokens)


class _Single:
    """The usual case: one engine request."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream

    async def next(self) -> tuple[int, Output]:
        return 0, await self._stream.__anext__()


class _Several:
    """Several engine requests as one; a reading task for each. Cancelling a wait in `next` loses nothing."""

    def __init__(self, streams: Sequence[Stream]) -> None:
        self._news: asyncio.Queue[tuple[int, Output] | EngineError] = asyncio.Queue()
        self._readers = [asyncio.ensure_future(self._read(i, stream)) for i, stream in enumerate(streams)]

    async def next(self) -> tuple[int, Output]:
        news = await self._news.get()
        if isinstance(news, EngineError):
            raise news
        return news

    async def _read(self, index: int, stream: Stream) -> None:
        try:
            while True:
                self._news.put_nowait((index, await stream.__anext__()))
        except StopAsyncIteration:
            return
        except EngineError as e:
            self._news.put_nowait(e)


def _prompt_tokens(length: int, group: Sequence[_Choice]) -> int:
    """Of a prompt that its choices were to answer, as much as was computed or found in the cache."""
    if any(choice.num_tokens or not choice.is_open for choice in group):
        return length
    return min(length, max(choice.num_computed_tokens for choice in group))


def _cached_tokens(group: Sequence[_Choice]) -> int:
    """The choices of a prompt find each other's work in the cache; only what was there before counts."""
    return min(choice.num_cached_tokens or 0 for choice in group)


def _logprob(token_id: int, logprobs: TokenLogprobs, tokenizer: Tokenizer) -> TokenLogprob:
    return TokenLogprob(
        _chance(token_id, logprobs.logprob, tokenizer),
        tuple(_chance(other, logprob, tokenizer) for other, logprob in logprobs.top),
    )


def _chance(token_id: int, logprob: float, tokenizer: Tokenizer) -> TokenChance:
    utf8 = tokenizer.token_bytes(token_id)
    return TokenChance(utf8.decode("utf-8", "replace"), logprob, utf8)


def _timings(timings: Timings) -> EngineTimings:
    return EngineTimings(
        queue_us=timings.queue_us,
        prefill_us=timings.prefill_us,
        decode_us=timings.decode_us,
        preempted_us=timings.preempted_us,
        engine_us=timings.engine_us,
        parked_us=timings.parked_us,
    )
