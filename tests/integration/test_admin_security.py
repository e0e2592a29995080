"""The admin API under attack, route by route from the application's own table, on real databases."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

import httpx
import pytest
import structlog
from admin_kit import ACTOR, MODEL, Office, admin_routes
from identity_kit import with_other_secret
from sqlalchemy import select

from gateway.domain.limits.policy import QuotaRule
from gateway.services.admin_keys import KeyTerms
from gateway.services.stores import Storage
from gateway.storage.tables import metadata
from gateway.telemetry.logging import configure_logging

HOSTILE = {
    "sql": "x'); DROP TABLE organizations; --",
    "sql without quotes": '1 OR 1=1 UNION SELECT digest FROM keys "; --',
    "header injection": "x\r\nset-cookie: a=b\r\n\r\n<html>",
    "nul": "x\x00y",
    "long": "x" * 10_000,
    "right to left": "\u202eabc\u202c\u200f",
    "hebrew": "צוות אדום",
    "emoji": "👩‍👩‍👧‍👦🏳️‍🌈",
    "half an emoji": "\ud83d",
    "format": "%s%n{0}{{7*7}}${jndi:ldap://x}",
    "path": "../../etc/passwd",
    "markup": "<script>alert(1)</script>",
    "empty": "",
    "space": " ",
}

QUOTA = QuotaRule(unit="tokens", period="week", amount=1000)

UNASKED = ("id", "public_id", "digest", "secret", "pepper_id", "created_at", "revoked_at", "disabled_at", "is_admin",
           "__class__", "🙂", "x" * 3000, "a`b")  # fmt: skip
"""Fields that no body has; `role` is added where it is not the token's own."""


@pytest.fixture
def office(storage: Storage) -> Office:
    return Office(storage)


class Estate:
    """One of everything, and for every route a request that would be accepted."""

    def __init__(self, office: Office) -> None:
        self.office = office

    async def make(self) -> None:
        office, admin = self.office, self.office.admin
        await office.add_model()
        organization = await admin.tenants.create_organization(ACTOR, name="acme")
        team = await admin.tenants.create_team(ACTOR, organization_id=organization.id, name="red")
        issued = await admin.keys.create(ACTOR, team_id=team.id, terms=KeyTerms(name="k"))
        token = await admin.tokens.create(ACTOR, name="t", role="viewer")
        await admin.catalog.create_alias(ACTOR, name="gpt/x", model=MODEL)
        self.raw_key = issued.raw
        self.viewer = token.raw
        self.places = {
            "organization_id": organization.id,
            "team_id": team.id,
            "key_id": issued.key.id,
            "token_id": token.token.id,
            "scope_id": team.id,
        }
        await admin.limits.set(ACTOR, scope_id=team.id, rule=QUOTA)
        await admin.quotas.top_up(ACTOR, scope_id=team.id, name=QUOTA.name, amount=1, reason="r")
        await admin.prices.add(ACTOR, model=MODEL, prompt=1, completion=1)
        tenant = {"name": "n", "weight": 2}
        zoned = {**tenant, "time_zone": "Asia/Kolkata"}
        limits = {"models": ["m"], "endpoints": ["chat"], "max_queue_depth": 1, "deadline_ms": 1, "networks": ["::1"]}
        key = {"name": "n", "default_class": "batch", "expires_at": "2030-01-01T00:00:00.000Z", **limits}
        alias = {"model": MODEL, "system_default": "s", "request_class": "batch"}
        self.bodies: dict[str, dict[str, Any]] = {
            "createOrganization": zoned,
            "changeOrganization": {**zoned, "disabled": False},
            "createTeam": {**tenant, "organization_id": organization.id},
            "changeTeam": {**tenant, "disabled": False},
            "createKey": {**key, "team_id": team.id},
            "changeKey": key,
            "revokeKey": {},
            "createAdminToken": {"name": "n", "role": "viewer", "expires_at": "2030-01-01T00:00:00.000Z"},
            "revokeAdminToken": {},
            "changeModel": {"disabled": False},
            "createAlias": {**alias, "name": "n"},
            "changeAlias": alias,
            "removeAlias": {},
            "setLimit": {"scope_id": team.id, "model": MODEL, "shadow": True, "rule": {"kind": "output", "amount": 1}},
            "removeLimit": {},
            "topUp": {"name": QUOTA.name, "model": None, "amount": 1, "reason": "r", "period_id": "2027-W02"},
            "addPrice": {
                "model": MODEL,
                "valid_from": "2030-01-01T00:00:00.000Z",
                **dict.fromkeys(("prompt", "cached", "completion"), 2),
            },
        }

    def requests(self) -> Iterator[tuple[str, str, str, dict[str, Any] | None]]:
        """Operation, method, path and body of every route."""
        for method, template, handler in admin_routes(self.office.app):
            path = template.removeprefix("/admin/api")
            for name, value in self.places.items():
                path = path.replace(f"{{{name}:str}}", value)
            names = {"models": MODEL, "aliases": "gpt/x", "limits": QUOTA.name}
            path = path.replace("{name:path}", names.get(path.split("/")[1], ""))
            assert "{" not in path, f"a place of {template} is not known to this test"
            body = None if method == "GET" else self.bodies[handler.operation_id]
            yield handler.operation_id, method, path, body

    async def state(self) -> tuple[object, ...]:
        return await self.office.audit(), await self.office.version()


