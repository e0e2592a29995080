"""Which keys let whom in, and what the others are told."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest
from identity_kit import KEY, PEPPERS, PRINCIPAL, FixedKeys, SteppedClock, holder_of, new_key, with_other_secret

from gateway.domain.credential import Peppers
from gateway.domain.principal import Principal
from gateway.domain.tenancy import KeyHolder
from gateway.errors import EvenhandError, InvalidKey, NotAllowed
from gateway.services.authenticate import Authenticator

INCORRECT = "Incorrect API key provided."
NEIGHBOR = KEY[:4] + ("a" if KEY[4] != "a" else "b") + KEY[5:]


def bearer(key: str) -> list[tuple[bytes, bytes]]:
    return [(b"host", b"x"), (b"authorization", b"Bearer " + key.encode())]


def let_in(authenticator: Authenticator, headers: list[tuple[bytes, bytes]]) -> Principal:
    """What both ways to ask say; they have to agree."""
    slow = asyncio.run(authenticator.authenticate(headers))
    quick = authenticator.authenticate_now(headers)
    assert quick is slow
    return slow


def refusal(authenticator: Authenticator, headers: list[tuple[bytes, bytes]]) -> EvenhandError:
    with pytest.raises(EvenhandError) as slow:
        asyncio.run(authenticator.authenticate(headers))
    if answers_now(authenticator, headers):
        with pytest.raises(type(slow.value)) as quick:
            authenticator.authenticate_now(headers)
        assert (quick.value.message, quick.value.code) == (slow.value.message, slow.value.code)
    assert KEY[16:40] not in f"{slow.value!r} {slow.value.__cause__!r} {slow.value.__context__!r}"
    return slow.value


def answers_now(authenticator: Authenticator, headers: list[tuple[bytes, bytes]]) -> bool:
    try:
        return authenticator.authenticate_now(headers) is not None
    except EvenhandError:
        return True


def of(holder: KeyHolder, clock: SteppedClock | None = None, peppers: Peppers = PEPPERS) -> Authenticator:
    return Authenticator(FixedKeys(holder), peppers, clock or SteppedClock())


@pytest.mark.parametrize(
    "headers",
    [
        [(b"authorization", f"Bearer {KEY}".encode())],
        [(b"authorization", f"bearer   {KEY} ".encode())],
        [(b"host", b"x"), (b"x-api-key", f" {KEY} ".encode())],
        [(b"authorization", b"Basic eh_x"), (b"x-api-key", KEY.encode())],
        [(b"authorization", b"Bearer "), (b"x-api-key", KEY.encode())],
        [(b"x-api-key", KEY.encode()), (b"authorization", b"Bearer something-else")],
    ],
    ids=["bearer", "spaces", "x-api-key", "basic beside", "empty beside", "the first counts"],
)
def test_a_right_key_lets_its_principal_in(headers: list[tuple[bytes, bytes]]) -> None:
    assert let_in(of(holder_of(KEY)), headers) == PRINCIPAL


@pytest.mark.parametrize(
    "headers",
    [[], [(b"authorization", b"")], [(b"authorization", KEY.encode())], [(b"x-api-key", b" ")],
     [(b"authorization", f"Basic {KEY}".encode())]],
    ids=["none", "empty", "no scheme", "blank", "basic"],
)  # fmt: skip
def test_no_key_is_told_how_to_send_one(headers: list[tuple[bytes, bytes]]) -> None:
    error = refusal(of(holder_of(KEY)), headers)

    assert isinstance(error, InvalidKey)
    assert "didn't provide an API key" in error.message


@pytest.mark.parametrize(
    "key",
    ["x", KEY[:-1], KEY + "x", NEIGHBOR, KEY.replace("eh_", "eha_"), KEY.swapcase(), "\xff" + KEY, KEY + "\x00"],
    ids=["x", "short", "long", "typo", "admin's prefix", "case", "not ascii", "NUL"],
)
def test_what_cannot_be_a_key_is_refused_without_asking_anybody(key: str) -> None:
    keys = FixedKeys(holder_of(KEY))
    error = refusal(Authenticator(keys, PEPPERS, SteppedClock()), [(b"x-api-key", key.encode("latin-1"))])

    assert (type(error), error.message) == (InvalidKey, INCORRECT)
    assert keys.asked == []


def test_an_unknown_key_is_refused() -> None:
    error = refusal(of(holder_of(KEY)), bearer(new_key()))

    assert (type(error), error.message) == (InvalidKey, INCORRECT)


def changed(holder: KeyHolder, part: str, **fields: Any) -> KeyHolder:
    return msgspec.structs.replace(holder, **{part: msgspec.structs.replace(getattr(holder, part), **fields)})


STATES = {
    "revoked": changed(holder_of(KEY), "key", revoked_at_ms=1),
    "expired": changed(holder_of(KEY), "key", expires_at_ms=1),
    "team disabled": changed(holder_of(KEY), "team", disabled_at_ms=1),
    "organization disabled": changed(holder_of(KEY), "organization", disabled_at_ms=1),
}


@pytest.mark.parametrize(
    ("state", "code", "words"),
    [
        ("revoked", "invalid_api_key", "has been revoked"),
        ("expired", "invalid_api_key", "has expired"),
        ("team disabled", "team_disabled", "team of this API key is disabled"),
        ("organization disabled", "organization_disabled", "organization of this API key is disabled"),
    ],
)
def test_a_key_out_of_use_is_told_why(state: str, code: str, words: str) -> None:
    error = refusal(of(STATES[state]), bearer(KEY))

    assert isinstance(error, InvalidKey if code == "invalid_api_key" else NotAllowed)
    assert error.code == code
    assert words in error.message


@pytest.mark.parametrize("state", STATES)
def test_who_has_not_the_secret_learns_nothing_of_the_state(state: str) -> None:
    """The same public id with another secret, well-formed."""
    holder = STATES[state]
    other = changed(holder, "key", secret=msgspec.structs.replace(holder.key.secret, digest=PEPPERS.digest("no")[0]))
    error = refusal(of(other), bearer(KEY))

    assert (type(error), error.message) == (InvalidKey, INCORRECT)


def test_a_key_expires_while_it_is_in_use() -> None:
    clock = SteppedClock(1000.0)
    authenticator = of(holder_of(KEY, expires_at_ms=1_001_000), clock)
    let_in(authenticator, bearer(KEY))
    clock.now = 1000.999
    let_in(authenticator, bearer(KEY))
    clock.now = 1001.0

    assert "has expired" in refusal(authenticator, bearer(KEY)).message


def test_a_key_whose_pepper_is_gone_is_refused() -> None:
    error = refusal(of(holder_of(KEY), peppers=Peppers({"new": b"q" * 32})), bearer(KEY))

    assert error.message == INCORRECT


def test_a_key_of_an_older_pepper_is_accepted() -> None:
    peppers = Peppers({"new": b"q" * 32, "test": b"p" * 32})

    assert let_in(of(holder_of(KEY), peppers=peppers), bearer(KEY)) == PRINCIPAL


def test_a_change_of_the_holder_is_a_change_of_the_principal() -> None:
    keys = FixedKeys(holder_of(KEY))
    authenticator = Authenticator(keys, PEPPERS, SteppedClock())
    assert let_in(authenticator, bearer(KEY)).team_weight == 1
    heavy = msgspec.structs.replace(PRINCIPAL, team_weight=9, models=frozenset({"a", "b"}), max_queue_depth=2)
    keys.holders = FixedKeys(holder_of(KEY, heavy)).holders

    assert let_in(authenticator, bearer(KEY)) == heavy


OFFICE = ("192.0.2.0/24", "2001:db8::/32")


async def both_ways(authenticator: Authenticator, address: str) -> Principal:
    slow = await authenticator.authenticate(bearer(KEY), address)
    assert authenticator.authenticate_now(bearer(KEY), address) is slow
    return slow


@pytest.mark.parametrize("address", ["192.0.2.7", "::ffff:192.0.2.7", "2001:db8::1", "2001:DB8:0::1"])
async def test_a_key_works_from_its_networks(address: str) -> None:
    assert await both_ways(of(holder_of(KEY, networks=OFFICE)), address) == PRINCIPAL


@pytest.mark.parametrize("address", ["192.0.3.7", "::ffff:192.0.3.7", "2001:db9::1", "::1", "", "/run/hub.sock", "x"])
async def test_a_key_works_from_nowhere_else_and_does_not_tell_from_where(address: str) -> None:
    authenticator = of(holder_of(KEY, networks=OFFICE))
    with pytest.raises(NotAllowed) as slow:
        await authenticator.authenticate(bearer(KEY), address)
    with pytest.raises(NotAllowed) as quick:
        authenticator.authenticate_now(bearer(KEY), address)

    for refused in (slow.value, quick.value):
        assert (refused.status, refused.code) == (403, "network_not_allowed")
        assert refused.message == "This API key may not be used from your network address."


@pytest.mark.parametrize("address", ["192.0.3.7", "2001:db9::1", "", "/run/hub.sock"])
async def test_a_key_without_networks_works_from_everywhere(address: str) -> None:
    assert await both_ways(of(holder_of(KEY)), address) == PRINCIPAL


async def test_networks_are_enforced_as_they_are_now() -> None:
    keys = FixedKeys(holder_of(KEY))
    authenticator = Authenticator(keys, PEPPERS, SteppedClock())
    await both_ways(authenticator, "198.51.100.1")
    keys.holders = FixedKeys(holder_of(KEY, networks=OFFICE)).holders

    with pytest.raises(NotAllowed):
        authenticator.authenticate_now(bearer(KEY), "198.51.100.1")
    await both_ways(authenticator, "192.0.2.1")
    keys.holders = FixedKeys(holder_of(KEY, networks=("198.51.100.1/32",))).holders
    await both_ways(authenticator, "198.51.100.1")


async def test_who_has_not_the_secret_learns_nothing_of_networks() -> None:
    holder = holder_of(KEY, networks=OFFICE)
    with pytest.raises(InvalidKey) as refused:
        await of(holder).authenticate(bearer(with_other_secret(KEY)), "203.0.113.9")
    assert refused.value.message == INCORRECT


async def test_a_key_that_has_to_be_waited_for_is_not_answered_at_once() -> None:
    keys = FixedKeys(late=(holder_of(KEY),))
    authenticator = Authenticator(keys, PEPPERS, SteppedClock())

    assert authenticator.authenticate_now(bearer(KEY)) is None
    assert await authenticator.authenticate(bearer(KEY)) == PRINCIPAL
    assert keys.asked == [KEY[3:15]]


async def test_nobody_but_the_authenticator_sees_the_key() -> None:
    class Keys(FixedKeys):
        def cached(self, public_id: str) -> None:
            seen.append(public_id)

    seen: list[str] = []
    keys = Keys(holder_of(KEY))
    authenticator = Authenticator(keys, PEPPERS, SteppedClock())
    authenticator.authenticate_now(bearer(KEY))
    principal = await authenticator.authenticate(bearer(KEY))

    assert set(seen + keys.asked) == {KEY[3:15]}
    assert KEY[16:59] not in f"{principal!r} {vars(authenticator)!r} {keys.holders!r}"
