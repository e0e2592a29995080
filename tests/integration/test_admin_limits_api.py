"""Limits, quotas, top-ups, prices, time zones and networks over HTTP, on real databases."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import msgspec
import pytest
from admin_kit import MODEL, NOW_S, Office, ledger_row

from gateway.domain.ids import OrganizationId
from gateway.domain.ledger import Charge
from gateway.services.stores import Storage

NOW_MS = int(NOW_S * 1000)
NOW_TEXT = "2027-01-15T08:00:00.250Z"
RATE = {"kind": "requests", "rate": "100/minute", "burst": 20}
QUOTA = {"kind": "quota", "unit": "tokens", "period": "month", "amount": 1000}


@pytest.fixture
async def office(storage: Storage) -> Office:
    made = Office(storage)
    await made.add_model()
    return made


def _ok(response: httpx.Response, status: int = 200) -> dict[str, Any]:
    assert response.status_code == status, response.text
    body: dict[str, Any] = response.json()
    return body


def _problem(response: httpx.Response, status: int, param: str | None = None) -> str:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/problem+json"
    assert response.json().get("param") == param, response.text
    detail: str = response.json()["detail"]
    return detail


async def _make(client: httpx.AsyncClient) -> tuple[str, str, str]:
    """Ids of an organization, its team, and a key of that."""
    organization = _ok(await client.post("/organizations", json={"name": "acme", "time_zone": "Asia/Kolkata"}), 201)
    assert organization["time_zone"] == "Asia/Kolkata"
    team = _ok(await client.post("/teams", json={"organization_id": organization["id"], "name": "red"}), 201)
    key = _ok(await client.post("/keys", json={"team_id": team["id"], "name": "k"}), 201)
    return organization["id"], team["id"], key["id"]


async def test_a_limit_is_set_shown_set_again_and_removed(office: Office) -> None:
    async with office.client(await office.token()) as client:
        organization, team, key = await _make(client)
        limit = _ok(await client.put("/limits", json={"scope_id": team, "rule": RATE}))
        assert limit == {
            "scope": "team",
            "scope_id": team,
            "model": None,
            "name": "requests/minute",
            "rule": RATE,
            "shadow": False,
            "changed_at": NOW_TEXT,
        }
        address = f"/limits/{team}/requests/minute"
        assert _ok(await client.get(address)) == limit
        office.clock.now += 60
        wanted = {"scope_id": team, "rule": limit["rule"]}
        assert _ok(await client.put("/limits", json=wanted)) == limit  # as it was: nothing is so new as to be a change

        rule = {**RATE, "rate": "50 per minute", "burst": None}
        changed = _ok(await client.put("/limits", json={"scope_id": team, "rule": rule, "shadow": True}))
        assert changed == {
            **limit,
            "rule": {**rule, "rate": "50/minute"},
            "shadow": True,
            "changed_at": "2027-01-15T08:01:00.250Z",
        }
        of_model = _ok(await client.put("/limits", json={"scope_id": team, "model": MODEL, "rule": RATE}))
        of_key = _ok(await client.put("/limits", json={"scope_id": key, "rule": {"kind": "concurrent", "amount": 3}}))
        assert _ok(await client.get("/limits", params={"scope_id": team}))["data"] == [changed, of_model]
        assert _ok(await client.get("/limits", params={"scope": "key"}))["data"] == [of_key]
        assert _ok(await client.get("/limits", params={"scope_id": organization})) == {"data": [], "next": None}
        page = _ok(await client.get("/limits", params={"limit": 2}))
        assert page["data"] == [of_key, changed]
        assert _ok(await client.get("/limits", params={"after": page["next"]})) == {"data": [of_model], "next": None}

        assert _ok(await client.get(address, params={"model": MODEL})) == of_model
        removed = await client.delete(address, params={"model": MODEL})
        assert (removed.status_code, removed.content) == (204, b"")
        assert _problem(await client.get(address, params={"model": MODEL}), 404)
        assert _ok(await client.get(address)) == changed
        assert (await client.request("DELETE", address, json={})).status_code == 204
        assert _problem(await client.delete(address), 404) == "The team has no limit of this name for all models."


async def test_every_kind_of_rule_is_answered_whole_and_can_be_sent_back(office: Office) -> None:
    tokens = {"kind": "tokens", "rate": "100000/minute", "burst": 5, "max_debt": 6, "prompt_percent": 50,
              "cached_percent": 0, "output_percent": 200, "strict": True}  # fmt: skip
    quota = {"kind": "quota", "unit": "microusd", "period": "week", "amount": 7, "hard": False, "alerts": [50, 100]}
    plain_tokens = {**tokens, "rate": "1/day", "burst": None, "max_debt": None, "prompt_percent": 100,
                    "cached_percent": 100, "output_percent": 100, "strict": False}  # fmt: skip
    sent_and_told = [
        (RATE, RATE),
        ({"kind": "requests", "rate": "1/hour"}, {"kind": "requests", "rate": "1/hour", "burst": None}),
        (tokens, tokens),
        ({"kind": "tokens", "rate": "1/day"}, plain_tokens),
        ({"kind": "context", "amount": 8192}, {"kind": "context", "amount": 8192}),
        ({"kind": "output", "amount": 1}, {"kind": "output", "amount": 1}),
        ({"kind": "concurrent", "amount": 0}, {"kind": "concurrent", "amount": 0}),
        (QUOTA, {**QUOTA, "hard": True, "alerts": [80, 100]}),
        (quota, quota),
    ]
    async with office.client(await office.token()) as client:
        _, team, _ = await _make(client)
        for sent, told in sent_and_told:
            limit = _ok(await client.put("/limits", json={"scope_id": team, "rule": sent}))
            assert limit["rule"] == told
            num_entries = len(await office.audit())
            assert _ok(await client.put("/limits", json={"scope_id": team, "rule": limit["rule"]})) == limit
            assert len(await office.audit()) == num_entries


NO_RATE = "'rule.rate' must be an amount for one second, minute, hour or day, such as 100/minute"

RULES_NOT_TAKEN = [
    (
        {"kind": "requests", "rate": "10/5minutes"},
        "rule.rate",
        f"{NO_RATE}: a rate is for one minute, not for 5.",
    ),
    (
        {"kind": "requests", "rate": "5/month"},
        "rule.rate",
        f"{NO_RATE}: for a calendar month there are quotas.",
    ),
    (
        {"kind": "tokens", "rate": "1/second; 5/day"},
        "rule.rate",
        f"{NO_RATE}: of several limits each is set for itself.",
    ),
    ({"kind": "requests", "rate": "many"}, "rule.rate", f"{NO_RATE}."),
    ({"kind": "requests", "rate": "100000001/day"}, "rule.rate", "'rule.rate' is 100000001, not 0 to 100000000."),
    ({**RATE, "burst": -1}, "rule.burst", "'rule.burst' is -1, not 0 to 100000000."),
    ({**RATE, "burst": "20"}, "rule.burst", "Invalid value for 'rule.burst': expected `int | null`, got `str`."),
    ({**RATE, "strict": True}, "rule.strict", "Unknown parameter: 'rule.strict'."),
    ({"kind": "requests"}, "rule.rate", "Missing required parameter: 'rule.rate'."),
    ({"kind": "request", "rate": "1/day"}, "rule.kind", "Invalid value for 'rule.kind': invalid value 'request'."),
    ({"rate": "1/day"}, "rule.kind", "Missing required parameter: 'rule.kind'."),
    ({**QUOTA, "unit": "usd"}, "rule.unit", "Invalid value for 'rule.unit': invalid enum value 'usd'."),
    ({**QUOTA, "amount": 0.15}, "rule.amount", "Invalid value for 'rule.amount': expected `int`, got `float`."),
    ({**QUOTA, "alerts": [0]}, "rule.alerts", "'rule.alerts' are percents from 1 to 1000, ascending, each once."),
    ({**QUOTA, "alerts": ["80"]}, "rule.alerts[0]", "Invalid value for 'rule.alerts[0]': expected `int`, got `str`."),
    ("100/minute", "rule", "Invalid value for 'rule': expected `object`, got `str`."),
]


@pytest.mark.parametrize(("rule", "param", "detail"), RULES_NOT_TAKEN)
async def test_a_rule_that_is_none_is_refused_in_one_sentence(
    office: Office, rule: object, param: str, detail: str
) -> None:
    async with office.client(await office.token()) as client:
        _, team, _ = await _make(client)
        before = (await office.audit(), await office.version())

        assert _problem(await client.put("/limits", json={"scope_id": team, "rule": rule}), 400, param) == detail

        assert (await office.audit(), await office.version()) == before


async def test_what_is_no_limit_s_place_is_refused(office: Office) -> None:
    async with office.client(await office.token()) as client:
        _, team, key = await _make(client)
        limit = {"scope_id": team, "rule": RATE}
        _problem(await client.put("/limits", json={**limit, "model": "none"}), 400, "model")
        _problem(await client.put("/limits", json={**limit, "scope_id": "adm_1"}), 404)
        _problem(await client.put("/limits", json={**limit, "scope": "team"}), 400, "scope")
        _problem(await client.put("/limits", json={**limit, "burst": 5}), 400, "burst")
        _problem(await client.put("/limits?scope_id=x", json=limit), 400, "scope_id")
        _problem(await client.post("/limits", json=limit), 405)
        await client.post(f"/keys/{key}/revoke")
        _problem(await client.put("/limits", json={**limit, "scope_id": key}), 409, "scope_id")
        for query, param in (
            ("scope=user", "scope"),
            (f"scope=team&scope_id={team}", "scope"),
            ("after=x", "after"),
            ("model=x", "model"),
        ):
            _problem(await client.get(f"/limits?{query}"), 400, param)
        _problem(await client.get("/limits?scope_id=team_x"), 404)
        for name in ("requests/day", "requests", "x", "%00", "..%2F.."):
            _problem(await client.get(f"/limits/{team}/{name}"), 404)
            _problem(await client.delete(f"/limits/{team}/{name}?model=%00"), 404)
        _ok(await client.put("/limits", json=limit))
        _problem(await client.delete(f"/limits/{team}/requests/minute?model="), 404)
        _problem(await client.delete(f"/limits/{team}/requests/minute?name=x"), 400, "name")
        _problem(await client.request("DELETE", f"/limits/{team}/requests/minute", json={"model": MODEL}), 400, "model")
        assert len(_ok(await client.get("/limits"))["data"]) == 1


async def test_how_far_a_quota_is_used_up(office: Office, storage: Storage) -> None:
    async with office.client(await office.token()) as client:
        organization, team, key = await _make(client)
        _ok(await client.put("/limits", json={"scope_id": team, "rule": QUOTA, "model": MODEL}))
        meter = f"quota-tokens/month:{team}:2027-01:{MODEL}"
        row = msgspec.structs.replace(
            ledger_row(1, team_id=team, key_id=key, closed_at_ms=NOW_MS),
            organization_id=OrganizationId(organization),
            cost_microusd=12,
            charges=(Charge(meter, NOW_MS + 1000, 810),),
        )
        async with storage.writing() as work:
            await work.ledger.post([row])
            await work.limits.alert(meter, 80, organization_id=OrganizationId(organization), at_ms=NOW_MS)
        assert _ok(await client.get(f"/quotas/{organization}")) == {"data": [], "next": None}

        top_up = {"model": MODEL, "name": "quota-tokens/month", "amount": 500, "reason": "quarterly reports"}
        made = _ok(await client.post(f"/quotas/{team}/top-ups", json=top_up), 201)
        assert made == {
            **top_up,
            "id": made["id"],
            "scope": "team",
            "scope_id": team,
            "period_id": "2027-01",
            "created_at": NOW_TEXT,
        }
        assert made["id"].startswith("top_")
        assert _ok(await client.get(f"/quotas/{team}/top-ups")) == {"data": [made], "next": None}
        assert _ok(await client.get(f"/quotas/{key}/top-ups")) == {"data": [], "next": None}
        assert _ok(await client.get(f"/quotas/{team}/top-ups", params={"after": made["id"]}))["data"] == []

        told = _ok(await client.get(f"/quotas/{key}"))
        assert told == {
            "data": [
                {
                    "scope": "team",
                    "scope_id": team,
                    "model": MODEL,
                    "name": "quota-tokens/month",
                    "unit": "tokens",
                    "period": "month",
                    "period_id": "2027-01",
                    "period_start": "2026-12-31T18:30:00.000Z",
                    "period_end": "2027-01-31T18:30:00.000Z",
                    "amount": 1000,
                    "topped_up": 500,
                    "committed": 810,
                    "percent": 54,
                    "hard": True,
                    "shadow": False,
                    "alerts": [80, 100],
                    "alerts_reached": [{"percent": 80, "at": NOW_TEXT}],
                }
            ],
            "next": None,
        }
        (of_ledger,) = _ok(await client.get("/ledger"))["data"]
        assert of_ledger["cost_microusd"] == 12
        assert of_ledger["charges"] == [{"quota": meter, "ends_at": "2027-01-15T08:00:01.250Z", "units": 810}]
        hour = {"from": "2027-01-15T08:00:00Z", "until": "2027-01-15T09:00:00Z"}
        (usage,) = _ok(await client.get("/usage", params=hour))["data"]
        assert usage["cost_microusd"] == 12


async def test_a_top_up_that_cannot_be_is_refused(office: Office) -> None:
    async with office.client(await office.token()) as client:
        _, team, _ = await _make(client)
        _ok(await client.put("/limits", json={"scope_id": team, "rule": QUOTA}))
        _ok(await client.put("/limits", json={"scope_id": team, "rule": RATE}))
        good = {"name": "quota-tokens/month", "amount": 5, "reason": "r"}
        for more, status, param in (
            ({"amount": 0}, 400, "amount"),
            ({"amount": "5"}, 400, "amount"),
            ({"amount": 5.5}, 400, "amount"),
            ({"amount": 10**400}, 400, "amount"),
            ({"reason": ""}, 400, "reason"),
            ({"reason": None}, 400, "reason"),
            ({"period_id": "2026-12"}, 400, "period_id"),
            ({"period_id": "2027-01-15"}, 400, "period_id"),
            ({"scope_id": team}, 400, "scope_id"),
            ({"name": "requests/minute"}, 404, None),
            ({"name": "quota-tokens/day"}, 404, None),
            ({"model": MODEL}, 404, None),
            ({"model": ""}, 404, None),
        ):
            _problem(await client.post(f"/quotas/{team}/top-ups", json={**good, **more}), status, param)
        for missing in good:
            body = {name: value for name, value in good.items() if name != missing}
            _problem(await client.post(f"/quotas/{team}/top-ups", json=body), 400, missing)
        assert _ok(await client.get(f"/quotas/{team}/top-ups"))["data"] == []
        _problem(await client.get(f"/quotas/{team}/top-ups?after=x"), 400, "after")
        _problem(await client.get(f"/quotas/{team}?limit=5"), 400, "limit")
        for path in ("/quotas/x", "/quotas/team_x/top-ups"):
            _problem(await client.get(path), 404)


async def test_prices_are_added_and_listed(office: Office) -> None:
    await office.add_model("other")
    usd = {"prompt": 150_000, "cached": 75_000, "completion": 600_000}
    async with office.client(await office.token()) as client:
        first = _ok(await client.post("/prices", json={"model": MODEL, **usd}), 201)
        assert first == {"model": MODEL, "valid_from": NOW_TEXT, **usd}
        assert _ok(await client.post("/prices", json={"model": MODEL, **usd}), 201) == first
        wanted = {"model": MODEL, "valid_from": "2027-02-01T00:00:00+01:00", "prompt": 1, "completion": 2}
        later = _ok(await client.post("/prices", json=wanted), 201)
        assert later == {**wanted, "valid_from": "2027-01-31T23:00:00.000Z", "cached": 1}
        old = {"model": "other", "valid_from": "2020-01-01T00:00:00Z", "prompt": 0, "completion": 0}
        other = _ok(await client.post("/prices", json=old), 201)
        assert _ok(await client.get("/prices"))["data"] == [first, later, other]
        assert _ok(await client.get("/prices", params={"model": "other"}))["data"] == [other]
        page = _ok(await client.get("/prices", params={"limit": 2}))
        assert page["data"] == [first, later]
        assert _ok(await client.get("/prices", params={"after": page["next"]})) == {"data": [other], "next": None}

        for more, status, param in (
            ({"valid_from": "2027-01-15T08:00:00Z"}, 409, "valid_from"),
            ({"valid_from": later["valid_from"]}, 409, None),
            ({"valid_from": "2027-02-01T00:00:00"}, 400, "valid_from"),
            ({"prompt": 0.15}, 400, "prompt"),
            ({"prompt": 100_000_001}, 400, "prompt"),
            ({"completion": -1}, 400, "completion"),
            ({"cached": 9}, 400, "cached"),
            ({"model": "none"}, 400, "model"),
            ({"currency": "EUR"}, 400, "currency"),
        ):
            body = {"model": MODEL, "prompt": 8, "completion": 8, **more}
            _problem(await client.post("/prices", json=body), status, param)
        assert len(_ok(await client.get("/prices"))["data"]) == 3
        _problem(await client.get("/prices?model=none"), 404)
        _problem(await client.get("/prices?after=x"), 400, "after")


async def test_time_zones_and_networks_are_set_and_cleared(office: Office) -> None:
    async with office.client(await office.token()) as client:
        organization, team, key = await _make(client)
        changed = _ok(await client.patch(f"/organizations/{organization}", json={"time_zone": "Europe/Berlin"}))
        assert changed["time_zone"] == "Europe/Berlin"
        num_entries = len(await office.audit())
        assert _ok(await client.patch(f"/organizations/{organization}", json={"time_zone": "Europe/Berlin"})) == changed
        assert len(await office.audit()) == num_entries
        for zone in ("Mars/Olympus", "", "x" * 5000, "../UTC", "Europe", "localtime", None):
            body = {"time_zone": zone}
            _problem(await client.patch(f"/organizations/{organization}", json=body), 400, "time_zone")
            _problem(await client.post("/organizations", json={"name": "n", **body}), 400, "time_zone")
        _problem(await client.patch(f"/teams/{team}", json={"time_zone": "UTC"}), 400, "time_zone")

        networks = ["10.0.0.0/8", "192.0.2.7", "2001:db8::/32", "10.0.0.0/8"]
        limited = _ok(await client.patch(f"/keys/{key}", json={"networks": networks}))
        assert limited["networks"] == ["10.0.0.0/8", "192.0.2.7/32", "2001:db8::/32"]
        assert _ok(await client.patch(f"/keys/{key}", json={"name": "other"}))["networks"] == limited["networks"]
        for refused, param in (
            ([], "networks"),
            (["10.0.0.0/8"] * 101, "networks"),
            (["10.0.0.0/8", "10.0.0.1/8"], "networks[1]"),
            (["x"], "networks[0]"),
            ([5], "networks[0]"),
            ("10.0.0.0/8", "networks"),
        ):
            _problem(await client.patch(f"/keys/{key}", json={"networks": refused}), 400, param)
        assert _ok(await client.get(f"/keys/{key}"))["networks"] == limited["networks"]
        assert _ok(await client.patch(f"/keys/{key}", json={"networks": None}))["networks"] is None


async def test_two_administrators_at_once_leave_one_limit_that_one_of_them_set(office: Office) -> None:
    async with office.client(await office.token()) as client:
        _, team, _ = await _make(client)
        rules = [{**RATE, "rate": f"{n}/minute"} for n in range(5)]
        answers = await asyncio.gather(
            *(client.put("/limits", json={"scope_id": team, "rule": rule}) for rule in rules)
        )

        assert [_ok(each)["rule"] for each in answers] == rules
        (left,) = _ok(await client.get("/limits"))["data"]
        last = (await office.audit())[-1].draft.after
        assert left["rule"] in rules
        assert f'"amount":{left["rule"]["rate"].partition("/")[0]},' in last
