"""Who tries out keys is told to wait; who has a right one is not, wherever it comes from."""

from __future__ import annotations

import asyncio
from collections import Counter

import msgspec
import pytest
from identity_kit import KEY, PEPPERS, PRINCIPAL, FixedKeys, SteppedClock, holder_of, new_key, with_other_secret

from gateway.domain.tenancy import KeyHolder
from gateway.errors import EvenhandError, InvalidKey, NotAllowed, TooManyAttempts
from gateway.limits.throttles import Throttles
from gateway.services.authenticate import Authenticator
from gateway.services.throttle import Guesses, Throttle

OFFICE = "192.0.2.7"
RATE = 5
COLLEAGUE = new_key()


class CountedThrottle:
    """A throttle that also tells how often it was asked."""

    def __init__(self, inner: Throttle) -> None:
        self._inner = inner
        self.num_asked = 0

    async def count(self, who: str) -> int:
        self.num_asked += 1
        return await self._inner.count(who)

    async def wait_s(self, who: str) -> int:
        self.num_asked += 1
        return await self._inner.wait_s(who)


class Door:
    """An authenticator with a throttle of `RATE` an hour.

    `KEY` is right and known at once, `COLLEAGUE` has to be looked up.
    """

    def __init__(self, **key_fields: object) -> None:
        counting = Throttles(None)
        self.throttles = [CountedThrottle(counting.throttle(name, f"{RATE}/hour")) for name in ("failed", "vain")]
        self.keys = FixedKeys(holder_of(KEY, **key_fields), late=(holder_of(COLLEAGUE),))
        self.authenticator = Authenticator(self.keys, PEPPERS, SteppedClock(), Guesses(*self.throttles))

    @property
    def num_asked(self) -> int:
        return sum(each.num_asked for each in self.throttles)

    async def knock(self, key: str, address: str = OFFICE) -> EvenhandError | None:
        """As a request would; None is let in."""
        headers = [(b"authorization", b"Bearer " + key.encode())] if key else []
        try:
            if self.authenticator.authenticate_now(headers, address) is None:
                await self.authenticator.authenticate(headers, address)
        except EvenhandError as e:
            return e
        return None

    async def exhaust(self, address: str = OFFICE) -> None:
        """Different wrong keys that have to be looked up."""
        for _ in range(RATE):
            assert isinstance(await self.knock(new_key(), address), InvalidKey)


WRONG = {
    "unknown": new_key,
    "of a wrong secret": lambda: with_other_secret(KEY),
    "malformed": lambda: "sk-not-one-of-ours",
    "mistyped": lambda: new_key()[:-1],
    "always the same": lambda: COLLEAGUE.swapcase(),
}


@pytest.mark.parametrize("kind", WRONG)
async def test_after_so_many_wrong_keys_an_address_is_told_to_wait(kind: str) -> None:
    door = Door()
    for _ in range(RATE):
        error = await door.knock(WRONG[kind]())
        assert isinstance(error, InvalidKey)
        assert error.message == "Incorrect API key provided."

    for _ in range(3):
        error = await door.knock(WRONG[kind]())
        assert isinstance(error, TooManyAttempts)
        assert (error.status, error.code, error.type) == (429, "too_many_attempts", "rate_limit_error")
        assert error.retry_after_s is not None
        assert 1 <= error.retry_after_s <= 3600
        assert f"in {error.retry_after_s} seconds" in error.message


async def test_guesses_beyond_the_rate_are_not_looked_up() -> None:
    door = Door()
    await door.exhaust()
    looked_up = len(door.keys.asked)
    assert looked_up == RATE

    for _ in range(20):
        assert isinstance(await door.knock(new_key()), TooManyAttempts)
    assert len(door.keys.asked) == looked_up


async def test_of_guesses_at_the_same_time_exactly_so_many_are_told_that_they_are_wrong() -> None:
    door = Door()
    errors = await asyncio.gather(*(door.knock(new_key()) for _ in range(50)))

    assert Counter(map(type, errors)) == {InvalidKey: RATE, TooManyAttempts: 50 - RATE}


async def test_a_right_key_that_is_known_is_let_in_from_an_address_that_is_over() -> None:
    door = Door()
    await door.exhaust()

    assert await door.knock(KEY) is None


