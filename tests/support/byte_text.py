"""A vocabulary of single bytes, so that every text can be cut anywhere, with the special tokens of a chat model."""

from __future__ import annotations

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from engine.text.assets import TextAssets
from engine.text.chat_template import ChatTemplate
from engine.text.tokenizer import Tokenizer

EOS = 257
START = 256
VOCAB_SIZE = 258
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_assets() -> TextAssets:
    """Token ids 0 to 255 are bytes in the order of the byte-level alphabet, not of their value: use `ids_of`."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    tokenizer = Tokenizer(backend, eos_token_ids=(EOS,))
    return TextAssets(tokenizer, ChatTemplate(TEMPLATE, None, "<|im_end|>"), (EOS,))


def ids_of(assets: TextAssets, text: str) -> list[int]:
    """One token for each byte of UTF-8."""
    ids = assets.tokenizer.encode(text)
    assert len(ids) == len(text.encode())
    return ids
