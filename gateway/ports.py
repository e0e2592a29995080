"""Whether a port can be listened on, asked before anything slow is started."""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any


class PortError(Exception):
    """A port cannot be listened on; the message is one line for people."""


def check_port(host: str, port: int, setting: str) -> str:
    """The numeric address of `host`, on which `port` is free right now.

    Args:
        setting: what to change if it is not, for the message.

    Raises:
        PortError: in use, not allowed, or no address of this machine.
    """
    try:
        family, kind, protocol, address = _resolve(host, port)
        # Without SO_REUSEPORT, which granian sets: with it a second server would share the port in silence.
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            probe.bind(address)
    except OSError as e:
        why = "is in use by another program" if e.errno == errno.EADDRINUSE else f"cannot be used: {e.strerror or e}"
        raise PortError(f"{host} port {port} {why}; choose another with {setting}") from e
    return str(address[0])


def numeric_address(host: str, port: int) -> str:
    """The address that `check_port` would give. Raises `PortError` if the name is not known."""
    try:
        return str(_resolve(host, port)[3][0])
    except OSError as e:
        raise PortError(f"{host} port {port} cannot be used: {e.strerror or e}") from e


def _resolve(host: str, port: int) -> tuple[int, int, int, Any]:
    family, kind, protocol, _, address = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    return family, kind, protocol, address


@contextmanager
def reserved_port(host: str, port: int, setting: str) -> Iterator[str]:
    """Keep a port for processes of ours that share it with SO_REUSEPORT: nobody else can take it while none listens.

    Yields the numeric address; else like `check_port`.
    """
    address = check_port(host, port, setting)
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM) as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        if holder.family == socket.AF_INET6:
            holder.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        # Without SO_REUSEADDR, so that a check by another server fails; what an earlier one left in the system's books
        # may keep us from that, and then the port is not reserved but can be used.
        with suppress(OSError):
            holder.bind((address, port))
        yield address
