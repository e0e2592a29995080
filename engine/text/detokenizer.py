"""Token ids of a running answer to text, piece by piece.

All pushes and the flush together are exactly `Tokenizer.decode` of all ids, for any ids; the time is linear in their
number. Text is held back only while it could still change: an unfinished UTF-8 character, or byte pieces.
"""

from __future__ import annotations

import codecs
from typing import Protocol

from engine.text.tokenizer import Tokenizer


class _Stream(Protocol):
    def push(self, token_id: int) -> str: ...

    def flush(self) -> str: ...


class Detokenizer:
    """The text of one answer. `flush` ends it."""

    def __init__(self, tokenizer: Tokenizer, *, skip_special: bool = True) -> None:
        self._stream: _Stream = (
            _ByteStream(tokenizer, skip_special) if tokenizer.byte_level else _PieceStream(tokenizer, skip_special)
        )

    def push(self, token_id: int) -> str:
        """The text that this token makes certain; often empty in the middle of a character."""
        return self._stream.push(token_id)

    def flush(self) -> str:
        """What was held back, unfinished characters as U+FFFD."""
        return self._stream.flush()


class _ByteStream:
    """Byte-level vocabularies: tokens are byte strings, so an incremental UTF-8 decoder is all there is to it."""

    def __init__(self, tokenizer: Tokenizer, skip_special: bool) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        if self._skip_special and self._tokenizer.is_special(token_id):
            return ""
        return self._decoder.decode(self._tokenizer.token_bytes(token_id))

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


class _PieceStream:
    """Piece vocabularies: decode each piece behind the one before it, and take what comes after that one's text.

    The piece before keeps the decoder from taking this one for the first, whose leading space it drops. A run of byte
    pieces is decoded when it ends: one wrong byte turns all of the run into U+FFFD.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special: bool) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._before: list[int] = []
        self._pending: list[int] = []

    def push(self, token_id: int) -> str:
        if not self._tokenizer.has_text(token_id) or (self._skip_special and self._tokenizer.is_special(token_id)):
            return ""
        self._pending.append(token_id)
        if self._tokenizer.is_byte_piece(token_id):
            return ""
        text = self.flush()
        self._before = [token_id]
        return text

    def flush(self) -> str:
        text = self._decode(self._before + self._pending)[len(self._decode(self._before)) :]
        self._pending = []
        return text

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special=self._skip_special)
