"""Who sends this request: from its headers to a principal.

The raw key never leaves `Authenticator`: it is parsed and digested here, and no error, log line or value has it. Of the
state of a key nobody learns anything who does not have its secret.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple, Protocol

from gateway.domain.credential import API_KEY, Peppers, parse
from gateway.domain.principal import Principal
from gateway.domain.tenancy import KeyHolder
from gateway.errors import InvalidKey, NotAllowed
from gateway.services.ports import Clock

Headers = Iterable[tuple[bytes, bytes]]
"""Name and value pairs, names in lower case."""

MAX_PRINCIPALS = 10_000


class Keys(Protocol):
    """Where holders come from; `gateway.services.directory.Directory` is one."""

    def cached(self, public_id: str) -> KeyHolder | None:
        """The holder, if it is known for sure right now; None says nothing. The same object until something changes."""

    async def find(self, public_id: str) -> KeyHolder | None:
        """None if there is no such key. Raises `StorageDown`."""


class _Known(NamedTuple):
    """A holder with the principal that was made of it."""

    holder: KeyHolder
    principal: Principal


class Authenticator:
    """Accepts a key as ``Authorization: Bearer`` or as ``x-api-key``, as the two families of clients send it.

    If a request has both, the first counts.
    """

    def __init__(self, keys: Keys, peppers: Peppers, clock: Clock) -> None:
        self._keys = keys
        self._peppers = peppers
        self._clock = clock
        self._known: dict[str, _Known] = {}

    def authenticate_now(self, headers: Headers) -> Principal | None:
        """As `authenticate`, if that needs no waiting; None if it does."""
        raw = _raw_key(headers)
        public_id = parse(raw, API_KEY)
        if public_id is None:
            raise _incorrect()
        holder = self._keys.cached(public_id)
        return None if holder is None else self._admit(raw, holder)

    async def authenticate(self, headers: Headers) -> Principal:
        """Raises `InvalidKey` if there is no key, or one that is unknown, revoked or expired; `NotAllowed` if its team
        or organization is disabled; `StorageDown`."""
        raw = _raw_key(headers)
        public_id = parse(raw, API_KEY)
        holder = None if public_id is None else await self._keys.find(public_id)
        if holder is None:
            raise _incorrect()
        return self._admit(raw, holder)

    def _admit(self, raw: bytes, holder: KeyHolder) -> Principal:
        key = holder.key
        if not self._peppers.matches(raw, key.secret):
            raise _incorrect()
        if key.revoked_at_ms is not None:
            raise InvalidKey("This API key has been revoked.")
        if key.expires_at_ms is not None and self._clock.time() * 1000 >= key.expires_at_ms:
            raise InvalidKey("This API key has expired.")
        if holder.organization.disabled_at_ms is not None:
            raise NotAllowed("The organization of this API key is disabled.", code="organization_disabled")
        if holder.team.disabled_at_ms is not None:
            raise NotAllowed("The team of this API key is disabled.", code="team_disabled")
        known = self._known.get(key.secret.public_id)
        if known is not None and known.holder is holder:
            return known.principal
        if len(self._known) >= MAX_PRINCIPALS:
            self._known.clear()
        principal = principal_of(holder)
        self._known[key.secret.public_id] = _Known(holder, principal)
        return principal


def principal_of(holder: KeyHolder) -> Principal:
    """The identity that requests with this key have."""
    organization, team, key = holder.organization, holder.team, holder.key
    return Principal(
        organization_id=organization.id,
        team_id=team.id,
        key_id=key.id,
        organization=organization.name,
        team=team.name,
        organization_weight=organization.weight,
        team_weight=team.weight,
        default_class=key.default_class,
        models=None if key.models is None else frozenset(key.models),
        endpoints=None if key.endpoints is None else frozenset(key.endpoints),
        max_queue_depth=key.max_queue_depth,
        deadline_ms=key.deadline_ms,
    )


def _raw_key(headers: Headers) -> bytes:
    for name, value in headers:
        if name == b"authorization":
            scheme, _, key = value.partition(b" ")
            if scheme.lower() == b"bearer" and (key := key.strip()):
                return key
        elif name == b"x-api-key" and (key := value.strip()):
            return key
    raise InvalidKey(
        "You didn't provide an API key. Send it in the Authorization header: 'Authorization: Bearer YOUR_KEY'."
    )


def _incorrect() -> InvalidKey:
    """The same for every key whose secret is not known to be right."""
    return InvalidKey("Incorrect API key provided.")
