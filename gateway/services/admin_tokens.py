"""The tokens of administrators: make, revoke, look up, and tell who sends a request by one."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import Literal

import msgspec

from gateway.domain.credential import ADMIN_TOKEN, Peppers, issue, parse, public_id_in
from gateway.domain.ids import AdminTokenId, new_admin_token_id
from gateway.domain.tenancy import AdminToken, Role, Secret
from gateway.errors import InvalidKey, NotAllowed, NotFound
from gateway.services.admin_changes import Changes
from gateway.services.admin_pages import Page, PageRequest, fetch_page
from gateway.services.admin_rules import check_expiry, check_name, is_id
from gateway.services.audit import Actor
from gateway.services.ports import Clock
from gateway.services.stores import Storage, Work
from gateway.services.throttle import Guesses, Unthrottled

MAX_GOOD = 1_000

Permission = Literal["read", "change"]

PERMISSIONS: dict[Role, frozenset[Permission]] = {
    "admin": frozenset({"read", "change"}),
    "viewer": frozenset({"read"}),
}


class IssuedToken(msgspec.Struct, frozen=True):
    """A new token with its raw secret, which nobody can be shown again."""

    token: AdminToken
    raw: str

    def __repr__(self) -> str:
        return f"IssuedToken({self.token.id})"


class AdminTokens:
    """The use cases; they raise `InvalidRequest` or `NotFound`."""

    def __init__(self, storage: Storage, changes: Changes, peppers: Peppers) -> None:
        self._storage = storage
        self._changes = changes
        self._peppers = peppers

    async def create(
        self, actor: Actor, *, name: str, role: Role = "admin", expires_at_ms: int | None = None
    ) -> IssuedToken:
        async with self._changes.begin(actor) as change:
            raw, public_id = issue(ADMIN_TOKEN)
            made = AdminToken(
                id=new_admin_token_id(change.now_ms),
                name=check_name(name),
                role=role,
                secret=Secret(public_id, *self._peppers.digest(raw)),
                created_at_ms=change.now_ms,
                expires_at_ms=check_expiry(expires_at_ms, change.now_ms),
            )
            await change.work.admin_tokens.add(made)
            change.record("admin_token.create", made.id, after=made)
            return IssuedToken(made, raw)

    async def revoke(self, actor: Actor, token_id: str) -> AdminToken:
        """For good. Once more does nothing."""
        async with self._changes.begin(actor) as change:
            before = await _require_token(change.work, token_id)
            if before.revoked_at_ms is not None:
                return before
            after = msgspec.structs.replace(before, revoked_at_ms=change.now_ms)
            await change.work.admin_tokens.replace(after)
            change.record("admin_token.revoke", after.id, before=before, after=after)
            return after

    async def get(self, token_id: str) -> AdminToken:
        async with self._storage.reading() as work:
            return await _require_token(work, token_id)

    async def find(self, named: str) -> AdminToken:
        """By its id, its public id, or itself; of a raw token only the public id is looked at."""
        public_id = public_id_in(named, ADMIN_TOKEN)
        async with self._storage.reading() as work:
            found = None if public_id is None else await work.admin_tokens.by_public_id(public_id)
            return await _require_token(work, named) if found is None else found

    async def page(self, page: PageRequest) -> Page[AdminToken]:
        after = page.after_id("adm_")
        async with self._storage.reading() as work:
            return await fetch_page(
                page, lambda limit: work.admin_tokens.page(after=after, limit=limit), lambda each: each.id
            )


class AdminAuthenticator:
    """Tells administrators apart. Asks the database each time, so that a revoked token ends at once.

    Args:
        guesses: None lets anybody try as often as they like.
    """

    def __init__(self, storage: Storage, peppers: Peppers, clock: Clock, guesses: Guesses | None = None) -> None:
        self._storage = storage
        self._peppers = peppers
        self._clock = clock
        self._guesses = guesses or Guesses(Unthrottled(), Unthrottled())
        self._good: OrderedDict[str, Secret] = OrderedDict()
        """By public id, what tells tokens that were right before: whether they may be looked up need not be asked."""

    async def authenticate(self, headers: Iterable[tuple[bytes, bytes]], address: str = "") -> AdminToken:
        """Whose token comes as ``Authorization: Bearer``.

        Args:
            headers: name and value pairs, names in lower case.
            address: where the request comes from.

        Raises:
            InvalidKey: the same whether there is no token, or an unknown, expired or revoked one, or an API key.
            TooManyAttempts: instead, to whom has tried too many wrong tokens.
        """
        raw = _bearer(headers)
        error = InvalidKey("This needs an admin token in the Authorization header: 'Authorization: Bearer eha_...'.")
        if not raw:
            raise error
        public_id = parse(raw, ADMIN_TOKEN)
        if public_id is None:
            raise await self._guesses.failed(address, error)
        good = self._good.get(public_id)
        if good is None or not self._peppers.matches(raw, good):
            await self._guesses.check(address, public_id)
        async with self._storage.reading() as work:
            found = await work.admin_tokens.by_public_id(public_id)
        if found is None or not self._peppers.matches(raw, found.secret) or not self._is_alive(found):
            raise await self._guesses.failed(address, error, vain=public_id)
        self._good[public_id] = found.secret
        if len(self._good) > MAX_GOOD:
            self._good.popitem(last=False)
        return found

    def _is_alive(self, token: AdminToken) -> bool:
        is_expired = token.expires_at_ms is not None and token.expires_at_ms <= self._clock.time() * 1000
        return token.revoked_at_ms is None and not is_expired


def require_permission(token: AdminToken, permission: Permission | None) -> None:
    """Raises `NotAllowed`; always if the permission is None, since what has none was forgotten."""
    if permission not in PERMISSIONS[token.role]:
        raise NotAllowed(f"An admin token with the role '{token.role}' may not do this.", code="role_not_allowed")


def _bearer(headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    for name, value in headers:
        if name == b"authorization":
            scheme, _, raw = value.partition(b" ")
            return raw.strip() if scheme.lower() == b"bearer" else b""
    return b""


async def _require_token(work: Work, token_id: str) -> AdminToken:
    if is_id(token_id, "adm_"):
        found = await work.admin_tokens.get(AdminTokenId(token_id))
        if found is not None:
            return found
    raise NotFound("There is no admin token with this id.")
