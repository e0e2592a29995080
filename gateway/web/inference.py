"""What the inference routes of every protocol share: reading a body, preparing a call, answering it."""

from __future__ import annotations

from typing import TypeVar

from litestar.types import HTTPScope, Receive

from gateway.domain.principal import Principal
from gateway.domain.record import Endpoint, RequestInfo
from gateway.domain.request import GenerationRequest
from gateway.errors import InvalidRequest
from gateway.services.inference import Call, Inference
from gateway.web.body import read_body
from gateway.web.decoding import BodyDecoder
from gateway.web.sse import AnswerWriter, EventStream, StreamWriter, WholeAnswer

T = TypeVar("T")

DEADLINE_HEADER = b"x-evenhand-deadline-ms"
MAX_DEADLINE_MS = 24 * 3600 * 1000


class InferenceHttp:
    """The use case "answer a request", as HTTP sees it.

    Args:
        max_body_bytes: largest request body.
        heartbeat_s: between signs of life on a stream that has nothing to tell.
    """

    def __init__(self, inference: Inference, *, max_body_bytes: int, heartbeat_s: float) -> None:
        self._inference = inference
        self._max_body_bytes = max_body_bytes
        self._heartbeat_s = heartbeat_s

    async def read(self, scope: HTTPScope, receive: Receive, decoder: BodyDecoder[T]) -> T:
        """Raises `BodyTooLarge`, `InvalidRequest` or `ClientGone`."""
        return decoder.decode(await read_body(scope, receive, self._max_body_bytes))

    async def prepare(self, scope: HTTPScope, wanted: GenerationRequest, endpoint: Endpoint, *, stream: bool) -> Call:
        """Raises what `Inference.prepare` raises."""
        principal: Principal = scope["auth"]
        info = RequestInfo(
            request_id=scope["state"]["request_id"],
            principal=principal,
            request_class=principal.default_class,
            endpoint=endpoint,
            stream=stream,
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