@pytest.fixture
async def estate(office: Office) -> Estate:
    made = Estate(office)
    await made.make()
    return made


def test_every_route_says_what_it_needs_and_reading_is_all_that_get_does(office: Office) -> None:
    routes = list(admin_routes(office.app))

    assert len(routes) >= 34
    for method, path, handler in routes:
        assert handler.opt.get("permission") == ("read" if method == "GET" else "change"), f"{method} {path}"


async def test_a_viewer_reads_everything_and_changes_nothing(estate: Estate) -> None:
    before = await estate.state()
    async with estate.office.client(estate.viewer) as client:
        for operation, method, path, body in estate.requests():
            response = await client.request(method, path, json=body)
            if method == "GET":
                assert response.status_code == 200, operation
            else:
                assert (response.status_code, response.json()["code"]) == (403, "role_not_allowed"), operation
            options = await client.options(path)
            assert options.status_code == 204
    assert await estate.state() == before


async def test_without_an_admin_token_every_route_is_closed(estate: Estate) -> None:
    before = await estate.state()
    answers = set()
    for headers in (
        {},
        {"authorization": f"Bearer {estate.raw_key}"},
        {"x-api-key": estate.raw_key},
        {"x-api-key": estate.viewer},
        {"authorization": f"Basic {estate.viewer}"},
        {"authorization": f"Bearer {estate.raw_key.replace('eh_', 'eha_')}"},
        {"authorization": "Bearer eha_' OR 1=1 --"},
        {"authorization": b"Bearer \xff\x00\xfe"},
        {"authorization": f"Bearer {'x' * 20000}"},
    ):
        async with estate.office.client() as client:
            for operation, method, path, body in estate.requests():
                response = await client.request(method, path, json=body, headers=headers)
                assert response.status_code == 401, operation
                assert (await client.options(path, headers=headers)).status_code == 401, operation
                answers.add(response.content)
    assert len(answers) == 1
    assert await estate.state() == before


async def test_a_token_with_another_secret_opens_no_route(estate: Estate) -> None:
    """Public ids are in lists and logs: whoever has one has nothing."""
    before = await estate.state()
    for forged in (with_other_secret(estate.viewer), with_other_secret(await estate.office.token())):
        before = await estate.state()
        async with estate.office.client(forged) as client:
            for operation, method, path, body in estate.requests():
                response = await client.request(method, path, json=body)
                assert (response.status_code, response.json()["code"]) == (401, "invalid_api_key"), operation
                assert (await client.options(path)).status_code == 401, operation
        assert await estate.state() == before


async def test_fields_that_nobody_asked_for_are_refused_by_name(estate: Estate) -> None:
    before = await estate.state()
    async with estate.office.client(await estate.office.token()) as client:
        before = await estate.state()
        for operation, method, path, body in estate.requests():
            if body is None:
                continue
            for name in {*UNASKED, "role", "key", "team_id", "permission"} - body.keys():
                response = await client.request(method, path, json={**body, name: "x"})
                assert response.status_code == 400, (operation, name)
                if name.isascii() and name.isidentifier():
                    assert response.json()["param"] == name[:200], operation
                assert len(response.content) < 1000
    assert await estate.state() == before


async def test_hostile_text_in_any_field_is_text_or_is_refused(estate: Estate) -> None:
    async with estate.office.client(await estate.office.token()) as client:
        for operation, method, path, body in estate.requests():
            for name, value in (body or {}).items():
                for text in HOSTILE.values():
                    for hostile in (text, [text], {text: text}, f"{value}{text}"):
                        content = json.dumps({**(body or {}), name: hostile})
                        response = await client.request(method, path, content=content)
                        _check(response, f"{operation} {name} {hostile!r:.60}")
                        if response.status_code < 300 and isinstance(hostile, str) and response.content:
                            assert response.json()[name] == hostile.replace("\ud83d", "\ufffd")
                        if operation == "createAlias" and response.status_code == 201:
                            await client.delete(f"/aliases/{quote(response.json()['name'], safe='')}")
        await _everything_is_still_there(client)


