"""A tokenizer from the metadata of a GGUF file: the byte-level BPE vocabularies of the architectures we run.

A file names its pre-tokenizer (the split into words before merging) by a word and does not carry it, so each is
written down here as the model's own tokenizer.json has it. An unknown word is an error: another split gives other
tokens, silently.
"""

from __future__ import annotations

from dataclasses import dataclass

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from engine.errors import ModelLoadError
from engine.models.gguf_config import gguf_eos_token_ids
from engine.models.gguf_file import GGUFFile
from engine.text.tokenizer import Tokenizer

_CONTROL, _USER_DEFINED, _UNUSED = 3, 4, 5

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3_WORDS = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_REST}"
_QWEN2_WORDS = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_REST}"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Split:
    """How a vocabulary cuts text into words.

    Attributes:
        words: the pattern of one word; None is GPT-2's own, which the library has built in.
        digits: every digit is a word of its own, before all else.
        nfc: text is composed (Unicode NFC) first.
        whole_words: a word that is a token is taken whole, without merging.
        bos: a raw prompt begins with the BOS token, if the file does not say.
    """

    words: str | None = None
    digits: bool = False
    nfc: bool = False
    whole_words: bool = False
    bos: bool = False


_GPT2 = _Split()
_SMOLLM = _Split(digits=True)
_LLAMA3 = _Split(words=_LLAMA3_WORDS, whole_words=True, bos=True)
_SPLITS = {
    "gpt-2": _GPT2,
    "smollm": _SMOLLM,
    "starcoder": _SMOLLM,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "llama-bpe": _LLAMA3,
    # Llama 3 vocabularies whose files do not add BOS; SmolLM3 is one.
    "smaug-bpe": _Split(words=_LLAMA3_WORDS, whole_words=True),
    "qwen2": _Split(words=_QWEN2_WORDS, nfc=True),
}


def gguf_tokenizer(file: GGUFFile) -> Tokenizer:
    """Raises `ModelLoadError` for a kind of vocabulary or pre-tokenizer that is not known, or missing metadata."""
    kind = file.require("tokenizer.ggml.model", str)
    if kind != "gpt2":
        raise ModelLoadError(
            f"tokenizer of type '{kind}' is not supported in GGUF files (only byte-level BPE, 'gpt2'); "
            "use the model's folder with its tokenizer.json",
            file=str(file.path),
        )
    name = file.require("tokenizer.ggml.pre", str)
    split = _SPLITS.get(name)
    if split is None:
        raise ModelLoadError(f"pre-tokenizer '{name}' is not known (only {', '.join(_SPLITS)})", file=str(file.path))
    return Tokenizer(_backend(file, split), bos_ids=_bos_ids(file, split), eos_token_ids=gguf_eos_token_ids(file))


def gguf_token(file: GGUFFile, name: str) -> str | None:
    """The text of a named token (``bos``, ``eos``), if the file names it."""
    token_id = file.get(f"tokenizer.ggml.{name}_token_id", int)
    tokens = file.require("tokenizer.ggml.tokens", list)
    if token_id is None:
        return None
    if not 0 <= token_id < len(tokens):
        raise ModelLoadError(f"{name} token {token_id} lies outside the vocabulary", file=str(file.path))
    return str(tokens[token_id])


def _bos_ids(file: GGUFFile, split: _Split) -> list[int]:
    bos = file.get("tokenizer.ggml.bos_token_id", int)
    return [bos] if bos is not None and file.get("tokenizer.ggml.add_bos_token", bool, split.bos) else []


def _backend(file: GGUFFile, split: _Split) -> tokenizers.Tokenizer:
    tokens: list[str] = file.require("tokenizer.ggml.tokens", list)
    types: list[int] = file.get("tokenizer.ggml.token_type", list, [])
    kinds = dict(enumerate(types))
    vocab = {token: i for i, token in enumerate(tokens) if kinds.get(i) != _UNUSED}
    backend = tokenizers.Tokenizer(_bpe(file, vocab, split))
    if split.nfc:
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = _pre_tokenizer(split)
    backend.decoder = decoders.ByteLevel()
    for kind, special in ((_CONTROL, True), (_USER_DEFINED, False)):
        added = [AddedToken(t, normalized=False, special=special) for i, t in enumerate(tokens) if kinds.get(i) == kind]
        (backend.add_special_tokens if special else backend.add_tokens)(added)
    return backend


def _bpe(file: GGUFFile, vocab: dict[str, int], split: _Split) -> models.BPE:
    merges: list[tuple[str, str]] = []
    for merge in file.require("tokenizer.ggml.merges", list):
        left, _, right = str(merge).partition(" ")
        if left + right not in vocab or left not in vocab or right not in vocab:
            raise ModelLoadError(f"merge '{merge}' is not in the vocabulary", file=str(file.path))
        merges.append((left, right))
    return models.BPE(vocab, merges, ignore_merges=split.whole_words)


def _pre_tokenizer(split: _Split) -> pre_tokenizers.PreTokenizer:
    steps: list[pre_tokenizers.PreTokenizer] = []
    if split.digits:
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    if split.words is not None:
        steps.append(pre_tokenizers.Split(Regex(split.words), behavior="isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split.words is None))
    return pre_tokenizers.Sequence(steps)
