"""Requests of exact sizes, any number at once, and what became of each as its client saw it."""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
from cluster import MODEL
from scripted_engine_program import FIRST_TOKEN

from engine.text.assets import load_text

PROMPT_TOKEN = 1000
"""Any that is not special; prompts are made of it where their length matters."""
ANSWERS_WITHIN_S = 60.0


@dataclass(eq=False)
class Answer:
    """
    Attributes:
        sent_s, decided_s, ended_s: on the monotonic clock; decided is when the status was there.
        status: 0 if there was none.
        error: the body's, or that of an event in the stream.
        texts, reasons, causes: by choice; a cause is why an answer was cut that should have gone on.
        num_chunks: text events read so far.
    """

    url: str
    sent_s: float = 0.0
    decided_s: float = math.inf
    ended_s: float = math.inf
    status: int = 0
    headers: Mapping[str, str] = field(default_factory=dict)
    error: dict[str, Any] = field(default_factory=dict)
    texts: dict[int, str] = field(default_factory=dict)
    reasons: dict[int, str] = field(default_factory=dict)
    causes: dict[int, str] = field(default_factory=dict)
    usage: dict[str, Any] = field(default_factory=dict)
    num_chunks: int = 0
    _news: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def is_taken(self) -> bool:
        return self.status == 200

    @property
    def request_id(self) -> str:
        return self.headers["x-request-id"]

    @property
    def code(self) -> str | None:
        """Of its error, None if there is none."""
        return self.error.get("code")

    @property
    def limit(self) -> dict[str, Any]:
        """The one that refused it."""
        limit: dict[str, Any] = self.error["limit"]
        return limit

    @property
    def took_s(self) -> float:
        """Until it was decided."""
        return self.decided_s - self.sent_s

    @property
    def prompt(self) -> int:
        tokens: int = self.usage.get("prompt_tokens", 0)
        return tokens

    @property
    def output(self) -> int:
        tokens: int = self.usage.get("completion_tokens", 0)
        return tokens

    @property
    def total(self) -> int:
        return self.prompt + self.output

    @property
    def is_clamped(self) -> bool:
        """It was told that it may write less than it asked for."""
        return "x-evenhand-output-cap" in self.headers

    @property
    def is_over(self) -> bool:
        return self.ended_s < math.inf

    async def reached(self, num_chunks: int) -> None:
        """Wait until so many text events were read. AssertionError if it ends before."""
        async with asyncio.timeout(ANSWERS_WITHIN_S):
            while self.num_chunks < num_chunks:
                assert not self.is_over, f"ended after {self.num_chunks} chunks: {self.status} {self.error}"
                self._news.clear()
                await self._news.wait()

    def note(self) -> None:
        self._news.set()


class Running:
    """A stream that is being read.

    Attributes:
        answer: as far as it has been read.
    """

    def __init__(self, answer: Answer, reading: asyncio.Task[Answer]) -> None:
        self.answer = answer
        self._reading = reading

    async def end(self) -> Answer:
        """Read on to its end."""
        return await self._reading

    async def leave(self) -> None:
        """Close the connection, as a client that has enough."""
        self._reading.cancel()
        with suppress(asyncio.CancelledError):
            await self._reading


