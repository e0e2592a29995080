"""What a command says of a database that does not answer."""

from __future__ import annotations

from urllib.parse import urlsplit

from gateway.errors import StorageDown
from gateway.settings import Settings
from gateway.storage.urls import SqliteFile, read_url


def explain(error: StorageDown, settings: Settings) -> str:
    """One line: which database, and the driver's own words, which may name host and user but never the password."""
    said = f"the database{_place(settings)} does not answer"
    cause = error.__cause__
    if cause is None:
        return said
    words = str(cause).partition("\n")[0]
    return f"{said}: {type(cause).__name__}" + (f": {words}" if words else "")


def _place(settings: Settings) -> str:
    url = settings.database.url
    place = read_url(None if url is None else url.get_secret_value(), settings.home)
    if isinstance(place, SqliteFile):
        return f" {place.path}"
    parts = urlsplit(place.dsn)
    # An @ behind the first slash means that the slash may be a password's; then nothing of it is shown.
    hosts = "" if "@" in place.dsn.removeprefix(f"{parts.scheme}://{parts.netloc}") else parts.netloc
    return f" at {found}" if (found := hosts.rpartition("@")[2]) else ""
