"""Tokenizers against transformers on a nasty corpus.

tests/data/tiny_byte_level.json and tiny_pieces.json are vocabularies trained on the corpus itself: a byte-level one
and one of SentencePiece form, with byte pieces.

transformers 5.24 reads GGUF files of SmolLM with GPT-2's split alone, though the model's own tokenizer makes every
digit a word first. So the oracle for that split is transformers on what lies between the digits.
"""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Callable
from itertools import groupby
from pathlib import Path
from typing import Any

import gguf
import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast, Qwen2Tokenizer

from engine.errors import ModelLoadError
from engine.text.assets import load_text
from engine.text.tokenizer import Tokenizer

DATA = Path(__file__).parent.parent / "data"
TEXTS: list[str] = json.loads((DATA / "nasty_texts.json").read_text())
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5

Encode = Callable[[str], list[int]]


def tiny(name: str) -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_file(str(DATA / f"{name}.json"))


def vocabulary() -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Tokens without the two user-defined ones, and merges, of the byte-level vocabulary."""
    model = json.loads((DATA / "tiny_byte_level.json").read_text())["model"]
    return model["vocab"], [tuple(merge) for merge in model["merges"]]


@pytest.fixture
def write_gguf(tmp_path: Path) -> Callable[..., Path]:
    """A GGUF file with the byte-level vocabulary; keyword arguments change its metadata, None removes."""

    def write(pre: str = "gpt-2", extra: list[tuple[str, int]] | None = None, **changes: Any) -> Path:
        vocab, merges = vocabulary()
        tokens = [(token, CONTROL if token in SPECIAL else NORMAL) for token in sorted(vocab, key=vocab.__getitem__)]
        tokens += extra if extra is not None else [("<think>", USER_DEFINED), ("</think>", USER_DEFINED)]
        values: dict[str, Any] = {
            "model": "gpt2",
            "pre": pre,
            "tokens": [token for token, _ in tokens],
            "token_type": [kind for _, kind in tokens],
            "merges": [" ".join(merge) for merge in merges],
            "bos_token_id": 0,
            "eos_token_id": 2,
        }
        path = tmp_path / "vocabulary.gguf"
        writer = gguf.GGUFWriter(path, "llama")
        for key, value in (values | changes).items():
            if value is not None:
                kinds = {bool: writer.add_bool, int: writer.add_uint32, str: writer.add_string}
                kinds.get(type(value), writer.add_array)(f"tokenizer.ggml.{key}", value)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.close()
        return path

    return write


@pytest.fixture
def write_folder(tmp_path: Path) -> Callable[..., Path]:
    """A folder with a tokenizer as transformers saves it; keyword arguments go into tokenizer_config.json."""

    def write(backend: tokenizers.Tokenizer, **settings: Any) -> Path:
        PreTrainedTokenizerFast(tokenizer_object=backend, **settings).save_pretrained(tmp_path)
        (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 2}))
        return tmp_path

    return write


@pytest.fixture
def byte_level() -> Tokenizer:
    return Tokenizer(tiny("tiny_byte_level"))


def plain(tokenizer: PreTrainedTokenizerBase) -> Encode:
    return lambda text: tokenizer.encode(text, add_special_tokens=False)


def digits_apart(encode: Encode) -> Encode:
    """Each numeric character, and each stretch between them, encoded for itself."""

    def apart(text: str) -> list[int]:
        numbered = enumerate(text)
        groups = groupby(numbered, lambda item: item[0] if unicodedata.category(item[1])[0] == "N" else -1)
        return [token_id for _, group in groups for token_id in encode("".join(c for _, c in group))]

    return apart


def read_by_transformers(path: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)


def qwen2_of_transformers(path: Path) -> PreTrainedTokenizerBase:
    """The model's own class, since the reader of GGUF files leaves out that it composes characters first."""
    vocab, merges = vocabulary()
    tokenizer = Qwen2Tokenizer(vocab, merges)
    tokenizer.add_special_tokens({"additional_special_tokens": [AddedToken(t, special=True) for t in SPECIAL]})
    tokenizer.add_tokens(["<think>", "</think>"])
    return tokenizer


ORACLES: dict[str, Callable[[Path], PreTrainedTokenizerBase]] = {
    "gpt-2": read_by_transformers,
    "smollm": read_by_transformers,
    "llama-bpe": read_by_transformers,
    "smaug-bpe": read_by_transformers,
    "qwen2": qwen2_of_transformers,
}


@pytest.mark.parametrize("pre", ORACLES)
def test_every_split_of_gguf_files_equals_transformers(write_gguf: Callable[..., Path], pre: str) -> None:
    path = write_gguf(pre)
    expected, tokenizer = plain(ORACLES[pre](path)), load_text(path).tokenizer
    if pre == "smollm":
        expected = digits_apart(expected)

    for text in TEXTS:
        assert tokenizer.encode(text) == expected(text), text


