"""Who sends this request: from its headers and where it comes from to a principal.

The raw key never leaves `Authenticator`: it is parsed and digested here, and no error, log line or value has it. Of the
state of a key nobody learns anything who does not have its secret.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple, Protocol

from gateway.domain.credential import API_KEY, Peppers, parse
from gateway.domain.networks import Network, is_within, parse_address, parse_networks
from gateway.domain.principal import Principal
from gateway.domain.tenancy import KeyHolder
from gateway.errors import InvalidKey, NotAllowed
from gateway.services.ports import Clock
from gateway.services.throttle import Guesses, Unthrottled

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
    """A holder with the principal that was made of it, and the networks that the key may be used from."""

    holder: KeyHolder
    principal: Principal
    networks: tuple[Network, ...] | None


class Authenticator:
    """Accepts a key as ``Authorization: Bearer`` or as ``x-api-key``, as the two families of clients send it.

    If a request has both, the first counts. A key that is known and right costs no wait and no counting.

    Args:
        guesses: None lets anybody try as often as they like.
    """

    def __init__(self, keys: Keys, peppers: Peppers, clock: Clock, guesses: Guesses | None = None) -> None:
        self._keys = keys
        self._peppers = peppers
        self._clock = clock
        self._guesses = guesses or Guesses(Unthrottled(), Unthrottled())
        self._known: dict[str, _Known] = {}

    def authenticate_now(self, headers: Headers, address: str = "") -> Principal | None:
        """As `authenticate`, if that needs no waiting; None if it does, as the refusal of a wrong key may."""
        raw = _raw_key(headers)
        public_id = parse(raw, API_KEY)
        holder = None if public_id is None else self._keys.cached(public_id)
        if holder is None or not self._peppers.matches(raw, holder.key.secret):
            return None
        return self._admit(holder, address)

    async def authenticate(self, headers: Headers, address: str = "") -> Principal:
        """
        Args:
            address: where the request comes from; what is no network address is nowhere.

        Raises:
            InvalidKey: there is no key, or one that is unknown, revoked or expired.
            NotAllowed: its team or organization is disabled, or it may not be used from there.
            TooManyAttempts: instead of `InvalidKey`, to whom has tried too many wrong keys.
            StorageDown: the key is not known here, and the database does not answer.
        """
        raw = _raw_key(headers)
        public_id = parse(raw, API_KEY)
        if public_id is None:
            raise await self._guesses.failed(address, _incorrect())
        holder = self._keys.cached(public_id) or await self._looked_up(public_id, address)
        if not self._peppers.matches(raw, holder.key.secret):
            raise await self._guesses.failed(address, _incorrect())
        return self._admit(holder, address)

    async def _looked_up(self, public_id: str, address: str) -> KeyHolder:
        if public_id not in self._known:  # else it was right before, and something has changed since
            await self._guesses.check(address, public_id)
        holder = await self._keys.find(public_id)
        if holder is None:
            raise await self._guesses.failed(address, _incorrect(), vain=public_id)
        return holder

    def _admit(self, holder: KeyHolder, address: str) -> Principal:
        """Whoever has the secret of this holder's key."""
        key = holder.key
        if key.revoked_at_ms is not None:
            raise InvalidKey("This API key has been revoked.")
        if key.expires_at_ms is not None and self._clock.time() * 1000 >= key.expires_at_ms:
            raise InvalidKey("This API key has expired.")
        known = self._known.get(key.secret.public_id)
        if known is None or known.holder is not holder:
            known = self._make_known(holder)
        if known.networks is not None and not _comes_from(known.networks, address):
            raise NotAllowed("This API key may not be used from your network address.", code="network_not_allowed")
        if holder.organization.disabled_at_ms is not None:
            raise NotAllowed("The organization of this API key is disabled.", code="organization_disabled")
        if holder.team.disabled_at_ms is not None:
            raise NotAllowed("The team of this API key is disabled.", code="team_disabled")
        return known.principal

    def _make_known(self, holder: KeyHolder) -> _Known:
        public_id, networks = holder.key.secret.public_id, holder.key.networks
        known = _Known(holder, principal_of(holder), None if networks is None else parse_networks(networks))
        self._known[public_id] = known
        if len(self._known) > MAX_PRINCIPALS:
            del self._known[next(iter(self._known))]  # the first that was made
        return known


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
        limits=holder.limits,
        top_ups=holder.top_ups,
        time_zone=organization.time_zone,
        public_id=key.secret.public_id,
    )


def _comes_from(networks: tuple[Network, ...], address: str) -> bool:
    parsed = parse_address(address)
    return parsed is not None and is_within(parsed, networks)


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
