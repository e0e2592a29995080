"""Noticing that a client has left while it is being worked for. The framework does not do this by itself."""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Any

from litestar.types import Receive

from gateway.errors import ClientGone


class ClientWatch:
    """A block that ends with `ClientGone`, wherever it waits, as soon as the client leaves.

    Listens for the disconnect beside the block and cancels the task that is in it, the way `asyncio.timeout` does.
    Enter it only after the whole body has been read.
    """

    __slots__ = ("_cancelling", "_gone", "_listener", "_receive", "_task")

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._listener: asyncio.Future[Any] | None = None
        self._gone = False

    async def __aenter__(self) -> None:
        task = asyncio.current_task()
        assert task is not None, "runs in a task"
        self._task = task
        self._cancelling = task.cancelling()
        self._listen()

    def _listen(self) -> None:
        self._listener = asyncio.ensure_future(self._receive())
        self._listener.add_done_callback(self._heard)

    def _heard(self, listener: asyncio.Future[Any]) -> None:
        if listener is not self._listener or listener.cancelled():
            return
        if listener.exception() is None and listener.result()["type"] != "http.disconnect":
            self._listen()
            return
        self._gone = True
        self._task.cancel()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        listener, self._listener = self._listener, None
        if listener is not None:
            listener.cancel()
        if self._gone and self._task.uncancel() <= self._cancelling and kind is asyncio.CancelledError:
            raise ClientGone from error
