"""What the inference routes of every protocol share: reading a body, preparing a call, answering it."""

from __future__ import annotations

import asyncio
from typing import TypeVar

from litestar.types import HTTPScope, Receive

from gateway.domain.principal import CLASSES, Principal, RequestClass, lowest
from gateway.domain.record import RequestInfo
from gateway.domain.request import Endpoint, GenerationRequest
from gateway.domain.session import SessionHints, session_of
from gateway.errors import InvalidRequest
from gateway.services.call import Call
from gateway.services.inference import Inference
from gateway.web.body import read_body
from gateway.web.decoding import BodyDecoder
from gateway.web.sse import AnswerWriter, EventStream, StreamWriter, WholeAnswer

T = TypeVar("T")

SMALL_BODY_BYTES = 256 << 10
"""Decoded at once, which takes 1 ms; a larger one is decoded while other requests go on."""
DEADLINE_HEADER = b"x-evenhand-deadline-ms"
MAX_DEADLINE_MS = 24 * 3600 * 1000
CLASS_HEADER = b"x-evenhand-class"
_CLASSES: dict[bytes, RequestClass] = {name.encode(): name for name in CLASSES}


class InferenceHttp:
    """The use case "answer a request", as HTTP sees it.

    Args:
        max_body_bytes: largest request body.
        body_timeout_s: how long it may take to arrive.
        heartbeat_s: between signs of life on a stream that has nothing to tell.
    """

    def __init__(self, inference: Inference, *, max_body_bytes: int, body_timeout_s: float, heartbeat_s: float) -> None:
        self._inference = inference
        self._max_body_bytes = max_body_bytes
        self._body_timeout_s = body_timeout_s
        self._heartbeat_s = heartbeat_s

    async def read(self, scope: HTTPScope, receive: Receive, decoder: BodyDecoder[T]) -> T:
        """Raises what `read_body` raises, and `InvalidRequest`."""
        body = await read_body(scope, receive, self._max_body_bytes, self._body_timeout_s)
        if len(body) <= SMALL_BODY_BYTES:
            return decoder.decode(body)
        return await asyncio.to_thread(decoder.decode, body)

    async def prepare(
        self, scope: HTTPScope, wanted: GenerationRequest, hints: SessionHints, endpoint: Endpoint, *, stream: bool
    ) -> Call:
        """Raises what `Inference.prepare` raises, and `InvalidRequest` if a class is asked for that does not exist."""
        principal: Principal = scope["auth"]
        info = RequestInfo(
            request_id=scope["state"]["request_id"],
            principal=principal,
            request_class=lowest(principal.default_class, _wanted_class(scope)),
            endpoint=endpoint,
            stream=stream,
            session_id=session_of(principal.key_id, scope["headers"], hints, wanted.prompts[0]),
        )
        return await self._inference.prepare(wanted, info)

    def stream(self, call: Call, writer: StreamWriter) -> EventStream:
        return EventStream(call, writer, self._heartbeat_s)

    def answer(self, call: Call, writer: AnswerWriter) -> WholeAnswer:
        return WholeAnswer(call, writer)


def deadline_ms(scope: HTTPScope) -> int | None:
    """The value of ``x-evenhand-deadline-ms``, if there is one. Raises `InvalidRequest`."""
    for name, value in scope["headers"]:
        if name == DEADLINE_HEADER:
            if not value.isdigit() or len(value) > len(str(MAX_DEADLINE_MS)) or not 1 <= int(value) <= MAX_DEADLINE_MS:
                raise InvalidRequest(
                    f"x-evenhand-deadline-ms must be a number between 1 and {MAX_DEADLINE_MS}.",
                    param=DEADLINE_HEADER.decode(),
                )
            return int(value)
    return None


def _wanted_class(scope: HTTPScope) -> RequestClass | None:
    """The value of ``x-evenhand-class``, if there is one. Raises `InvalidRequest`."""
    for name, value in scope["headers"]:
        if name == CLASS_HEADER:
            wanted = _CLASSES.get(value.strip().lower())
            if wanted is None:
                raise InvalidRequest(
                    f"x-evenhand-class must be one of {', '.join(CLASSES)}.", param=CLASS_HEADER.decode()
                )
            return wanted
    return None
