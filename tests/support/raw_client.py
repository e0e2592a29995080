"""One HTTP/1.1 connection on which a test does what no client library lets it: count bytes, pipeline, break off."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any, NamedTuple
from urllib.parse import urlsplit


class RawAnswer(NamedTuple):
    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def code(self) -> str | None:
        """Of the error that the body is."""
        error = json.loads(self.body).get("error", {})
        code: str | None = error.get("code")
        return code


class RawClient:
    """A connection. An answer is over with its last byte, and the next request can be written at that very moment."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    def write(self, data: bytes) -> None:
        self._writer.write(data)

    async def read(self) -> RawAnswer:
        """The next answer to its end. asyncio.IncompleteReadError if it breaks off."""
        status, headers = await self.read_head()
        if headers.get("transfer-encoding") != "chunked":
            body = await self._reader.readexactly(int(headers["content-length"]))
            return RawAnswer(status, headers, body)
        parts = []
        while part := await self.read_chunk():
            parts.append(part)
        return RawAnswer(status, headers, b"".join(parts))

    async def read_head(self) -> tuple[int, Mapping[str, str]]:
        head = (await self._reader.readuntil(b"\r\n\r\n")).decode()
        first, *lines = head.strip().split("\r\n")
        headers = {name.lower(): value for name, value in (line.split(": ", 1) for line in lines)}
        return int(first.split(" ")[1]), headers

    async def read_chunk(self) -> bytes:
        """Of an answer that comes in chunks; empty is its end."""
        size = int(await self._reader.readuntil(b"\r\n"), 16)
        data = await self._reader.readexactly(size + 2)
        return data[:-2]

    async def is_closed(self) -> bool:
        """Waits until the server has closed it, and reads what comes before."""
        while await self._reader.read(65536):
            pass
        return True

    def close(self, *, by_reset: bool = False) -> None:
        """Leave: in order, or with a reset."""
        if by_reset:
            connection = self._writer.get_extra_info("socket")
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self._writer.transport.abort()
        self._writer.close()


@asynccontextmanager
async def raw_client(url: str) -> AsyncIterator[RawClient]:
    place = urlsplit(url)
    reader, writer = await asyncio.open_connection(place.hostname, place.port, limit=1 << 20)
    client = RawClient(reader, writer)
    try:
        yield client
    finally:
        client.close()


async def is_ready(url: str) -> bool:
    """Whether the server at this address takes requests."""
    try:
        async with raw_client(url) as client:
            client.write(b"GET /ready HTTP/1.1\r\nhost: test\r\n\r\n")
            return (await client.read()).status == 200
    except (ConnectionError, asyncio.IncompleteReadError):
        return False


def post(path: str, key: str, body: Any, headers: Mapping[str, str] | None = None) -> bytes:
    """A request as it goes over the wire; a body of bytes is sent as it is."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    lines = [
        f"POST {path} HTTP/1.1",
        "host: test",
        f"authorization: Bearer {key}",
        "content-type: application/json",
        f"content-length: {len(content)}",
        *(f"{name}: {value}" for name, value in (headers or {}).items()),
    ]
    return "\r\n".join([*lines, "", ""]).encode() + content
