"""Requests at a steady rate against several gateways, and what became of each: the client's side of the books."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp

WHOLE, STREAM, LEAVES = "whole", "stream", "leaves"
KINDS = (WHOLE, STREAM, STREAM, LEAVES)


@dataclass
class Attempt:
    """One request as its client saw it.

    Attributes:
        request_id: of the answer, if its headers came.
        status: None if none came.
        is_whole: the answer came to its end, or the client meant to leave.
        usage: as told, of answers that came to their end.
        num_chunks: text events read.
    """

    kind: str
    gateway: str
    request_id: str | None = None
    status: int | None = None
    is_whole: bool = False
    usage: dict[str, Any] | None = None
    num_chunks: int = 0
    is_over: bool = False
    error: str = ""

    @property
    def was_cut(self) -> bool:
        """The answer had begun and never came to its end."""
        return self.status == 200 and not self.is_whole


@dataclass
class Load:
    """Sends requests until it is told to stop.

    Args:
        pick: which gateway the next one goes to.
    """

    key: str
    model: str
    pick: Callable[[], str]
    rate_s: float = 50.0
    max_tokens: Sequence[int] = (4, 16, 200)
    leave_after: int = 3
    kinds: Sequence[str] = KINDS
    seed: int = 1
    attempts: list[Attempt] = field(default_factory=list)
    _more: asyncio.Event = field(default_factory=asyncio.Event)

    async def reached(self, num_attempts: int, *, num_running: int = 0, gateway: str = "") -> None:
        """Wait until so many requests have been sent, and so many answers of a gateway (any, if empty) are running."""
        while len(self.attempts) < num_attempts or self._num_running(gateway) < num_running:
            self._more.clear()
            await self._more.wait()

    def _num_running(self, gateway: str) -> int:
        return sum(
            each.num_chunks > 0 and not each.is_over and each.gateway.startswith(gateway) for each in self.attempts
        )

    async def run(self, duration_s: float) -> None:
        """Start requests for so long, and wait for all of them."""
        rng = random.Random(self.seed)
        timeout = aiohttp.ClientTimeout(total=60)
        connector = aiohttp.TCPConnector(limit=0)
        headers = {"authorization": f"Bearer {self.key}"}
        async with aiohttp.ClientSession(timeout=timeout, connector=connector, headers=headers) as session:
            begun = time.monotonic()
            async with asyncio.TaskGroup() as group:
                for i in range(int(duration_s * self.rate_s)):
                    await asyncio.sleep(max(0.0, begun + i / self.rate_s - time.monotonic()))
                    attempt = Attempt(rng.choice(self.kinds), self.pick())
                    self.attempts.append(attempt)
                    self._more.set()
                    group.create_task(self._send(session, attempt, rng.choice(self.max_tokens)))

    async def _send(self, session: aiohttp.ClientSession, attempt: Attempt, max_tokens: int) -> None:
        body: dict[str, Any] = {
            "model": self.model,
            "messages": [{"role": "user", "content": "Tell me something about ledgers."}],
            "max_tokens": max_tokens,
        }
        if attempt.kind != WHOLE:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        try:
            async with session.post(f"{attempt.gateway}/v1/chat/completions", json=body) as response:
                attempt.status = response.status
                attempt.request_id = response.headers.get("x-request-id")
                if response.status != 200:
                    attempt.error = await response.text()
                elif attempt.kind == WHOLE:
                    attempt.usage = (await response.json())["usage"]
                    attempt.is_whole = True
                else:
                    await self._read(response, attempt)
        except (aiohttp.ClientError, TimeoutError, ConnectionError) as e:
            attempt.error = repr(e)
        finally:
            attempt.is_over = True

    async def _read(self, response: aiohttp.ClientResponse, attempt: Attempt) -> None:
        async for line in response.content:
            if not line.startswith(b"data: "):
                continue
            data = line[6:].strip()
            if data == b"[DONE]":
                attempt.is_whole = True
                return
            event = json.loads(data)
            if "error" in event:
                attempt.error = json.dumps(event)
                return
            attempt.usage = event.get("usage") or attempt.usage
            attempt.num_chunks += any(choice["delta"].get("content") for choice in event["choices"])
            self._more.set()
            if attempt.kind == LEAVES and attempt.num_chunks >= self.leave_after:
                attempt.is_whole = True
                response.close()
                return