@pytest.mark.parametrize("pre", ["gpt-2", "llama-bpe", "smaug-bpe", "qwen2"])
def test_words_are_cut_where_transformers_cuts_them(write_gguf: Callable[..., Path], pre: str) -> None:
    path = write_gguf(pre)
    expected = ORACLES[pre](path).backend_tokenizer.pre_tokenizer
    found = load_text(path).tokenizer._backend.pre_tokenizer

    for text in TEXTS:
        assert found.pre_tokenize_str(text) == expected.pre_tokenize_str(text), text


@pytest.mark.model
def test_smollm2_equals_transformers_both_ways(smollm2_path: Path) -> None:
    oracle = AutoTokenizer.from_pretrained(smollm2_path.parent, gguf_file=smollm2_path.name)
    encode, tokenizer = digits_apart(plain(oracle)), load_text(smollm2_path).tokenizer

    assert tokenizer.vocab_size == 49152
    for text in TEXTS:
        ids = tokenizer.encode(text)
        assert ids == encode(text), text
        assert tokenizer.encode(text, add_bos=True) == ids
        assert tokenizer.decode(ids, skip_special=False) == text
        assert tokenizer.decode(ids) == oracle.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize("name", ["tiny_byte_level", "tiny_pieces"])
def test_a_folder_equals_transformers_both_ways(write_folder: Callable[..., Path], name: str) -> None:
    backend = tiny(name)
    backend.post_processor = processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", 1)], pair="$A $B"
    )
    folder = write_folder(backend)
    oracle, tokenizer = AutoTokenizer.from_pretrained(folder), load_text(folder).tokenizer

    for text in TEXTS:
        ids = tokenizer.encode(text)
        assert ids == oracle.encode(text, add_special_tokens=False), text
        assert tokenizer.encode(text, add_bos=True) == oracle.encode(text)
        for skip in (True, False):
            assert tokenizer.decode(ids, skip_special=skip) == oracle.decode(ids, skip_special_tokens=skip), text


@pytest.mark.parametrize("name", ["tiny_byte_level", "tiny_pieces"])
def test_the_bytes_of_all_tokens_are_the_bytes_of_the_text(name: str) -> None:
    tokenizer = Tokenizer(tiny(name))

    for text in TEXTS:
        ids = tokenizer.encode(text)
        joined = b"".join(tokenizer.token_bytes(token_id) for token_id in ids).decode()
        # Only at its very beginning does a text of pieces lose something: the space of the first word.
        expected = joined if tokenizer.byte_level else joined.removeprefix(" ")
        assert tokenizer.decode(ids, skip_special=False) == expected, text


def test_special_tokens_in_the_text_are_ids_or_ordinary_text_as_asked(byte_level: Tokenizer) -> None:
    text = "a<|im_end|>b"
    as_id, as_text = byte_level.encode(text), byte_level.encode(text, special=False)

    assert [token_id for token_id in as_id if byte_level.is_special(token_id)] == [2]
    assert not any(byte_level.is_special(token_id) for token_id in as_text)
    assert byte_level.decode(as_text) == text
    assert byte_level.decode(as_id) == "ab"
    assert byte_level.decode(as_id, skip_special=False) == text
    assert byte_level.encode(text) == as_id


def test_user_defined_tokens_are_whole_but_not_special(write_gguf: Callable[..., Path]) -> None:
    tokenizer = load_text(write_gguf()).tokenizer
    ids = tokenizer.encode("<think>a</think>")

    assert len(ids) == 3
    assert not any(tokenizer.is_special(token_id) for token_id in ids)
    assert tokenizer.decode(ids) == "<think>a</think>"


def test_tokens_outside_the_byte_alphabet_stand_for_themselves(write_gguf: Callable[..., Path]) -> None:
    tokenizer = load_text(write_gguf(extra=[("<｜end▁of▁turn｜>", CONTROL)])).tokenizer
    (token_id,) = tokenizer.encode("<｜end▁of▁turn｜>")

    assert tokenizer.is_special(token_id)
    assert tokenizer.token_bytes(token_id).decode() == "<｜end▁of▁turn｜>"


def test_padding_of_the_vocabulary_has_no_text(write_gguf: Callable[..., Path]) -> None:
    tokenizer = load_text(write_gguf(extra=[("[PAD900]", UNUSED)])).tokenizer
    padding = len(vocabulary()[0])

    assert tokenizer.token_bytes(padding) == b""
    assert tokenizer.token_bytes(10**6) == b""
    assert tokenizer.decode([padding, 10**6]) == ""
    assert padding not in tokenizer.encode("[PAD900]")


def test_llama3_takes_a_word_that_is_a_token_whole(write_gguf: Callable[..., Path]) -> None:
    word = "ĠVi\u00e1\u00bb\u0129t"  # the bytes of " Việt", which no merges lead to

    assert len(load_text(write_gguf("llama-bpe", extra=[(word, NORMAL)])).tokenizer.encode(" Việt")) == 1
    assert len(load_text(write_gguf("gpt-2", extra=[(word, NORMAL)])).tokenizer.encode(" Việt")) > 1


