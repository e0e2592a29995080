"""At most one gateway where state is not shared: what each counted for itself would be wrong for all of them."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager

from gateway.settings import Settings
from gateway.settings_sources import SettingsError

FILE_NAME = "gateway.lock"


@contextmanager
def gateway_lock(settings: Settings) -> Iterator[None]:
    """Held while a gateway serves, unless PostgreSQL and Redis are set up; the kernel lets go of it when it dies.

    It sees only gateways with the same home: two hosts on one database and without Redis are not noticed.

    Raises:
        SettingsError: another gateway holds it.
    """
    if settings.shares_state:
        yield
        return
    settings.home.mkdir(parents=True, exist_ok=True)
    path = settings.home / FILE_NAME
    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise SettingsError(
                f"another gateway runs with {settings.home}; several need database.url (PostgreSQL) and redis.url"
            ) from None
        yield
