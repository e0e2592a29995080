"""A team that always has so many requests under way, and what it gets out of it."""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Self

from gateway.bench.caller import Answer, Caller

_BREATH_S = 1.0
"""How long one who was refused waits before he tries again."""


class Flood:
    """Keeps requests going, each followed by the next one.

    Attributes:
        answers: to all requests that were ever sent, those under way included.
    """

    def __init__(self, caller: Caller, *, size: int, num_prompt: int, num_output: int) -> None:
        self._caller = caller
        self._size = size
        self._num_prompt = num_prompt
        self._num_output = num_output
        self._num_ended = 0
        self._another_ended = asyncio.Event()
        self.answers: list[Answer] = []

    @property
    def failures(self) -> list[str]:
        return [answer.failure for answer in self.answers if answer.failure is not None]

    async def under_way(self) -> None:
        """Wait until as many have ended as a quarter of those that run at a time: they no longer run in step."""
        while self._num_ended < self._size / 4:
            self._another_ended.clear()
            await self._another_ended.wait()

    def num_tokens(self, since_s: float, until_s: float) -> float:
        """Output tokens that came between two times.

        A piece of text counts as many tokens as one has on average in answers that have ended.
        """
        ended = [answer for answer in self.answers if answer.num_tokens is not None]
        num_pieces = sum(len(answer.arrivals_s) for answer in ended)
        tokens_each = sum(answer.num_tokens or 0 for answer in ended) / num_pieces if num_pieces else 1.0
        return tokens_each * sum(
            bisect_left(answer.arrivals_s, until_s) - bisect_left(answer.arrivals_s, since_s) for answer in self.answers
        )

    async def _keep_one_going(self) -> None:
        prompts = self._caller.prompts
        while True:
            answer = Answer()
            self.answers.append(answer)
            await self._caller.complete(prompts.about(self._num_prompt), prompts.about(self._num_output), answer=answer)
            self._num_ended += 1
            self._another_ended.set()
            if answer.failure is not None:
                await asyncio.sleep(_BREATH_S)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Self]:
        """Going from here on; whatever is under way at the end of the block is cut off."""
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._keep_one_going()) for _ in range(self._size)]
            try:
                yield self
            finally:
                for task in tasks:
                    task.cancel()