@pytest.mark.parametrize(
    ("pre", "changes", "expected"),
    [
        ("gpt-2", {}, []),
        ("gpt-2", {"add_bos_token": True}, [0]),
        ("llama-bpe", {}, [0]),
        ("llama-bpe", {"add_bos_token": False}, []),
        ("llama-bpe", {"bos_token_id": None}, []),
        ("smaug-bpe", {}, []),
    ],
)
def test_a_raw_prompt_begins_with_bos_where_the_file_or_its_kind_says_so(
    write_gguf: Callable[..., Path], pre: str, changes: dict[str, Any], expected: list[int]
) -> None:
    tokenizer = load_text(write_gguf(pre, **changes)).tokenizer

    assert tokenizer.encode("", add_bos=True) == expected
    assert tokenizer.encode("") == []


@pytest.mark.parametrize(("add_bos", "expected"), [(None, []), (True, [1]), (False, [])])
def test_a_folder_says_whether_to_begin_with_bos(
    write_folder: Callable[..., Path], add_bos: bool | None, expected: list[int]
) -> None:
    settings = {} if add_bos is None else {"add_bos_token": add_bos}
    folder = write_folder(tiny("tiny_byte_level"), bos_token="<|im_start|>", **settings)
    oracle = AutoTokenizer.from_pretrained(folder)

    assert load_text(folder).tokenizer.encode("", add_bos=True) == expected == oracle.encode("")


def test_end_tokens_come_from_the_file(write_gguf: Callable[..., Path], write_folder: Callable[..., Path]) -> None:
    assert load_text(write_gguf(eot_token_id=1)).eos_token_ids == (2, 1)
    assert load_text(write_folder(tiny("tiny_byte_level"))).eos_token_ids == (2,)


def test_half_a_surrogate_pair_is_undecodable_input(byte_level: Tokenizer) -> None:
    assert byte_level.encode("a\ud800b") == byte_level.encode("a\ufffdb")
    assert byte_level.encode("\ud83d\ude00") == byte_level.encode("😀")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pre": "qwen35"}, "pre-tokenizer 'qwen35' is not known"),
        ({"pre": None}, "'tokenizer.ggml.pre' is missing"),
        ({"model": "llama"}, "tokenizer of type 'llama' is not supported"),
        ({"model": None}, "'tokenizer.ggml.model' is missing"),
        ({"tokens": None}, "'tokenizer.ggml.tokens' is missing"),
        ({"merges": None}, "'tokenizer.ggml.merges' is missing"),
        ({"merges": ["a zebra"]}, "merge 'a zebra' is not in the vocabulary"),
        ({"bos_token_id": 5000}, "bos token 5000 lies outside the vocabulary"),
    ],
)
def test_a_vocabulary_that_cannot_be_rebuilt_is_refused(
    write_gguf: Callable[..., Path], changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelLoadError, match=message) as caught:
        load_text(write_gguf(**changes))
    assert caught.value.file.endswith("vocabulary.gguf")


def test_a_folder_without_a_tokenizer_is_refused(write_folder: Callable[..., Path]) -> None:
    folder = write_folder(tiny("tiny_byte_level"))
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ModelLoadError, match=r"tokenizer\.json: is missing"):
        load_text(folder)


@pytest.mark.parametrize("content", ["", "{}", '{"model": 3}'])
def test_a_malformed_tokenizer_is_refused(write_folder: Callable[..., Path], content: str) -> None:
    folder = write_folder(tiny("tiny_byte_level"))
    (folder / "tokenizer.json").write_text(content)
    with pytest.raises(ModelLoadError, match=r"tokenizer\.json: is not a tokenizer"):
        load_text(folder)


@pytest.mark.parametrize("settings", [{"add_bos_token": "yes"}, {"add_bos_token": True, "bos_token": "<absent>"}])
def test_malformed_tokenizer_settings_are_refused(write_folder: Callable[..., Path], settings: dict[str, Any]) -> None:
    folder = write_folder(tiny("tiny_byte_level"))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    with pytest.raises(ModelLoadError, match=r"add_bos_token|BOS token '<absent>'"):
        load_text(folder)


@pytest.mark.parametrize("decoder", [None, decoders.WordPiece(), decoders.CTC()], ids=["none", "WordPiece", "CTC"])
def test_a_decoder_whose_text_cannot_be_streamed_is_refused(
    write_folder: Callable[..., Path], decoder: decoders.Decoder | None
) -> None:
    backend = tokenizers.Tokenizer(models.WordLevel({"a": 0, "b": 1, "<unk>": 2}, "<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    if decoder is not None:
        backend.decoder = decoder
    with pytest.raises(ModelLoadError, match=r"tokenizer\.json: a tokenizer with the decoder \w+ is not supported"):
        load_text(write_folder(backend))


def test_what_is_no_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="there is no such file"):
        load_text(tmp_path / "absent.gguf")
