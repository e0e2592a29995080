"""Raw credentials: how API keys and admin tokens are made, told from typos, and compared with what is kept of them.

``eh_<public id>_<secret><checksum>`` is an API key, ``eha_…`` an admin token. The public id may be shown and finds the
holder; the secret has 256 random bits; the checksum lets a typo be refused without a lookup and a scanner be sure. Only
digests are kept, under a pepper that is not in the database. Knows nothing of who holds what.
"""

from __future__ import annotations

import hmac
import re
import secrets
import string
import zlib
from collections.abc import Mapping
from typing import Literal

from gateway.domain.tenancy import Secret

Prefix = Literal["eh_", "eha_"]

API_KEY: Prefix = "eh_"
ADMIN_TOKEN: Prefix = "eha_"  # noqa: S105 - a prefix is no secret

SCANNER_PATTERN = r"\beha?_[0-9A-Za-z]{12}_[0-9A-Za-z]{49}\b"
"""For secret scanners: a regular expression that finds both kinds in any text."""

MIN_PEPPER_BYTES = 32

_ALPHABET = string.digits + string.ascii_uppercase + string.ascii_lowercase
_PUBLIC_ID_CHARACTERS = 12
_SECRET_BITS = 256
_SECRET_CHARACTERS = 43  # 62**43 is just above 2**256
_CHECKSUM_CHARACTERS = 6  # 62**6 is above 2**32
_SHAPES = {
    prefix: re.compile(
        rb"%b([0-9A-Za-z]{%d})_[0-9A-Za-z]{%d}"
        % (prefix.encode(), _PUBLIC_ID_CHARACTERS, _SECRET_CHARACTERS + _CHECKSUM_CHARACTERS)
    ).fullmatch
    for prefix in (API_KEY, ADMIN_TOKEN)
}


_LEFTOVER = re.compile(r"eha?_[0-9A-Za-z]{12}_[0-9A-Za-z]*")


def hide_credentials(text: str) -> str:
    """The text without what looks like a credential, or like the beginning of one whose public id is whole: people
    paste keys in the wrong places, and what they sent is repeated to them."""
    return _LEFTOVER.sub("[redacted]", text) if "eh" in text else text


def holds_credential(text: str) -> bool:
    """Whether `hide_credentials` would hide something."""
    return _LEFTOVER.search(text) is not None


def issue(prefix: Prefix) -> tuple[str, str]:
    """A new raw credential, to be shown once, and its public id."""
    public_id = _base62(secrets.randbelow(62**_PUBLIC_ID_CHARACTERS), _PUBLIC_ID_CHARACTERS)
    unchecked = f"{prefix}{public_id}_{_base62(secrets.randbits(_SECRET_BITS), _SECRET_CHARACTERS)}"
    return unchecked + _checksum(unchecked.encode()), public_id


def parse(raw: bytes | str, prefix: Prefix) -> str | None:
    """The public id of what may be a credential of this kind; None if it cannot be one."""
    if isinstance(raw, str):
        raw = raw.encode("ascii", "replace")  # to "?", which no credential has
    shape = _SHAPES[prefix](raw)
    if shape is None or _checksum(raw[:-_CHECKSUM_CHARACTERS]).encode() != raw[-_CHECKSUM_CHARACTERS:]:
        return None
    return shape[1].decode()


def public_id_in(text: str, prefix: Prefix) -> str | None:
    """The public id in what somebody calls a credential by: that alone, or the raw credential, whole or not.

    None if it is neither. For finding a credential, never for letting anybody in: nothing behind it is looked at.
    """
    found = re.fullmatch(rf"{prefix}([0-9A-Za-z]{{12}})(?:_[0-9A-Za-z]*)?|([0-9A-Za-z]{{12}})", text)
    return None if found is None else found[1] or found[2]


class Peppers:
    """The secrets that digests are made with.

    Args:
        secrets_by_id: of `MIN_PEPPER_BYTES` or more each; the first makes new digests, all are compared with.
    """

    def __init__(self, secrets_by_id: Mapping[str, bytes]) -> None:
        assert secrets_by_id, "there is a first pepper"
        assert all(len(pepper) >= MIN_PEPPER_BYTES for pepper in secrets_by_id.values()), "peppers are long"
        self._secrets = dict(secrets_by_id)
        self._first = next(iter(self._secrets))

    def __repr__(self) -> str:
        return f"Peppers({', '.join(self._secrets)})"

    def digest(self, raw: str) -> tuple[bytes, str]:
        """What to keep of a raw credential beside its public id: digest and pepper id, in the order of `Secret`."""
        return hmac.digest(self._secrets[self._first], raw.encode(), "sha256"), self._first

    def matches(self, raw: bytes | str, kept: Secret) -> bool:
        """Whether this is the credential; False also if its pepper is gone. Tells nothing by the time it takes."""
        pepper = self._secrets.get(kept.pepper_id)
        if pepper is None:
            return False
        if isinstance(raw, str):
            raw = raw.encode()
        return hmac.compare_digest(hmac.digest(pepper, raw, "sha256"), kept.digest)


def _checksum(unchecked: bytes) -> str:
    return _base62(zlib.crc32(unchecked), _CHECKSUM_CHARACTERS)


def _base62(number: int, num_characters: int) -> str:
    characters = []
    for _ in range(num_characters):
        number, digit = divmod(number, 62)
        characters.append(_ALPHABET[digit])
    return "".join(reversed(characters))
