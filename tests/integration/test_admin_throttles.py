"""Who tries out admin tokens, and who changes too much, over the admin API and real databases."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from admin_kit import ACTOR, Office
from identity_kit import PEPPERS, new_key, with_other_secret

from gateway.domain.credential import ADMIN_TOKEN, issue
from gateway.limits.throttles import Throttles
from gateway.services.admin_tokens import AdminAuthenticator
from gateway.services.stores import Storage
from gateway.services.throttle import Guesses

RATE = 4


class Reads:
    """A storage that counts how often it is read."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self.num = 0
        self.writing = storage.writing

    def reading(self) -> Any:
        self.num += 1
        return self._storage.reading()


@pytest.fixture
def office(storage: Storage) -> Office:
    counting = Throttles(None)
    guesses = Guesses(*(counting.throttle(name, f"{RATE}/hour") for name in ("failed", "unknown")))
    return Office(Reads(storage), guesses=guesses, changes=counting.throttle("changes", f"{RATE}/hour"))


def new_token() -> str:
    return issue(ADMIN_TOKEN)[0]


async def ask(office: Office, token: str) -> httpx.Response:
    async with office.client(token) as client:
        return await client.get("/organizations")


def said(answer: httpx.Response) -> tuple[int, str]:
    assert answer.headers["content-type"] == "application/problem+json"
    return answer.status_code, answer.json()["code"]


async def test_who_tries_out_tokens_is_told_to_wait_and_a_right_token_works(office: Office) -> None:
    right = await office.token()
    assert (await ask(office, right)).status_code == 200
    for _ in range(RATE):
        assert said(await ask(office, new_token())) == (401, "invalid_api_key")
    refused = await ask(office, new_token())

    assert said(refused) == (429, "too_many_attempts")
    assert 1 <= int(refused.headers["retry-after"]) <= 3600
    assert refused.json()["title"] == "Too Many Requests"
    assert (await ask(office, right)).status_code == 200


async def test_beyond_the_rate_the_database_is_not_asked(office: Office) -> None:
    storage: Any = office.storage
    wrong = [new_token() for _ in range(RATE)]
    for token in wrong:
        await ask(office, token)
    num_before = storage.num
    for token in (*wrong, *(new_token() for _ in range(5)), "eha_x", new_key()):
        assert said(await ask(office, token)) == (429, "too_many_attempts")

    assert storage.num == num_before


@pytest.mark.parametrize("kind", ["other secret", "revoked", "expired", "an API key", "the same again"])
async def test_every_kind_of_wrong_token_counts(office: Office, kind: str) -> None:
    made = await office.admin.tokens.create(
        ACTOR, name="t", expires_at_ms=int((office.clock.now + 1) * 1000) if kind == "expired" else None
    )
    if kind == "revoked":
        await office.admin.tokens.revoke(ACTOR, made.token.id)
    office.clock.now += 2
    same = new_token()
    wrong = {
        "other secret": lambda: with_other_secret(made.raw),
        "revoked": lambda: made.raw,
        "expired": lambda: made.raw,
        "an API key": new_key,
        "the same again": lambda: same,
    }[kind]
    answers = [said(await ask(office, wrong())) for _ in range(RATE + 2)]

    assert answers == [(401, "invalid_api_key")] * RATE + [(429, "too_many_attempts")] * 2


async def test_a_wrong_secret_of_a_token_in_use_is_a_guess_like_any_other(office: Office) -> None:
    storage: Any = office.storage
    right = await office.token()
    await ask(office, right)
    for _ in range(RATE):
        await ask(office, with_other_secret(right))
    num_before = storage.num
    for _ in range(3):
        assert said(await ask(office, with_other_secret(right))) == (429, "too_many_attempts")
    assert storage.num == num_before
    assert (await ask(office, right)).status_code == 200


async def test_one_program_with_an_old_token_keeps_no_new_token_out(office: Office) -> None:
    old, new = new_token(), await office.token()
    for _ in range(5 * RATE):
        await ask(office, old)

    assert (await ask(office, new)).status_code == 200


async def test_no_token_at_all_does_not_count(office: Office) -> None:
    for _ in range(3 * RATE):
        async with office.client() as client:
            assert said(await client.get("/organizations")) == (401, "invalid_api_key")
    assert said(await ask(office, new_token())) == (401, "invalid_api_key")


async def test_what_is_remembered_of_right_tokens_has_a_bound(
    storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.services.admin_tokens.MAX_GOOD", 2)
    office = Office(storage)
    authenticator = AdminAuthenticator(storage, PEPPERS, office.clock)
    tokens = [await office.token() for _ in range(4)]
    for token in (*tokens, *tokens):
        await authenticator.authenticate([(b"authorization", f"Bearer {token}".encode())])

    assert len(authenticator._good) == 2


# Changes


async def test_a_token_makes_so_many_changes_and_then_waits(office: Office) -> None:
    one, other = await office.token(), await office.token()
    async with office.client(one) as client:
        for number in range(RATE):
            assert (await client.post("/organizations", json={"name": f"org {number}"})).status_code == 201
        refused = await client.post("/organizations", json={"name": "one too many"})
        listed = await client.get("/organizations")

    assert said(refused) == (429, "too_many_changes")
    assert 1 <= int(refused.headers["retry-after"]) <= 3600
    assert {each["name"] for each in listed.json()["data"]} == {f"org {number}" for number in range(RATE)}
    async with office.client(other) as client:
        assert (await client.post("/organizations", json={"name": "of another"})).status_code == 201


async def test_reading_and_what_a_role_may_not_do_are_no_changes(office: Office) -> None:
    viewer, admin = await office.token("viewer"), await office.token()
    async with office.client(viewer) as client:
        for _ in range(3 * RATE):
            assert said(await client.post("/organizations", json={"name": "x"})) == (403, "role_not_allowed")
    async with office.client(admin) as client:
        for _ in range(3 * RATE):
            assert (await client.get("/organizations")).status_code == 200
            assert (await client.options("/organizations")).status_code == 204
        assert (await client.post("/organizations", json={"name": "x"})).status_code == 201


async def test_a_change_that_is_refused_counts_as_well(office: Office) -> None:
    async with office.client(await office.token()) as client:
        for _ in range(RATE):
            assert (await client.post("/organizations", json={"name": ""})).status_code == 400
        assert said(await client.post("/organizations", json={"name": "x"})) == (429, "too_many_changes")
