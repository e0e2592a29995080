"""Whom a trusted proxy may name, and that nobody else may."""

from __future__ import annotations

from ipaddress import ip_network
from typing import Any

import pytest

from gateway.web.client_address import client_address

PROXIES = [ip_network("10.0.0.0/8"), ip_network("2001:db8:ff::/48"), ip_network("192.0.2.7/32")]


def ask(peer: str | None, *forwarded: str, trusted: Any = PROXIES) -> str:
    """The address, with one header for each of `forwarded`."""
    headers = [(b"host", b"hub"), *((b"x-forwarded-for", value.encode("latin-1")) for value in forwarded)]
    scope: Any = {"type": "http", "client": None if peer is None else (peer, 5000), "headers": headers}
    return client_address(scope, trusted)


@pytest.mark.parametrize(
    ("peer", "forwarded", "expected"),
    [
        ("10.0.0.1", [], "10.0.0.1"),
        ("10.0.0.1", ["203.0.113.9"], "203.0.113.9"),
        ("10.0.0.1", ["203.0.113.9, 198.51.100.2"], "198.51.100.2"),
        ("10.0.0.1", ["203.0.113.9, 10.1.2.3, 192.0.2.7"], "203.0.113.9"),
        ("10.0.0.1", ["203.0.113.9", "198.51.100.2"], "198.51.100.2"),
        ("10.0.0.1", ["203.0.113.9", "10.1.2.3"], "203.0.113.9"),
        ("10.0.0.1", ["10.1.2.3, 10.1.2.4"], "10.1.2.3"),
        ("10.0.0.1", ["203.0.113.9:4711"], "203.0.113.9"),
        ("10.0.0.1", ["2001:db8::9"], "2001:db8::9"),
        ("10.0.0.1", ["[2001:db8::9]:4711"], "2001:db8::9"),
        ("10.0.0.1", ["[2001:db8::9]"], "2001:db8::9"),
        ("10.0.0.1", ["2001:DB8:0:0::9"], "2001:db8::9"),
        ("2001:db8:ff::1", ["203.0.113.9"], "203.0.113.9"),
        ("::ffff:10.0.0.1", ["203.0.113.9"], "203.0.113.9"),
        ("10.0.0.1", ["203.0.113.9, ::ffff:10.1.2.3"], "203.0.113.9"),
        ("10.0.0.1", ["\t203.0.113.9 "], "203.0.113.9"),
    ],
)
def test_a_trusted_proxy_names_the_client(peer: str, forwarded: list[str], expected: str) -> None:
    assert ask(peer, *forwarded) == expected


@pytest.mark.parametrize(
    "garbage", ["", ",", "unknown", "_hidden", "203.0.113.999", "\xff\xfe", "[::1", "a:b:c", "1.2"]
)
def test_what_is_no_address_ends_the_chain_at_the_proxy_that_passed_it_on(garbage: str) -> None:
    assert ask("10.0.0.1", f"203.0.113.9, {garbage}") == "10.0.0.1"
    assert ask("10.0.0.1", f"{garbage}, 10.9.9.9") == "10.9.9.9"


@pytest.mark.parametrize("peer", ["203.0.113.1", "2001:db8::1", "192.0.2.8"])
def test_forwarded_headers_of_anybody_else_are_ignored(peer: str) -> None:
    assert ask(peer, "198.51.100.2") == peer


def test_nobody_is_trusted_unless_it_is_said() -> None:
    assert ask("127.0.0.1", "198.51.100.2", trusted=()) == "127.0.0.1"


def test_a_connection_without_a_peer_has_no_address() -> None:
    assert ask(None, "198.51.100.2") == ""