class Caller:
    """A client without a limit of its own, and without patience for anything that takes a minute."""

    def __init__(self, session: aiohttp.ClientSession) -> None:
        self._session = session

    async def ask(
        self,
        url: str,
        key: str,
        *,
        prompt: int | str = 20,
        output: int | None = 10,
        stream: bool = False,
        n: int = 1,
        answer: Answer | None = None,
        model: str = MODEL,
        headers: Mapping[str, str] | None = None,
        **fields: Any,
    ) -> Answer:
        """Send a request and read its answer to the end.

        Args:
            prompt: so many tokens exactly, as a completion; or a text, as a chat.
            output: most tokens of an answer; None does not say.
            answer: to be filled while it is read.
            fields: further ones of the body.
        """
        body = {"model": model, "n": n, **fields}
        if isinstance(prompt, int):
            path, body["prompt"] = "/v1/completions", [PROMPT_TOKEN] * prompt
        else:
            path, body["messages"] = "/v1/chat/completions", [{"role": "user", "content": prompt}]
        if output is not None:
            body["max_tokens"] = output
        if stream:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        answer = answer or Answer(url)
        answer.sent_s = time.monotonic()
        try:
            sent = {"authorization": f"Bearer {key}", **(headers or {})}
            async with self._session.post(url + path, json=body, headers=sent) as response:
                answer.decided_s = time.monotonic()
                answer.status, answer.headers = response.status, response.headers
                answer.note()
                if stream and response.status == 200:
                    await _read_events(response, answer)
                else:
                    _read_whole(await response.json(), answer)
        finally:
            answer.ended_s = time.monotonic()
            answer.note()
        return answer

    @asynccontextmanager
    async def running(self, url: str, key: str, *, after: int = 1, **fields: Any) -> AsyncIterator[Running]:
        """A stream that has told its first (`after`) texts; it is left if the block does not end it."""
        answer = Answer(url)
        reading = asyncio.create_task(self.ask(url, key, stream=True, answer=answer, **fields))
        running = Running(answer, reading)
        try:
            await answer.reached(after)
            yield running
        finally:
            await running.leave()

    async def ask_all(self, asks: Iterable[Awaitable[Answer]]) -> Sequence[Answer]:
        """All at once."""
        return await asyncio.gather(*asks)

    async def ask_until(self, is_so: Callable[[Answer], bool], ask: Callable[[], Awaitable[Answer]]) -> list[Answer]:
        """One after the other, until one is so."""
        answers: list[Answer] = []
        async with asyncio.timeout(ANSWERS_WITHIN_S):
            while not answers or not is_so(answers[-1]):
                answers.append(await ask())
        return answers

    async def ask_steadily(
        self, rate_s: float, duration_s: float, ask: Callable[[int], Awaitable[Answer]]
    ) -> Sequence[Answer]:
        """So many a second, whatever becomes of those before; all that came of it, in the order they were sent in."""
        begun_s = time.monotonic()
        tasks: list[asyncio.Task[Answer]] = []
        for i in range(int(rate_s * duration_s)):
            await asyncio.sleep(max(0.0, begun_s + i / rate_s - time.monotonic()))
            tasks.append(asyncio.ensure_future(ask(i)))
        return await asyncio.gather(*tasks)


@asynccontextmanager
async def calling(*, new_connections: bool = False) -> AsyncIterator[Caller]:
    """
    Args:
        new_connections: one for each request, so that all workers behind a port get some.
    """
    connector = aiohttp.TCPConnector(limit=0, force_close=new_connections)
    timeout = aiohttp.ClientTimeout(total=ANSWERS_WITHIN_S)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        yield Caller(session)


def stop_at(num_tokens: int, model: Path) -> str:
    """A stop string that a scripted answer's first choice completes with its token of this number, and not before."""
    tokenizer = load_text(model).tokenizer
    ids = range(FIRST_TOKEN, FIRST_TOKEN + num_tokens)
    text, before = tokenizer.decode(list(ids)), tokenizer.decode(list(ids[:-1]))
    return next(text[-n:] for n in range(1, len(text)) if text[-n:] not in before)


def taken(answers: Iterable[Answer]) -> list[Answer]:
    return [answer for answer in answers if answer.is_taken]


def what_happened(answers: Iterable[Answer]) -> dict[str, int]:
    """For messages of assertions."""
    return dict(Counter(f"{each.status} {each.code}" for each in answers).most_common())


async def _read_events(response: aiohttp.ClientResponse, answer: Answer) -> None:
    async for line in response.content:
        if not line.startswith(b"data: {"):
            continue
        event = json.loads(line[6:])
        answer.error = event.get("error") or answer.error
        answer.usage = event.get("usage") or answer.usage
        for choice in event.get("choices", ()):
            delta = choice["text"] if "text" in choice else choice["delta"].get("content")
            _take(choice, delta or "", answer)
            answer.num_chunks += bool(delta)
        answer.note()


def _read_whole(body: dict[str, Any], answer: Answer) -> None:
    answer.error, answer.usage = body.get("error", {}), body.get("usage", {})
    for choice in body.get("choices", ()):
        _take(choice, choice["text"] if "text" in choice else choice["message"]["content"], answer)


def _take(choice: dict[str, Any], text: str, answer: Answer) -> None:
    index = choice["index"]
    answer.texts[index] = answer.texts.get(index, "") + text
    if choice["finish_reason"] is not None:
        answer.reasons[index] = choice["finish_reason"]
        if choice.get("stop_reason") is not None:
            answer.causes[index] = choice["stop_reason"]
