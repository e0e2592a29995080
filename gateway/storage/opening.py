"""Database and change feed as the settings say."""

from __future__ import annotations

from gateway.settings import Settings
from gateway.storage.database import Database
from gateway.storage.redis_feed import RedisFeed


def open_database(settings: Settings) -> Database:
    """Connects to nothing yet. Raises `UnusableDatabase`."""
    url = settings.database.url
    return Database.open(
        None if url is None else url.get_secret_value(), settings.home, pool_size=settings.database.pool_size
    )


def open_feed(settings: Settings) -> RedisFeed | None:
    """None where no Redis is set up. Connects to nothing yet."""
    url = settings.redis.url
    return None if url is None else RedisFeed(url.get_secret_value())
