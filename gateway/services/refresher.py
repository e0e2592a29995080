"""A principal as it is now, for requests that run on while administrators change what it may use."""

from __future__ import annotations

from typing import Protocol

from gateway.domain.principal import Principal
from gateway.domain.tenancy import KeyHolder
from gateway.errors import LimitsUnavailable, StorageDown
from gateway.services.authenticate import principal_of


class Holders(Protocol):
    """`gateway.services.directory.Directory` is one."""

    async def find(self, public_id: str) -> KeyHolder | None:
        """The holder of a key, None if there is no such key. Raises `StorageDown`."""


class Refresher:
    """Looks principals up again, and keeps the one value for as long as nothing has changed."""

    def __init__(self, holders: Holders) -> None:
        self._holders = holders
        self._latest: tuple[KeyHolder, Principal] | None = None

    async def __call__(self, principal: Principal) -> Principal:
        """Raises `LimitsUnavailable`."""
        try:
            holder = await self._holders.find(principal.public_id)
        except StorageDown as e:
            raise LimitsUnavailable from e
        if holder is None:
            return principal
        if self._latest is None or self._latest[0] is not holder:
            self._latest = holder, principal_of(holder)
        return self._latest[1]
