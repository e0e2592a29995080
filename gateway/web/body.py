"""Reading a request body, with limits of size and time that hold for declared and for chunked lengths alike."""

from __future__ import annotations

import asyncio

from litestar.types import HTTPScope, Receive

from gateway.errors import BodyTooLarge, ClientGone, SlowRequest

DRAIN_BYTES = 64 << 20
DRAIN_S = 10.0
"""How much of a body that is too large is read and dropped, and for how long. A client that still writes when the
connection closes may never see the answer."""


async def read_body(scope: HTTPScope, receive: Receive, max_bytes: int, timeout_s: float) -> bytes:
    """The whole body.

    What is declared as too large is refused unread: a client that asked first (``expect: 100-continue``) sends nothing.
    Of whatever is refused here something is still to come, so the server closes the connection after the answer.

    Args:
        timeout_s: for all of it.

    Raises:
        BodyTooLarge: it is declared larger, or is.
        SlowRequest: it has not come in time.
        ClientGone: the client left on the way.
    """
    try:
        async with asyncio.timeout(timeout_s):
            num_bytes = _declared_bytes(scope)
            if num_bytes <= max_bytes:
                body, num_bytes, more = await _read(receive, max_bytes)
                if num_bytes <= max_bytes:
                    return body
            else:
                num_bytes, more = 0, True
    except TimeoutError as e:
        raise SlowRequest(f"The request body did not arrive within {timeout_s:g} seconds.") from e
    if more and not any(name == b"expect" for name, _ in scope["headers"]):
        await _drain(receive, num_bytes)
    raise BodyTooLarge(f"The request body is larger than the limit of {max_bytes} bytes.")


def _declared_bytes(scope: HTTPScope) -> int:
    for name, value in scope["headers"]:
        if name == b"content-length":
            return int(value)  # the server lets no other pass than one that is a number
    return 0


async def _read(receive: Receive, max_bytes: int) -> tuple[bytes, int, bool]:
    """The body, its length, and whether there is more; once it is over `max_bytes` it is only a part."""
    body, more = await _next_part(receive)
    if not more:
        return body, len(body), False
    parts = [body]
    num_bytes = len(body)
    while more and num_bytes <= max_bytes:
        body, more = await _next_part(receive)
        parts.append(body)
        num_bytes += len(body)
    return b"".join(parts), num_bytes, more


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
