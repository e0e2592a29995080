"""The alphabet of byte-level vocabularies (GPT-2): each of the 256 bytes is written as one printable character."""

from __future__ import annotations


def _alphabet() -> dict[str, int]:
    """Character → byte. Printable bytes stand for themselves, the rest for U+0100 and up, in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_BYTE_OF_CHARACTER = _alphabet()


def spelled_bytes(token: str) -> bytes:
    """The bytes a token is written for; a token with any other character (an added token) stands for itself."""
    try:
        return bytes(_BYTE_OF_CHARACTER[character] for character in token)
    except KeyError:
        return token.encode()