async def test_hostile_text_in_any_place_or_query_is_not_found_or_refused(estate: Estate) -> None:
    queries = ("limit", "after", "organization_id", "team_id", "scope", "scope_id", "model", "from", "until", "x")
    async with estate.office.client(await estate.office.token()) as client:
        for text in HOSTILE.values():
            quoted = quote(text.encode("utf-8", "surrogatepass"), safe="")
            for operation, method, path, body in estate.requests():
                for place in [p for p in [*estate.places.values(), MODEL, "gpt/x", QUOTA.name] if f"/{p}" in path]:
                    if not text.strip():
                        continue
                    response = await client.request(method, path.replace(place, quoted), json=body)
                    _check(response, f"{operation} {text!r:.60}")
                    assert response.status_code in (404, 405), response.text
                for name in queries if method == "GET" else ("x",):
                    _check(await client.request(method, f"{path}?{name}={quoted}", json=body), f"{operation} {name}")
                _check(await client.request(method, f"{path}?{quoted}=1", json=body), f"{operation} {quoted:.60}")
        for odd in ("%", "%ff%fe", "%00", "&&==&", "a=b;c=d", "limit=1" * 5000, "&a=1" * 40):
            response = await client.get(httpx.URL("/organizations", query=odd.encode()))
            _check(response, repr(odd))
        await _everything_is_still_there(client)


async def test_nothing_but_the_answer_that_makes_it_ever_holds_a_secret(office: Office, storage: Storage) -> None:
    log = io.StringIO()
    root = logging.getLogger()
    handlers, level = root.handlers, root.level
    configure_logging("debug", log)
    try:
        texts, secrets = await _use_everything(office)
    finally:
        structlog.reset_defaults()
        root.handlers, root.level = handlers, level
    texts.append(log.getvalue())
    async with storage.reading() as work:
        digests = [each.secret.digest for each in await work.keys.page(after="", limit=9)]
        digests += [each.secret.digest for each in await work.admin_tokens.page(after="", limit=9)]
    rows = await _all_rows(storage)

    assert len(secrets) == 3
    assert len(digests) == 3
    for raw in secrets:
        for part in (raw, raw.rpartition("_")[2], raw.rpartition("_")[2][:-6]):
            assert not [text for text in texts if part in text]
            assert part.encode() not in rows
    for digest in digests:
        assert rows.count(digest.hex().encode()) == 1
        assert not [text for text in texts if digest.hex() in text]


async def _use_everything(office: Office) -> tuple[list[str], list[str]]:
    """All answers but those that make a secret, and the secrets."""
    estate = Estate(office)
    await estate.make()
    secret = await office.token()
    secrets = [estate.raw_key, estate.viewer, secret]
    async with office.client(secret) as client:
        answers = [await client.get(path) for path in ("/keys", "/admin-tokens", "/audit")]
        for raw in secrets:
            answers += [
                await client.get(f"/keys/{raw}"),
                await client.patch(f"/aliases/{raw}", json={}),
                await client.get("/keys", params={"after": raw}),
                await client.get("/keys", params={"limit": raw}),
                await client.post("/keys", json={"team_id": raw, "name": "x"}),
                await client.post("/keys", headers={"authorization": f"Bearer {raw}x"}),
            ]
        for operation, method, path, body in estate.requests():
            if operation not in ("createKey", "createAdminToken"):
                answers.append(await client.request(method, path, json=body))
    return [answer.text for answer in answers], secrets


async def _all_rows(storage: Storage) -> bytes:
    """Every table as text; bytes are in it as hexadecimal digits and as they are."""
    parts: list[bytes] = []
    async with storage.reading() as work:
        for table in metadata.sorted_tables:
            for row in await work._transaction.rows(select(table)):  # type: ignore[attr-defined]
                parts.extend(_as_bytes(value) for value in row.values())
    return b"\n".join(parts)


def _as_bytes(value: object) -> bytes:
    return value.hex().encode() + b" " + value if isinstance(value, bytes) else str(value).encode()


def _check(response: httpx.Response, what: str) -> None:
    assert response.status_code < 500, f"{what}: {response.text}"
    assert "set-cookie" not in response.headers, what
    if response.status_code >= 400:
        assert response.headers["content-type"] == "application/problem+json", what
        assert len(response.content) < 2000, what


async def _everything_is_still_there(client: httpx.AsyncClient) -> None:
    for path in ("/organizations", "/teams", "/keys", "/admin-tokens", "/models", "/audit", "/limits", "/prices"):
        assert (await client.get(path)).json()["data"], path
