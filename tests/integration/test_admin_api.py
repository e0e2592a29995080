"""The admin API on real databases: what its routes do, and what they show."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from admin_kit import MODEL, NOW_S, SOURCE, Office, ledger_row

from gateway.domain.credential import ADMIN_TOKEN, issue
from gateway.domain.ledger import Charge
from gateway.services.stores import Storage
from gateway.storage.database import Database

NOW_TEXT = "2027-01-15T08:00:00.250Z"


@pytest.fixture
def office(storage: Storage) -> Office:
    return Office(storage)


def _ok(response: httpx.Response, status: int = 200) -> dict[str, Any]:
    assert response.status_code == status, response.text
    assert response.headers["cache-control"] == "no-store"
    body: dict[str, Any] = response.json()
    return body


def _problem(response: httpx.Response, status: int, code: str, param: str | None = None) -> str:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/problem+json"
    problem = response.json()
    assert problem["type"] == "about:blank"
    assert problem["status"] == status
    assert problem["code"] == code
    assert problem.get("param") == param
    assert problem["request_id"] == "req_test"
    detail: str = problem["detail"]
    return detail


async def test_from_an_organization_to_a_key_and_back(office: Office) -> None:
    async with office.client(await office.token()) as client:
        organization = _ok(await client.post("/organizations", json={"name": "Ácme 株式会社", "weight": 3}), 201)
        assert organization == {
            "id": organization["id"],
            "name": "Ácme 株式会社",
            "weight": 3,
            "time_zone": "UTC",
            "created_at": NOW_TEXT,
            "disabled_at": None,
        }
        team = _ok(await client.post("/teams", json={"organization_id": organization["id"], "name": "red"}), 201)
        wanted = {
            "team_id": team["id"],
            "name": "agents",
            "default_class": "standard",
            "models": ["a", "b/c"],
            "endpoints": ["chat"],
            "max_queue_depth": 5,
            "deadline_ms": 60000,
            "expires_at": "2027-02-01T02:00:00+02:00",
        }
        made = _ok(await client.post("/keys", json=wanted), 201)
        raw = made.pop("key")
        assert raw.startswith(f"eh_{made['public_id']}_")
        assert made == {
            **wanted,
            "networks": None,
            "id": made["id"],
            "public_id": made["public_id"],
            "pepper_id": "test",
            "created_at": NOW_TEXT,
            "expires_at": "2027-02-01T00:00:00.000Z",
            "revoked_at": None,
        }
        assert _ok(await client.get(f"/keys/{made['id']}")) == made
        assert _ok(await client.get("/keys", params={"team_id": team["id"]})) == {"data": [made], "next": None}

        cleared = {"models": None, "expires_at": None, "max_queue_depth": None}
        changed = _ok(await client.patch(f"/keys/{made['id']}", json=cleared))
        assert changed == {**made, **cleared}
        revoked = _ok(await client.post(f"/keys/{made['id']}/revoke"))
        assert revoked == {**changed, "revoked_at": NOW_TEXT}
        assert _ok(await client.post(f"/keys/{made['id']}/revoke", json={})) == revoked

        disabled = _ok(await client.patch(f"/teams/{team['id']}", json={"disabled": True}))
        assert disabled == {**team, "disabled_at": NOW_TEXT}
        assert _ok(await client.patch(f"/teams/{team['id']}", json={"disabled": False, "weight": 4}))["weight"] == 4
        assert _ok(await client.get("/teams", params={"organization_id": organization["id"]}))["data"][0]["weight"] == 4


async def test_models_and_aliases_with_slashes_in_their_names(office: Office) -> None:
    await office.add_model()
    async with office.client(await office.token()) as client:
        alias = _ok(await client.post("/aliases", json={"name": "claude/3%5x?", "model": MODEL}), 201)
        assert alias["name"] == "claude/3%5x?"
        assert _ok(await client.get("/aliases/claude/3%255x%3F")) == alias
        changed = _ok(await client.patch("/aliases/claude/3%255x%3F", json={"system_default": "Be\n\tbrief."}))
        assert changed == {**alias, "system_default": "Be\n\tbrief."}
        assert _ok(await client.get("/aliases"))["data"] == [changed]
        removed = await client.delete("/aliases/claude%2F3%255x%3F")
        assert (removed.status_code, removed.content) == (204, b"")
        assert _problem(await client.get("/aliases/claude/3%255x%3F"), 404, "not_found")

        model = _ok(await client.patch(f"/models/{MODEL}", json={"disabled": True}))
        assert model == {"name": MODEL, "created_at": "1970-01-01T00:00:00.001Z", "disabled_at": NOW_TEXT}
        assert _ok(await client.get("/models"))["data"] == [model]


async def test_the_audit_says_who_and_from_where(office: Office) -> None:
    async with office.client(await office.token()) as client:
        organization = _ok(await client.post("/organizations", json={"name": "acme"}), 201)
        tokens = _ok(await client.get("/admin-tokens"))["data"]
        page = _ok(await client.get("/audit", params={"limit": 1, "after": "1"}))

    (entry,) = page["data"]
    assert page["next"] is None
    assert entry["actor"] == tokens[0]["id"]
    assert (entry["source"], entry["request_id"]) == (SOURCE, "req_test")
    assert (entry["sequence"], entry["action"], entry["object_id"]) == (2, "organization.create", organization["id"])
    assert (entry["before"], entry["after"]["name"], entry["at"]) == (None, "acme", NOW_TEXT)
    assert len(entry["hash"]) == len(entry["previous_hash"]) == 64


async def test_a_token_ends_at_once_when_it_is_revoked_or_expires(office: Office) -> None:
    async with office.client(await office.token()) as client:
        wanted = {"name": "short", "role": "viewer", "expires_at": "2027-01-15T09:00:00Z"}
        short = _ok(await client.post("/admin-tokens", json=wanted), 201)
        other = _ok(await client.post("/admin-tokens", json={"name": "other", "role": "admin"}), 201)
        assert short["token"].startswith("eha_")
        for made in (short, other):
            async with office.client(made["token"]) as used:
                _ok(await used.get("/organizations"))
        async with office.client(other["token"]) as itself:
            assert _ok(await itself.post(f"/admin-tokens/{other['id']}/revoke"))["revoked_at"] == NOW_TEXT
            told = {_problem(await itself.get("/organizations"), 401, "invalid_api_key")}
        office.clock.now += 3600
        async with office.client(short["token"]) as expired:
            told.add(_problem(await expired.get("/organizations"), 401, "invalid_api_key"))
        for credential in (None, "eha_wrong", other["token"][:-1] + "0", "Bearer"):
            async with office.client(credential) as stranger:
                response = await stranger.get("/organizations")
                assert response.headers["www-authenticate"] == "Bearer"
                told.add(_problem(response, 401, "invalid_api_key"))
        assert len(told) == 1


async def test_the_ledger_and_usage_by_the_hour(office: Office, storage: Storage) -> None:
    hour_ms = 3_600_000 * (int(NOW_S * 1000) // 3_600_000)
    async with office.client(await office.token()) as client:
        organization = _ok(await client.post("/organizations", json={"name": "acme"}), 201)
        owners = [
            _ok(await client.post("/teams", json={"organization_id": organization["id"], "name": name}), 201)["id"]
            for name in ("red", "blue")
        ]
        async with storage.writing() as work:
            await work.ledger.post(
                [
                    ledger_row(
                        n,
                        team_id=owners[n % 2],
                        key_id=f"key_{n % 3}",
                        closed_at_ms=hour_ms - n * 3_600_000,
                        cost_microusd=10 + n,
                        charges=(Charge("quota", hour_ms, n),) if n == 1 else (),
                    )
                    for n in range(7)
                ]
            )
        rows: list[dict[str, Any]] = []
        after: str | None = ""
        while after is not None:
            page = _ok(await client.get("/ledger", params={"limit": 3, "after": after}))
            rows.extend(page["data"])
            after = page["next"]
        assert [row["request_id"] for row in rows] == [f"req_{n:032x}" for n in range(7)]
        assert rows[1]["closed_at"] == "2027-01-15T07:00:00.000Z"
        assert rows[1]["outcome"] == "finished"
        assert (rows[0]["cost_microusd"], rows[0]["charges"], rows[1]["cost_microusd"]) == (10, [], 11)
        assert rows[1]["charges"] == [{"quota": "quota", "ends_at": "2027-01-15T08:00:00.000Z", "units": 1}]
        red = _ok(await client.get("/ledger", params={"team_id": owners[0]}))["data"]
        assert [row["request_id"] for row in red] == [f"req_{n:032x}" for n in (0, 2, 4, 6)]

        whole = {"from": "2027-01-15T00:00:00Z", "until": str(hour_ms // 1000 + 3600)}
        all_at_once = _ok(await client.get("/usage", params=whole))["data"]
        assert [usage["hour"] for usage in all_at_once] == [f"2027-01-15T0{n}:00:00.000Z" for n in range(2, 9)]
        assert all_at_once[0]["requests"] == 1
        assert [usage["cost_microusd"] for usage in all_at_once] == [16, 15, 14, 13, 12, 11, 10]
        by_page: list[dict[str, Any]] = []
        after = ""
        while after is not None:
            page = _ok(await client.get("/usage", params={**whole, "limit": 2, "after": after}))
            by_page.extend(page["data"])
            after = page["next"]
        assert by_page == all_at_once
        of_red = _ok(await client.get("/usage", params={"team_id": owners[0]}))["data"]
        assert len(of_red) == 4


async def test_pages_of_usage_go_on_within_an_hour(office: Office, storage: Storage) -> None:
    hour_ms = 3_600_000 * (int(NOW_S * 1000) // 3_600_000) - 3_600_000
    async with storage.writing() as work:
        await work.ledger.post(
            [ledger_row(n, team_id="team_x", key_id=f"key_{n:02d}", closed_at_ms=hour_ms) for n in range(25)]
        )
    async with office.client(await office.token("viewer")) as client:
        seen = []
        after: str | None = ""
        while after is not None:
            page = _ok(await client.get("/usage", params={"limit": 2, "after": after}))
            seen.extend(usage["key_id"] for usage in page["data"])
            after = page["next"]
    assert seen == [f"key_{n:02d}" for n in range(25)]


async def test_what_is_not_there_or_cannot_be_is_a_problem_that_names_the_field(office: Office) -> None:
    async with office.client(await office.token()) as client:
        organization = _ok(await client.post("/organizations", json={"name": "acme"}), 201)
        _problem(await client.post("/organizations", json={"name": "acme"}), 409, "conflict")
        for body, param in (
            ({"name": "x", "weight": 0}, "weight"),
            ({"name": "x", "weight": "3"}, "weight"),
            ({"name": "x", "weight": True}, "weight"),
            ({"name": "x", "weight": 10**30}, "weight"),
            ({"name": "x" * 101}, "name"),
            ({"name": "a\r\nb"}, "name"),
            ({"name": None}, "name"),
            ({}, "name"),
            ({"name": "x", "wieght": 3}, "wieght"),
        ):
            _problem(await client.post("/organizations", json=body), 400, "invalid_request", param)
        for path in ("/organizations/x", f"/teams/{organization['id']}", "/keys/key_1", "/models/x", "/audit/1", "/x"):
            _problem(await client.get(path), 404, "not_found")
        not_allowed = await client.delete(f"/organizations/{organization['id']}")
        _problem(not_allowed, 405, "method_not_allowed")
        assert set(not_allowed.headers["allow"].replace(" ", "").split(",")) >= {"GET", "PATCH"}
        for query, param in (
            ("limit=0", "limit"),
            ("limit=201", "limit"),
            ("limit=x", "limit"),
            ("limit=2&limit=3", "limit"),
            ("after=x", "after"),
            ("after=team_00", "after"),
            ("team=x", "team"),
        ):
            _problem(await client.get(f"/organizations?{query}"), 400, "invalid_request", param)
        for path, param in (
            ("/audit?after=-1", "after"),
            ("/ledger?after=x", "after"),
            ("/usage?after=x", "after"),
            ("/usage?from=x", "from"),
            ("/usage?from=2026", "from"),
            ("/usage?until=20261130", "until"),
            ("/usage?start=2027-01-01", "start"),
            ("/usage?from=2027-01-02&until=2027-01-01", "from"),
        ):
            _problem(await client.get(path), 400, "invalid_request", param)
        _problem(await client.post("/organizations", content=b"x" * (65 << 10)), 413, "request_too_large")
        _problem(await client.post("/organizations", content=b"{"), 400, "invalid_request")
        _problem(await client.patch(f"/organizations/{organization['id']}?weight=3", json={}), 400,
                 "invalid_request", "weight")  # fmt: skip


async def test_without_a_database_every_token_is_answered_503_and_told_when_to_retry(
    tmp_path: Path, free_port: Callable[[], int]
) -> None:
    database = Database.open(f"postgresql://u:p@127.0.0.1:{free_port()}/evenhand", tmp_path)
    raw, _ = issue(ADMIN_TOKEN)
    try:
        async with Office(database).client(raw) as client:
            response = await client.get("/organizations")
    finally:
        await database.close()

    _problem(response, 503, "storage_unavailable")
    assert int(response.headers["retry-after"]) >= 1
