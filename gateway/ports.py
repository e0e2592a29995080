"""Whether a port can be listened on, asked before anything slow is started."""

from __future__ import annotations

import errno
import socket


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
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
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
