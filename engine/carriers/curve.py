"""CURVE keys of one end of a TCP connection: who we are and whom we talk to."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Self

import zmq

from engine.errors import ConfigError

_Z85_KEY = re.compile(rb"[0-9a-zA-Z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}")


@dataclass(frozen=True, slots=True, kw_only=True)
class CurveKeys:
    """Keys in their printable form (Z85, 40 characters). Raises `ConfigError` for one that is not a key.

    Attributes:
        peer_keys: public keys of the other end: an engine's authorized clients, or the one engine of a client.
    """

    public_key: bytes
    secret_key: bytes = field(repr=False)
    peer_keys: frozenset[bytes]

    def __post_init__(self) -> None:
        for name, key in (("public_key", self.public_key), ("secret_key", self.secret_key)):
            if not _Z85_KEY.fullmatch(key):
                raise ConfigError(f"curve {name} must be 40 characters of Z85")
        if not self.peer_keys:
            raise ConfigError("curve peer_keys must name at least one public key")
        for key in self.peer_keys:
            if not _Z85_KEY.fullmatch(key):
                raise ConfigError("curve peer_keys must be 40 characters of Z85 each")

    @classmethod
    def pair(cls, *, num_clients: int = 1) -> tuple[Self, list[Self]]:
        """Fresh keys that fit together: an engine's, and those of its clients."""
        public, secret = zmq.curve_keypair()
        pairs = [zmq.curve_keypair() for _ in range(num_clients)]
        engine = cls(public_key=public, secret_key=secret, peer_keys=frozenset(key for key, _ in pairs))
        return engine, [cls(public_key=p, secret_key=s, peer_keys=frozenset((public,))) for p, s in pairs]
