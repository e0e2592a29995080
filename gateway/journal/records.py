"""What a journal's records are, and how they lie in a file.

A file begins with `MAGIC`. A record is a header, which holds the payload's length and its CRC-32 as two little-endian
32-bit numbers, and the payload: msgpack of one of the tagged structs below. Fields are only ever added, with a default,
so that a newer process reads what an older one has left.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator

import msgspec

from gateway.domain.ids import RequestId
from gateway.domain.ledger import LedgerRow, Opening

MAGIC = b"EVHJRNL1"
MAX_PAYLOAD_BYTES = 1 << 20
"""A longer one is damage. Ours have some hundred bytes; a `Progress` has at most `MAX_PROGRESS` requests."""
MAX_PROGRESS = 5_000

_HEADER = struct.Struct("<II")


class Opened(msgspec.Struct, frozen=True, tag="opened"):
    """The answer to a request begins."""

    opening: Opening


class Progress(msgspec.Struct, frozen=True, tag="progress"):
    """What running requests have been told so far: output tokens by request."""

    completion_tokens: dict[RequestId, int]


class Closed(msgspec.Struct, frozen=True, tag="closed"):
    """A request is settled; the row says everything."""

    row: LedgerRow


Record = Opened | Progress | Closed


class DamagedJournal(Exception):
    """The bytes at an offset are no record, and not the beginning of one either."""


_decoder = msgspec.msgpack.Decoder(Record)


class RecordEncoder:
    """Encodes into one buffer that is used again and again."""

    def __init__(self) -> None:
        self._encoder = msgspec.msgpack.Encoder()
        self._buffer = bytearray(1024)

    def encode(self, record: Record) -> bytearray:
        """Header and payload; valid until the next call."""
        buffer = self._buffer
        self._encoder.encode_into(record, buffer, _HEADER.size)
        payload = memoryview(buffer)[_HEADER.size :]
        checksum = zlib.crc32(payload)
        length = len(payload)
        payload.release()
        _HEADER.pack_into(buffer, 0, length, checksum)
        return buffer


def whole_records(data: bytes) -> Iterator[tuple[Record, int]]:
    """The records at the beginning of some bytes, each with the offset of its end; stops before one that is cut off.

    Raises `DamagedJournal` at bytes that cannot become a record by reading on.
    """
    view = memoryview(data)
    offset = 0
    while offset + _HEADER.size <= len(data):
        length, checksum = _HEADER.unpack_from(data, offset)
        if not 0 < length <= MAX_PAYLOAD_BYTES:
            raise DamagedJournal("no record has this length")
        begin = offset + _HEADER.size
        offset = begin + length
        if offset > len(data):
            return
        payload = view[begin:offset]
        if zlib.crc32(payload) != checksum:
            raise DamagedJournal("the checksum is wrong")
        try:
            record = _decoder.decode(payload)
        except msgspec.DecodeError as e:
            raise DamagedJournal("the record cannot be decoded") from e
        yield record, offset
