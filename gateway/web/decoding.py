"""From body bytes to wire structs, with errors that name the field. The same for every protocol."""

from __future__ import annotations

import re
from typing import Generic, TypeVar

import msgspec

from gateway.errors import InvalidRequest

T = TypeVar("T")

MAX_ECHO = 200
"""Most characters of what a caller made up that a message repeats."""

_HALF = re.compile(rb"\\u[dD][89a-fA-F]")
_ESCAPES = re.compile(
    rb"((?:\\[^u])+|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2})|\\u[dD][89a-fA-F][0-9a-fA-F]{2}",
    re.DOTALL,
)
r"""Other escapes and whole pairs, in group 1, or half a pair. The others matter for ``\\ud83d``, which is text."""
_MISSING = re.compile(r"missing required field `(\w+)`")
_PATH = re.compile(r" - at `(?:key` in `)?\$\.?([^`]*)`$")
_UNKNOWN = re.compile(r"contains unknown field `(.*?)`(?: - at `\$\.?([^`]*)`)?$", re.DOTALL)


class BodyDecoder(Generic[T]):
    """Decodes one kind of body. The content type is not looked at: clients send what they like."""

    def __init__(self, kind: type[T]) -> None:
        self._kind = kind
        self._decoder = msgspec.json.Decoder(kind)

    def decode(self, body: bytes) -> T:
        """Raises `InvalidRequest`, with `param` set if it is about a field."""
        try:
            return self._decoder.decode(body)
        except msgspec.ValidationError as e:
            raise explain(e) from e
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as e:
            return self._decode_with_lone_surrogates(body, e)

    def _decode_with_lone_surrogates(self, body: bytes, error: Exception) -> T:
        r"""A client that cuts text within an emoji sends half of a \uD83D\uDE00 pair, which is JSON but not text.

        The half becomes a replacement character, as everywhere else in the world. Anything else is malformed.
        """
        malformed = InvalidRequest("We could not parse the JSON body of your request. The body must be valid JSON.")
        if _HALF.search(body) is None:
            raise malformed from error
        try:
            return self._decoder.decode(_ESCAPES.sub(_whole, body))
        except msgspec.ValidationError as e:
            raise explain(e) from e
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as e:
            raise malformed from e


def _whole(escape: re.Match[bytes]) -> bytes:
    return escape[1] or rb"\ufffd"


def explain(error: msgspec.ValidationError) -> InvalidRequest:
    """What is wrong, in the words of our API, with the field that is at fault."""
    message = str(error)
    if unknown := _UNKNOWN.search(message):
        name = unknown[1][:MAX_ECHO]
        param = f"{unknown[2]}.{name}" if unknown[2] else name
        return InvalidRequest(f"Unknown parameter: '{param}'.", param=param)
    if missing := _MISSING.search(message):
        where = _PATH.search(message)
        param = f"{where[1]}.{missing[1]}" if where and where[1] else missing[1]
        return InvalidRequest(f"Missing required parameter: '{param}'.", param=param)
    if path := _PATH.search(message):
        param = path[1].replace("[...]", "")
        return InvalidRequest(f"Invalid value for '{param}': {_clause(message[: path.start()])}.", param=param)
    return InvalidRequest(f"Invalid request body: {_clause(message)}.")


def _clause(sentence: str) -> str:
    """As a part of a sentence of ours; of a long one, which quotes a value, the begin."""
    return sentence[:1].lower() + (sentence[1:] if len(sentence) <= MAX_ECHO else f"{sentence[1:MAX_ECHO]}…")