async def test_a_right_key_costs_no_question() -> None:
    door = Door()
    for _ in range(100):
        assert await door.knock(KEY) is None
    assert door.num_asked == 0


async def test_a_key_that_was_right_before_is_looked_up_again_without_a_question() -> None:
    """What is kept of keys is forgotten at every change of any of them."""
    door = Door()
    assert await door.knock(COLLEAGUE) is None
    await door.exhaust()
    num_asked, looked_up = door.num_asked, len(door.keys.asked)

    for _ in range(3):
        assert await door.knock(COLLEAGUE) is None
    assert (door.num_asked, len(door.keys.asked)) == (num_asked, looked_up + 3)


async def test_one_wrong_key_that_comes_again_and_again_keeps_no_new_key_out() -> None:
    door, old = Door(), new_key()
    for _ in range(10 * RATE):
        assert await door.knock(old) is not None
    assert isinstance(await door.knock(old), TooManyAttempts)

    assert await door.knock(COLLEAGUE) is None


async def test_one_wrong_key_beyond_the_rate_is_not_looked_up_again() -> None:
    door, old = Door(), new_key()
    for _ in range(10 * RATE):
        await door.knock(old)

    assert len(door.keys.asked) == RATE


async def test_a_new_key_waits_where_many_are_tried_and_nowhere_else() -> None:
    door = Door()
    await door.exhaust()

    assert isinstance(await door.knock(COLLEAGUE), TooManyAttempts)
    assert await door.knock(COLLEAGUE, "192.0.2.8") is None
    assert await door.knock(COLLEAGUE) is None  # it is known to be right now


@pytest.mark.parametrize(
    ("first", "second", "is_same"),
    [
        ("2001:db8:1:2::1", "2001:db8:1:2:ffff::9", True),
        ("2001:db8:1:2::1", "2001:db8:1:3::1", False),
        ("192.0.2.7", "::ffff:192.0.2.7", True),
        ("192.0.2.7", "192.0.2.8", False),
        ("", "/run/hub.sock", True),
    ],
)
async def test_an_address_counts_as_ipv4_or_as_its_64_of_ipv6(first: str, second: str, is_same: bool) -> None:
    door = Door()
    await door.exhaust(first)

    assert isinstance(await door.knock(new_key(), second), TooManyAttempts if is_same else InvalidKey)


def _with(holder: KeyHolder, part: str) -> KeyHolder:
    return msgspec.structs.replace(holder, **{part: msgspec.structs.replace(getattr(holder, part), disabled_at_ms=1)})


@pytest.mark.parametrize(
    ("key", "fields", "kind"),
    [
        ("", {}, InvalidKey),
        (KEY, {"revoked_at_ms": 1}, InvalidKey),
        (KEY, {"expires_at_ms": 1}, InvalidKey),
        (KEY, {"networks": ("198.51.100.0/24",)}, NotAllowed),
    ],
    ids=["no key", "revoked", "expired", "other network"],
)
async def test_who_does_not_guess_is_not_counted_and_always_told_why(
    key: str, fields: dict[str, object], kind: type[EvenhandError]
) -> None:
    door = Door(**fields)
    for _ in range(3 * RATE):
        assert type(await door.knock(key)) is kind
    assert door.num_asked == 0


@pytest.mark.parametrize("part", ["team", "organization"])
async def test_who_is_disabled_is_not_counted(part: str) -> None:
    door = Door()
    door.keys.holders = {public_id: _with(each, part) for public_id, each in door.keys.holders.items()}
    for _ in range(3 * RATE):
        assert isinstance(await door.knock(KEY), NotAllowed)
    assert door.num_asked == 0


async def test_what_is_remembered_of_wrong_keys_has_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.services.throttle.MAX_VAIN", 3)
    door = Door()
    for number in range(20):
        await door.knock(new_key(), f"192.0.2.{number}")

    assert len(door.authenticator._guesses._vain) == 3


async def test_what_is_remembered_of_right_keys_has_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.services.authenticate.MAX_PRINCIPALS", 3)
    keys = [new_key() for _ in range(5)]
    authenticator = Authenticator(FixedKeys(*map(holder_of, keys)), PEPPERS, SteppedClock())
    for key in (*keys, *keys):
        assert (await authenticator.authenticate([(b"x-api-key", key.encode())])).team_id == PRINCIPAL.team_id
    assert len(authenticator._known) == 3
