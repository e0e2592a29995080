"""Everything the gateway needs of a model's files to turn messages into tokens and tokens into text. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import tokenizers

from engine.errors import ModelLoadError
from engine.models.gguf_file import GGUFFile
from engine.models.hf_config import hf_eos_token_ids
from engine.models.json_file import JsonFile
from engine.models.layout import is_gguf
from engine.text.chat_template import ChatTemplate
from engine.text.gguf_vocab import gguf_token, gguf_tokenizer
from engine.text.tokenizer import Tokenizer, prefix_of


@dataclass(frozen=True, slots=True)
class TextAssets:
    tokenizer: Tokenizer
    chat_template: ChatTemplate
    eos_token_ids: tuple[int, ...]


def load_text(path: Path) -> TextAssets:
    """From a GGUF file or a folder in Hugging Face layout. Raises `ModelLoadError`."""
    return _from_gguf(GGUFFile.open(path)) if is_gguf(path) else _from_folder(path)


def _from_gguf(file: GGUFFile) -> TextAssets:
    tokenizer = gguf_tokenizer(file)
    template = ChatTemplate(file.get("tokenizer.chat_template", str), gguf_token(file, "bos"), gguf_token(file, "eos"))
    return TextAssets(tokenizer, template, tokenizer.eos_token_ids)


def _from_folder(folder: Path) -> TextAssets:
    settings = JsonFile.read_if_there(folder / "tokenizer_config.json")
    bos, eos = _token(settings, "bos_token"), _token(settings, "eos_token")
    eos_token_ids = hf_eos_token_ids(folder)
    tokenizer = _tokenizer(folder / "tokenizer.json", settings, bos, eos_token_ids)
    return TextAssets(tokenizer, ChatTemplate(_template(folder, settings), bos, eos), eos_token_ids)


def _tokenizer(path: Path, settings: JsonFile, bos: str | None, eos_token_ids: tuple[int, ...]) -> Tokenizer:
    if not path.exists():
        raise ModelLoadError("is missing", file=str(path))
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    except Exception as e:  # the library raises nothing more particular
        raise ModelLoadError(f"is not a tokenizer: {e}", file=str(path)) from e
    bos_ids = prefix_of(backend)
    if "add_bos_token" in settings.fields:
        bos_ids = []
        if settings.flag("add_bos_token", default=False) and bos is not None:
            bos_id = backend.token_to_id(bos)
            if bos_id is None:
                raise ModelLoadError(f"does not hold the BOS token {bos!r}", file=str(path))
            bos_ids = [bos_id]
    try:
        return Tokenizer(backend, bos_ids=bos_ids, eos_token_ids=eos_token_ids)
    except ValueError as e:
        raise ModelLoadError(str(e), file=str(path)) from e


def _token(settings: JsonFile, name: str) -> str | None:
    """A token is written as its text, or as an object with its text as `content`."""
    value = settings.fields.get(name)
    if isinstance(value, dict):
        value = value.get("content")
    if value is not None and not isinstance(value, str):
        raise settings.error(f"'{name}' must be a token, not {value!r}")
    return value


def _template(folder: Path, settings: JsonFile) -> str | None:
    """chat_template.jinja, or the field of tokenizer_config.json: one template, or several with names."""
    file = folder / "chat_template.jinja"
    if file.exists():
        try:
            return file.read_text("utf-8")
        except (OSError, UnicodeDecodeError) as e:
            raise ModelLoadError(f"cannot be read: {e}", file=str(file)) from e
    value = settings.fields.get("chat_template")
    if isinstance(value, list):
        named = {entry.get("name"): entry.get("template") for entry in value if isinstance(entry, dict)}
        value = named.get("default")
    if value is not None and not isinstance(value, str):
        raise settings.error("'chat_template' must be a template or a list of named templates")
    return value
