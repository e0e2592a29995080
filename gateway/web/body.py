"""Reading a request body, with a limit that holds for declared and for chunked lengths alike."""

from __future__ import annotations

import asyncio

from litestar.types import HTTPScope, Receive

from gateway.errors import BodyTooLarge, ClientGone

DRAIN_BYTES = 64 << 20
DRAIN_S = 10.0
"""How much of a body that is too large is read and dropped, and for how long. A client that still writes when the
connection closes may never see the answer."""


async def read_body(scope: HTTPScope, receive: Receive, max_bytes: int) -> bytes:
    """The whole body. Raises `BodyTooLarge`, or `ClientGone` if the client leaves on the way."""
    message = await receive()
    if message["type"] == "http.disconnect":
        raise ClientGone
    if message["type"] != "http.request":
        raise AssertionError(f"a body cannot come in a message of type {message['type']}")
    body = message["body"]
    if not message["more_body"] and len(body) <= max_bytes:
        return body
    parts = [body]
    num_bytes = len(body)
    more = message["more_body"]
    while num_bytes <= max_bytes:
        if not more:
            return b"".join(parts)
        body, more = await _next_part(receive)
        parts.append(body)
        num_bytes += len(body)
    if more and not any(name == b"expect" for name, _ in scope["headers"]):
        await _drain(receive, num_bytes)
    raise BodyTooLarge(f"The request body is larger than the limit of {max_bytes} bytes.")


async def _next_part(receive: Receive) -> tuple[bytes, bool]:
    message = await receive()
    if message["type"] != "http.request":
        raise ClientGone
    return message["body"], message["more_body"]


async def _drain(receive: Receive, num_bytes: int) -> None:
    try:
        async with asyncio.timeout(DRAIN_S):
            more = True
            while more and num_bytes <= DRAIN_BYTES:
                body, more = await _next_part(receive)
                num_bytes += len(body)
    except TimeoutError:
        return
