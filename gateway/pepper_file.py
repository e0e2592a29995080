"""The peppers of credentials' digests: from the settings, or from a file that only its owner can read.

Knows nothing of credentials. Whoever loses the peppers has to make all keys and tokens anew, so the file is on the disk
before its name is.
"""

from __future__ import annotations

import os
import re
import secrets
import tempfile
from collections.abc import Iterable
from pathlib import Path

from gateway.domain.credential import MIN_PEPPER_BYTES, Peppers
from gateway.settings import Settings

FILE_NAME = "pepper.key"
_ID = re.compile(r"[A-Za-z0-9_-]{1,32}")


class PepperError(Exception):
    """The peppers cannot be used; the message is one line for people and holds nothing of a secret."""


def load_peppers(settings: Settings) -> Peppers:
    """Those of ``auth.peppers``, else those of the file in the home, which is made if it is not there.

    Of several processes at once one makes the file and all return the same.

    Raises:
        PepperError: a pepper is malformed or too short, or the file cannot be read or made, or others may read it.
    """
    given = settings.auth.peppers
    if given is not None:
        return _parse(given.get_secret_value().split(","), "auth.peppers")
    path = settings.home / FILE_NAME
    try:
        if not path.exists():
            settings.home.mkdir(parents=True, exist_ok=True)
            _create(path)
        return _parse(_read(path).replace(",", "\n").splitlines(), str(path))
    except OSError as e:
        raise PepperError(f"{path}: cannot be used: {e.strerror or e}") from e


def _create(path: Path) -> None:
    """A hard link appears whole or not at all, and only once."""
    descriptor, scratch = tempfile.mkstemp(prefix=f".{FILE_NAME}-", dir=path.parent)  # mode 0600
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(f"{secrets.token_hex(4)}:{secrets.token_hex(MIN_PEPPER_BYTES)}\n")
            file.flush()
            os.fsync(file.fileno())
        try:
            path.hardlink_to(scratch)
        except FileExistsError:
            return
    finally:
        Path(scratch).unlink()
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _read(path: Path) -> str:
    with path.open("rb") as file:
        mode = os.fstat(file.fileno()).st_mode
        if mode & 0o077:
            raise PepperError(f"{path}: others may read it (mode {mode & 0o777:o}); run: chmod 600 {path}")
        return file.read().decode("ascii", "replace")


def _parse(entries: Iterable[str], where: str) -> Peppers:
    """Errors name an entry by its place only: what stands where the id should be may be the secret."""
    peppers: dict[str, bytes] = {}
    for place, entry in enumerate((entry.strip() for entry in entries if entry.strip()), start=1):
        name, colon, digits = entry.partition(":")
        if not colon or not _ID.fullmatch(name):
            raise PepperError(
                f"{where}: entry {place} is not ID:SECRET; an id has up to 32 letters, digits, dashes and underscores"
            )
        try:
            pepper = bytes.fromhex(digits)
        except ValueError:
            raise PepperError(f"{where}: entry {place}: the secret is not a row of hexadecimal digits") from None
        if len(pepper) < MIN_PEPPER_BYTES:
            raise PepperError(
                f"{where}: entry {place}: the secret has {len(pepper)} bytes; at least {MIN_PEPPER_BYTES} are needed"
            )
        if name in peppers:
            raise PepperError(f"{where}: entry {place} has the id of an earlier one")
        peppers[name] = pepper
    if not peppers:
        raise PepperError(f"{where}: holds no pepper")
    return Peppers(peppers)
