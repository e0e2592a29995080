"""Secrets are compared by `hmac.compare_digest` alone, whose time tells nothing, for keys and for admin tokens."""

from __future__ import annotations

import hmac
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from identity_kit import KEY, PEPPERS, FixedKeys, SteppedClock, holder_of, with_other_secret

from gateway.domain.credential import ADMIN_TOKEN, issue
from gateway.domain.ids import AdminTokenId
from gateway.domain.tenancy import AdminToken, Secret
from gateway.errors import InvalidKey
from gateway.services.admin_tokens import AdminAuthenticator
from gateway.services.authenticate import Authenticator

DIGEST_BYTES = 32

TOKEN, PUBLIC_ID = issue(ADMIN_TOKEN)

Admit = Callable[[str], Awaitable[object]]


class OneToken:
    """Implements what `AdminAuthenticator` uses of `gateway.services.stores.Storage`."""

    def __init__(self) -> None:
        secret = Secret(PUBLIC_ID, *PEPPERS.digest(TOKEN))
        self._token = AdminToken(id=AdminTokenId("adm_1"), name="t", role="admin", secret=secret, created_at_ms=0)

    @asynccontextmanager
    async def reading(self) -> AsyncIterator[Any]:
        yield SimpleNamespace(admin_tokens=self)

    async def by_public_id(self, public_id: str) -> AdminToken | None:
        return self._token if public_id == PUBLIC_ID else None


async def _admit_key(raw: str) -> object:
    keys = FixedKeys(holder_of(KEY))
    return await Authenticator(keys, PEPPERS, SteppedClock()).authenticate([_bearer(raw)])


async def _admit_cached_key(raw: str) -> object:
    principal = Authenticator(FixedKeys(holder_of(KEY)), PEPPERS, SteppedClock()).authenticate_now([_bearer(raw)])
    if principal is None:
        raise InvalidKey("It is left to the other way to refuse.")
    return principal


async def _admit_token(raw: str) -> object:
    storage: Any = OneToken()
    return await AdminAuthenticator(storage, PEPPERS, SteppedClock()).authenticate([_bearer(raw)])


def _bearer(raw: str) -> tuple[bytes, bytes]:
    return b"authorization", b"Bearer " + raw.encode()


every_way = pytest.mark.parametrize(
    ("admit", "right"),
    [(_admit_key, KEY), (_admit_cached_key, KEY), (_admit_token, TOKEN)],
    ids=["key", "cached key", "admin token"],
)


@every_way
async def test_the_comparison_is_of_whole_digests(admit: Admit, right: str, monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[tuple[int, int, bool]] = []
    real = hmac.compare_digest

    def record(a: bytes, b: bytes) -> bool:
        compared.append((len(a), len(b), real(a, b)))
        return compared[-1][2]

    monkeypatch.setattr("gateway.domain.credential.hmac.compare_digest", record)
    assert await admit(right) is not None
    with pytest.raises(InvalidKey):
        await admit(with_other_secret(right))
    assert compared == [(DIGEST_BYTES, DIGEST_BYTES, True), (DIGEST_BYTES, DIGEST_BYTES, False)]


@every_way
async def test_nothing_else_lets_anybody_in(admit: Admit, right: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.domain.credential.hmac.compare_digest", lambda _a, _b: False)
    with pytest.raises(InvalidKey):
        await admit(right)
