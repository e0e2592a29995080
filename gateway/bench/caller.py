"""One side of a load: streamed completions with the keys of one team, and when their tokens came.

Times are of `time.perf_counter`. Knows the OpenAI protocol and nothing that only our own server has.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import httpx
import msgspec

from gateway.bench.prompts import Prompts

_DATA = "data: {"
_EXCERPT = 200
"""Characters of a refusal that are kept."""


class _Choice(msgspec.Struct):
    text: str = ""


class _Usage(msgspec.Struct):
    completion_tokens: int = 0


class _Event(msgspec.Struct):
    """What counts of an event of a stream; one with an error has neither."""

    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: msgspec.Raw = msgspec.Raw()


_decode = msgspec.json.Decoder(_Event).decode


@dataclass(slots=True)
class Answer:
    """One request as its sender sees it. It fills while the request runs.

    Attributes:
        sent_s: when it was sent.
        arrivals_s: when its pieces of text came; usually one for each token.
        num_tokens: of the answer, as the server counts them; None until it has ended well.
        failure: why there is no whole answer.
        begun: the first piece came, or none will.
    """

    sent_s: float = field(default_factory=time.perf_counter)
    arrivals_s: list[float] = field(default_factory=list)
    num_tokens: int | None = None
    failure: str | None = None
    begun: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def ttft_s(self) -> float | None:
        """Time to first token; None if none came."""
        return self.arrivals_s[0] - self.sent_s if self.arrivals_s else None

    def gaps_s(self, since_s: float = 0.0, until_s: float = float("inf")) -> list[float]:
        """Between one piece of text and the next; those that end within these times."""
        pairs = itertools.pairwise(self.arrivals_s)
        return [after - before for before, after in pairs if since_s < after <= until_s]


class Caller:
    """Sends completions, with each of the keys in turn.

    Args:
        http: knows the server's address.
    """

    def __init__(self, http: httpx.AsyncClient, model: str, keys: Sequence[str], prompts: Prompts) -> None:
        self._http = http
        self._model = model
        self._keys: Iterator[str] = itertools.cycle(keys)
        self.prompts = prompts

    async def complete(self, num_prompt: int, num_output: int, *, answer: Answer | None = None) -> Answer:
        """Send a prompt of so many words and read an answer of so many tokens.

        Args:
            answer: is filled, so that it can be looked at before the end; a new one if it is left out.
        """
        answer = answer or Answer()
        body = {
            "model": self._model,
            "prompt": self.prompts.of(num_prompt),
            "max_tokens": num_output,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        headers = {"authorization": f"Bearer {next(self._keys)}"}
        answer.sent_s = time.perf_counter()
        try:
            async with self._http.stream("POST", "/v1/completions", json=body, headers=headers) as response:
                if response.status_code == httpx.codes.OK:
                    await _read(response, answer)
                else:
                    text = (await response.aread()).decode("utf-8", "replace")
                    answer.failure = f"{response.status_code} {text[:_EXCERPT]}"
        except (httpx.HTTPError, httpx.InvalidURL, msgspec.MsgspecError) as e:
            answer.failure = f"{type(e).__name__} {e}".strip()
        finally:
            answer.begun.set()
        if answer.num_tokens is None and answer.failure is None:
            answer.failure = "the stream ended without a count of its tokens"
        return answer


async def _read(response: httpx.Response, answer: Answer) -> None:
    async for line in response.aiter_lines():
        if not line.startswith(_DATA):
            continue
        now_s = time.perf_counter()
        event = _decode(line[len(_DATA) - 1 :])
        if event.error:
            answer.failure = bytes(event.error).decode()[:_EXCERPT]
        if any(choice.text for choice in event.choices):
            answer.arrivals_s.append(now_s)
            answer.begun.set()
        if event.usage is not None:
            answer.num_tokens = event.usage.completion_tokens
