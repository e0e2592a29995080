"""Network addresses: read from text, told apart, and compared with networks. Pure.

An IPv4 address that comes mapped into IPv6 (``::ffff:192.0.2.1``) is that IPv4 address, everywhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network

Address = IPv4Address | IPv6Address
Network = IPv4Network | IPv6Network

_MAPPED_BITS = 96
_SITE_BITS = 64
"""Of an IPv6 address these name a site, which has all the others for itself."""


def parse_address(text: str) -> Address | None:
    """None if it is no address, as that of a Unix socket."""
    try:
        address = ip_address(text)
    except ValueError:
        return None
    if isinstance(address, IPv6Address) and address.ipv4_mapped is not None:
        return address.ipv4_mapped
    return address


def parse_networks(texts: Iterable[str]) -> tuple[Network, ...]:
    """In CIDR notation, or single addresses. Raises ValueError."""
    return tuple(_unmapped(ip_network(text)) for text in texts)


def is_within(address: Address, networks: Sequence[Network]) -> bool:
    return any(address in network for network in networks)


def source_of(text: str) -> str:
    """Who is behind an address, as far as counting goes: of IPv6 the /64, since one host may use all of it; what is no
    address is nobody in particular."""
    address = parse_address(text)
    if address is None:
        return "unknown"
    if isinstance(address, IPv6Address):
        return str(IPv6Network((int(address) >> _SITE_BITS << _SITE_BITS, _SITE_BITS)))
    return str(address)


def _unmapped(network: Network) -> Network:
    if isinstance(network, IPv6Network) and network.prefixlen >= _MAPPED_BITS:
        mapped = network.network_address.ipv4_mapped
        if mapped is not None:
            return IPv4Network((mapped, network.prefixlen - _MAPPED_BITS))
    return network
