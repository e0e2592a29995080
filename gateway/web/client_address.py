"""Where a request came from: the other end of the connection, or whom a trusted proxy names."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from litestar.types import HTTPScope

from gateway.domain.networks import Address, Network, is_within, parse_address


def client_address(scope: HTTPScope, trusted: Sequence[Network]) -> str:
    """The peer, or, if the peer is trusted, the right-most address of ``x-forwarded-for`` that is not.

    Each proxy appends whom it heard from, so everything left of the first address that is not a proxy's is hearsay. If
    something is no address there, the proxy that passed it on is the last one known. Empty if there is no peer.
    """
    client = scope["client"]
    if client is None:
        return ""
    nearest = _parse(client[0]) if trusted else None
    if nearest is None:
        return client[0]
    for text in _forwarded(scope):
        if not is_within(nearest, trusted):
            break
        named = _parse(text)
        if named is None:
            break
        nearest = named
    return str(nearest)


def _forwarded(scope: HTTPScope) -> Iterator[str]:
    """What all headers together name, the last one first."""
    for name, value in reversed(list(scope["headers"])):
        if name == b"x-forwarded-for":
            yield from reversed(value.decode("latin-1").split(","))


def _parse(text: str) -> Address | None:
    """An address with or without a port: ``192.0.2.1:80``, ``[2001:db8::1]:80``, ``2001:db8::1``."""
    text = text.strip()
    if text.startswith("["):
        text, closing, _ = text[1:].partition("]")
        if not closing:
            return None
    elif text.count(":") == 1:
        text = text.partition(":")[0]
    return parse_address(text)
