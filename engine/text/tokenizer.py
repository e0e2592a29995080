"""Text to token ids and back, over the `tokenizers` library.

Knows how ids become bytes, not where the vocabulary came from (`gguf_vocab.py`, `assets.py`). Safe to use from several
threads.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import tokenizers

from engine.text.byte_alphabet import spelled_bytes

_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_WORD_START = "▁"
_STRIP = {"type": "Strip", "content": " ", "start": 1, "stop": 0}  # drops the space of the first word


class Tokenizer:
    """One model's vocabulary.

    Attributes:
        vocab_size: tokens that have a text. A model's logits may be padded beyond it.
        eos_token_ids: tokens that end a generation.
        byte_level: every token is a fixed string of bytes, and a text is their concatenation. Otherwise tokens are
            pieces (SentencePiece style), whose text depends a little on their neighbors.
    """

    def __init__(
        self, backend: tokenizers.Tokenizer, *, bos_ids: Sequence[int] = (), eos_token_ids: Sequence[int] = ()
    ) -> None:
        """`bos_ids` begin a raw prompt. Raises `ValueError` for a decoder that cannot be followed token by token."""
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._bos_ids = list(bos_ids)
        self.eos_token_ids = tuple(eos_token_ids)
        self.byte_level = _is_byte_level(backend)
        self.vocab_size: int = backend.get_vocab_size(with_added_tokens=True)
        added = backend.get_added_tokens_decoder()
        self._special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self._bytes: dict[int, bytes] = {}

    def encode(self, text: str, *, special: bool = True, add_bos: bool = False) -> list[int]:
        """Token ids of a text.

        Args:
            special: special tokens written in the text become their ids; otherwise they are ordinary text.
            add_bos: begin with what the model expects before a raw prompt (nothing, for many models). A rendered chat
                holds it already.
        """
        backend = self._backend if special else self._backend_without_special
        ids: list[int] = backend.encode_batch_fast([_without_surrogates(text)], add_special_tokens=False)[0].ids
        return self._bos_ids + ids if add_bos else ids

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """The text of ids. Bytes that are not UTF-8 become U+FFFD; ids that have no text are left out."""
        return self._backend.decode(list(ids), skip_special_tokens=skip_special)

    def token_bytes(self, token_id: int) -> bytes:
        """What one token adds inside a text, special tokens too; empty for an id that has no text."""
        known = self._bytes.get(token_id)
        if known is None:
            known = self._bytes[token_id] = self._compute_bytes(token_id)
        return known

    @cached_property
    def max_token_bytes(self) -> int:
        """The longest token's length."""
        return max(len(self.token_bytes(token_id)) for token_id in range(self.vocab_size))

    def is_special(self, token_id: int) -> bool:
        return token_id in self._special_ids

    def has_text(self, token_id: int) -> bool:
        return self._backend.id_to_token(token_id) is not None

    def is_byte_piece(self, token_id: int) -> bool:
        """A piece that stands for one byte (``<0x0A>``), in a vocabulary that is not byte-level."""
        piece = self._backend.id_to_token(token_id)
        return not self.byte_level and piece is not None and _BYTE_PIECE.fullmatch(piece) is not None

    def _compute_bytes(self, token_id: int) -> bytes:
        token = self._backend.id_to_token(token_id)
        if token is None:
            return b""
        if self.byte_level:
            return spelled_bytes(token)
        if byte_piece := _BYTE_PIECE.fullmatch(token):
            return bytes.fromhex(byte_piece[1])
        return token.encode() if self.is_special(token_id) else token.replace(_WORD_START, " ").encode()

    @cached_property
    def _backend_without_special(self) -> tokenizers.Tokenizer:
        # A copy, because the switch is a property of the backend and requests run in several threads.
        backend = tokenizers.Tokenizer.from_str(self._backend.to_str())
        backend.encode_special_tokens = True
        return backend


def _is_byte_level(backend: tokenizers.Tokenizer) -> bool:
    """False for the piece decoders whose output is known up to the next piece; raises `ValueError` for all others."""
    state: dict[str, Any] = {"type": "none"}
    if backend.decoder is not None:
        state = json.loads(backend.decoder.__getstate__())
    steps: list[dict[str, Any]] = state["decoders"] if state["type"] == "Sequence" else [state]
    names = [step["type"] for step in steps]
    if names == ["ByteLevel"]:
        return True
    if names == ["Metaspace"] or (names[:3] == ["Replace", "ByteFallback", "Fuse"] and steps[3:] in ([], [_STRIP])):
        return False
    raise ValueError(f"a tokenizer with the decoder {' + '.join(names)} is not supported")


def _without_surrogates(text: str) -> str:
    """JSON may hold half a surrogate pair, which is no character: it becomes U+FFFD, like any undecodable input."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text


def prefix_of(backend: tokenizers.Tokenizer) -> list[int]:
    """The ids that a tokenizer.json puts before every text."""
    plain: list[int] = backend.encode("a", add_special_tokens=False).ids
    full: list[int] = backend.encode("a", add_special_tokens=True).ids
    starts = range(len(full) - len(plain) + 1)
    return full[: next((start for start in starts if full[start : start + len(plain)] == plain), 0)]
