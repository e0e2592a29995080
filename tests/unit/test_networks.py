"""Addresses and networks, however they are written."""

from __future__ import annotations

import pytest

from gateway.domain.networks import is_within, parse_address, parse_networks, source_of


@pytest.mark.parametrize(
    ("address", "networks", "expected"),
    [
        ("192.0.2.7", ["192.0.2.0/24"], True),
        ("192.0.3.7", ["192.0.2.0/24"], False),
        ("192.0.3.7", ["192.0.2.0/24", "192.0.3.7"], True),
        ("::ffff:192.0.2.7", ["192.0.2.0/24"], True),
        ("192.0.2.7", ["::ffff:192.0.2.0/120"], True),
        ("192.0.3.7", ["::ffff:192.0.2.0/120"], False),
        ("::ffff:192.0.2.7", ["::ffff:0:0/96"], True),
        ("2001:db8:1::9", ["2001:db8::/32"], True),
        ("2001:DB8:1:0::9", ["2001:db8:1::9/128"], True),
        ("2001:db9::9", ["2001:db8::/32"], False),
        ("192.0.2.7", ["::/0"], False),
        ("2001:db8::9", ["0.0.0.0/0"], False),
        ("fe80::1%eth0", ["fe80::/10"], True),
        ("192.0.2.7", [], False),
    ],
)
def test_an_address_is_within_a_network_or_not(address: str, networks: list[str], expected: bool) -> None:
    parsed = parse_address(address)
    assert parsed is not None
    assert is_within(parsed, parse_networks(networks)) is expected


@pytest.mark.parametrize("text", ["", "unix:", "/run/evenhand.sock", "localhost", "192.0.2.7:80", "192.0.2.256"])
def test_what_is_no_address_is_none(text: str) -> None:
    assert parse_address(text) is None


@pytest.mark.parametrize("text", ["", "192.0.2.1/24", "192.0.2.0/33", "office"])
def test_what_is_no_network_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        parse_networks([text])


@pytest.mark.parametrize(
    ("address", "source"),
    [
        ("192.0.2.7", "192.0.2.7"),
        ("::ffff:192.0.2.7", "192.0.2.7"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("2001:db8:1:2:ffff::", "2001:db8:1:2::/64"),
        ("2001:db8:1:3::", "2001:db8:1:3::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("", "unknown"),
        ("/run/evenhand.sock", "unknown"),
    ],
)
def test_who_is_behind_an_address(address: str, source: str) -> None:
    assert source_of(address) == source
