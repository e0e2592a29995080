"""Where an engine listens: which addresses are allowed, and the private folder of a Unix socket."""

from __future__ import annotations

import os
import re
import socket
import stat
from pathlib import Path

from engine.carriers.curve import CurveKeys
from engine.errors import ConfigError

MAX_SOCKET_PATH_BYTES = 107
"""A Unix socket's address holds 108 bytes, one of them the final zero."""

_TCP = re.compile(r"tcp://(\[[0-9a-fA-F:.]+\]|[^:/\[\]]+):(\d{1,5})")


def check_endpoint(endpoint: str, curve: CurveKeys | None) -> None:
    """Raise `ConfigError` unless the endpoint is a Unix socket of usable length, or TCP with CURVE keys."""
    if endpoint.startswith("ipc://"):
        length = len(os.fsencode(socket_path(endpoint)))
        if length > MAX_SOCKET_PATH_BYTES:
            raise ConfigError(
                f"engine endpoint '{endpoint}': the socket's path has {length} bytes, the system allows "
                f"{MAX_SOCKET_PATH_BYTES}; use a shorter folder"
            )
        return
    address = _TCP.fullmatch(endpoint)
    if address is None or int(address[2]) > 65535:
        raise ConfigError(f"engine endpoint must be ipc:///folder/name or tcp://host:port, not '{endpoint}'")
    if curve is None:
        raise ConfigError(f"engine endpoint '{endpoint}': a TCP endpoint requires CURVE keys")


def socket_path(endpoint: str) -> Path:
    """The file of an ipc endpoint. Raises `ConfigError` unless it is an absolute path."""
    path = Path(endpoint.removeprefix("ipc://"))
    if not path.is_absolute():
        raise ConfigError(f"engine endpoint '{endpoint}' must hold an absolute path: ipc:///folder/name")
    return path


def prepare_socket_folder(path: Path) -> None:
    """Make a private folder for the socket at path, and clear away what a dead engine left there.

    Raises `ConfigError` if the folder is not ours alone, if another engine listens there, or if something else is in
    the socket's place.
    """
    folder = path.parent
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.stat()
    except OSError as e:
        raise ConfigError(f"the engine's socket folder {folder} cannot be made: {e.strerror}") from e
    if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o077:
        raise ConfigError(
            f"the engine's socket folder {folder} must belong to this user and be closed to all others (mode 0700)"
        )
    if not path.exists():
        return
    if not path.is_socket():
        raise ConfigError(f"{path} is in the place of the engine's socket, and is not one")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(os.fspath(path))
        except ConnectionRefusedError:
            path.unlink()
        except OSError as e:
            raise ConfigError(f"the engine's socket {path} cannot be taken over: {e}") from e
        else:
            raise ConfigError(f"another engine listens at {path}")
