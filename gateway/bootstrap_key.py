"""The one API key of a hub that has no organizations yet, kept in a file that only its owner can read."""

from __future__ import annotations

import os
import secrets
import tempfile
from pathlib import Path

FILE_NAME = "bootstrap.key"
PREFIX = "eh_"
_RANDOM_BYTES = 32


class KeyFileError(Exception):
    """The key file cannot be used; the message is one line for people."""


def load_or_create_key(home: Path) -> tuple[str, bool]:
    """The key and whether this call made it. Of several processes at once one makes it and all return the same.

    Raises:
        KeyFileError: the file cannot be read or made, holds no key, or others may read it.
    """
    path = home / FILE_NAME
    try:
        if not path.exists():
            home.mkdir(parents=True, exist_ok=True)
            if _create(path):
                return _load(path), True
        return _load(path), False
    except (OSError, UnicodeDecodeError) as e:
        raise KeyFileError(f"{path}: cannot be used: {e}") from e


def _create(path: Path) -> bool:
    """A hard link appears whole or not at all, and only once."""
    descriptor, scratch = tempfile.mkstemp(prefix=f".{FILE_NAME}-", dir=path.parent)  # mode 0600
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(f"{PREFIX}{secrets.token_urlsafe(_RANDOM_BYTES)}\n")
        try:
            path.hardlink_to(scratch)
        except FileExistsError:
            return False
        return True
    finally:
        Path(scratch).unlink()


def _load(path: Path) -> str:
    mode = path.stat().st_mode
    if mode & 0o077:
        raise KeyFileError(f"{path}: others may read it (mode {mode & 0o777:o}); run: chmod 600 {path}")
    key = path.read_text().strip()
    if not key.startswith(PREFIX):
        raise KeyFileError(f"{path}: holds no key; delete it to get a new one")
    return key
