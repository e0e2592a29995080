"""Who sends this request: from its headers to a principal. The raw key never leaves `Authenticator.authenticate`."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable

from gateway.domain.principal import Principal
from gateway.errors import InvalidKey
from gateway.services.ports import KeyStore

BOOTSTRAP = Principal(organization="default", team="default", key_id="bootstrap")
"""The identity of a hub that has one key and no organizations."""


class SingleKeyStore:
    """A store that knows one key, by its digest."""

    def __init__(self, digest: bytes, principal: Principal = BOOTSTRAP) -> None:
        self._digest = digest
        self._principal = principal

    @classmethod
    def for_key(cls, key: str) -> SingleKeyStore:
        return cls(_digest(key.encode()))

    def find(self, digest: bytes) -> Principal | None:
        return self._principal if hmac.compare_digest(digest, self._digest) else None


class Authenticator:
    """Accepts a key as ``Authorization: Bearer`` or as ``x-api-key``, as the two families of clients send it."""

    def __init__(self, keys: KeyStore) -> None:
        self._keys = keys

    def authenticate(self, headers: Iterable[tuple[bytes, bytes]]) -> Principal:
        """Raises `InvalidKey` if there is no key or an unknown one.

        Args:
            headers: name and value pairs, names in lower case.
        """
        for name, value in headers:
            if name == b"authorization":
                scheme, _, key = value.partition(b" ")
                if scheme.lower() == b"bearer" and (key := key.strip()):
                    break
            elif name == b"x-api-key" and (key := value.strip()):
                break
        else:
            raise InvalidKey(
                "You didn't provide an API key. Send it in the Authorization header: 'Authorization: Bearer YOUR_KEY'."
            )
        principal = self._keys.find(_digest(key))
        if principal is None:
            raise InvalidKey("Incorrect API key provided.")
        return principal


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
