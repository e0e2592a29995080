"""Streamed text: all pushes and the flush together are the decoded whole, for any ids at all."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, pre_tokenizers

from engine.text.assets import load_text
from engine.text.detokenizer import Detokenizer
from engine.text.tokenizer import Tokenizer

DATA = Path(__file__).parent.parent / "data"
TEXTS: list[str] = json.loads((DATA / "nasty_texts.json").read_text())


def tiny(name: str) -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_file(str(DATA / f"{name}.json"))


def metaspace() -> tokenizers.Tokenizer:
    """The piece vocabulary with the other decoder such vocabularies come with."""
    backend = tiny("tiny_pieces")
    backend.normalizer = None
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    backend.decoder = decoders.Metaspace(prepend_scheme="always")
    return backend


TOKENIZERS = {
    "bytes": Tokenizer(tiny("tiny_byte_level")),
    "pieces": Tokenizer(tiny("tiny_pieces")),
    "metaspace": Tokenizer(metaspace()),
}
NAMES = st.sampled_from(sorted(TOKENIZERS))
# Any ids: special ones, single bytes that make no character, and ids beyond the vocabulary.
IDS = st.lists(st.integers(0, 1110) | st.integers(0, 5) | st.integers(150, 270) | st.integers(655, 930), max_size=30)


def stream(tokenizer: Tokenizer, ids: list[int], *, skip_special: bool) -> list[str]:
    detokenizer = Detokenizer(tokenizer, skip_special=skip_special)
    return [*(detokenizer.push(token_id) for token_id in ids), detokenizer.flush()]


@given(NAMES, IDS, st.booleans())
def test_any_ids_stream_to_the_text_of_the_whole(name: str, ids: list[int], skip_special: bool) -> None:
    tokenizer = TOKENIZERS[name]

    assert "".join(stream(tokenizer, ids, skip_special=skip_special)) == tokenizer.decode(
        ids, skip_special=skip_special
    )


@given(st.binary(max_size=40))
def test_any_bytes_stream_to_the_text_of_the_whole(content: bytes) -> None:
    tokenizer = TOKENIZERS["bytes"]
    id_of = {tokenizer.token_bytes(token_id): token_id for token_id in range(3, tokenizer.vocab_size)}
    ids = [id_of[bytes([byte])] for byte in content]

    assert "".join(stream(tokenizer, ids, skip_special=True)) == content.decode(errors="replace")


@given(NAMES, st.text(max_size=30))
def test_any_text_streams_without_a_replacement_character_on_the_way(name: str, text: str) -> None:
    tokenizer = TOKENIZERS[name]
    ids = tokenizer.encode(text, special=False)
    whole = tokenizer.decode(ids)
    pieces = stream(tokenizer, ids, skip_special=True)

    assert "".join(pieces) == whole
    assert sum(piece.count("\ufffd") for piece in pieces) == whole.count("\ufffd")


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("skip_special", [True, False])
def test_the_nasty_corpus_streams_to_the_text_of_the_whole(name: str, skip_special: bool) -> None:
    tokenizer = TOKENIZERS[name]

    for text in TEXTS:
        ids = tokenizer.encode(text)
        whole = tokenizer.decode(ids, skip_special=skip_special)
        assert "".join(stream(tokenizer, ids, skip_special=skip_special)) == whole, text


@pytest.mark.model
def test_the_nasty_corpus_streams_with_the_real_vocabulary(smollm2_path: Path) -> None:
    tokenizer = load_text(smollm2_path).tokenizer

    for text in TEXTS:
        assert "".join(stream(tokenizer, tokenizer.encode(text), skip_special=False)) == text


def test_a_character_of_several_tokens_comes_with_its_last_token() -> None:
    tokenizer = TOKENIZERS["bytes"]
    id_of = {tokenizer.token_bytes(token_id): token_id for token_id in range(3, tokenizer.vocab_size)}
    detokenizer = Detokenizer(tokenizer)
    ids = [id_of[bytes([byte])] for byte in "é😀!".encode()]

    assert [detokenizer.push(token_id) for token_id in ids] == ["", "é", "", "", "", "😀", "!"]


def test_an_unfinished_character_becomes_one_replacement_character_at_the_end() -> None:
    tokenizer = TOKENIZERS["bytes"]
    id_of = {tokenizer.token_bytes(token_id): token_id for token_id in range(3, tokenizer.vocab_size)}
    detokenizer = Detokenizer(tokenizer)

    assert [detokenizer.push(id_of[bytes([byte])]) for byte in "😀".encode()[:3]] == ["", "", ""]
    assert detokenizer.flush() == "\ufffd"


def test_pieces_keep_their_leading_space_but_for_the_first() -> None:
    tokenizer = TOKENIZERS["pieces"]
    detokenizer = Detokenizer(tokenizer)
    pieces = [detokenizer.push(token_id) for token_id in tokenizer.encode("The quick fox")]

    assert pieces[0][0] == "T"
    assert "".join(pieces) == "The quick fox"


def test_ids_without_text_do_not_make_the_next_piece_the_first() -> None:
    tokenizer = TOKENIZERS["pieces"]
    first, *_, last = tokenizer.encode("The quick fox")
    bos, beyond = 1, tokenizer.vocab_size
    detokenizer = Detokenizer(tokenizer)
    pieces = [detokenizer.push(token_id) for token_id in (first, bos, beyond, first, last)]

    assert pieces[1:3] == ["", ""]
    assert pieces[3] == " " + pieces[0]


def test_byte_pieces_come_when_their_run_ends() -> None:
    tokenizer = TOKENIZERS["pieces"]
    detokenizer = Detokenizer(tokenizer)
    ids = tokenizer.encode("a日b")
    pieces = [detokenizer.push(token_id) for token_id in ids]

    assert pieces == ["a", "", "", "", "日b"]


def test_the_work_for_pieces_is_linear_in_their_number(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = TOKENIZERS["pieces"]
    ids = tokenizer.encode(" ".join(TEXTS) * 3)
    decode, decoded = tokenizer.decode, []

    def counting(ids: list[int], *, skip_special: bool = True) -> str:
        decoded.append(len(ids))
        return decode(ids, skip_special=skip_special)

    monkeypatch.setattr(tokenizer, "decode", counting)
    stream(tokenizer, ids, skip_special=True)

    assert sum(decoded) <= 4 * len(ids)
