"""GET /v1/usage: what is asked for, and what is answered."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from litestar import Litestar
from litestar.di import Provide
from litestar.testing import TestClient
from metering_kit import NOW_MS, PRINCIPAL

from gateway.domain.ids import KeyId, TeamId
from gateway.domain.ledger import HOUR_MS, HourlyUsage, UsageTotals
from gateway.services.usage import UsageReport, UsageReports
from gateway.telemetry.metrics import GatewayMetrics
from gateway.web.errors import ErrorResponses
from gateway.web.openai.usage import UsageController

HOUR = NOW_MS // HOUR_MS * HOUR_MS
TOTALS = UsageTotals(
    num_requests=1, prompt_tokens=2, cached_tokens=3, completion_tokens=4, engine_us=5, cost_microusd=6
)
WIRE = {
    "requests": 1,
    "prompt_tokens": 2,
    "cached_tokens": 3,
    "completion_tokens": 4,
    "engine_us": 5,
    "cost_microusd": 6,
}


class Reports(UsageReports):
    """Keeps what it was asked, and answers the same to all."""

    def __init__(self) -> None:
        self.asked: dict[str, Any] = {}

    async def of_team(self, team_id: TeamId, **asked: Any) -> UsageReport:
        self.asked = {"team_id": team_id, **asked}
        hour = HourlyUsage(
            hour_ms=HOUR,
            organization_id=PRINCIPAL.organization_id,
            team_id=PRINCIPAL.team_id,
            key_id=KeyId("key_9"),
            model="m",
            totals=TOTALS,
        )
        return UsageReport(HOUR, HOUR + HOUR_MS, TOTALS, [hour])


@pytest.fixture
def reports() -> Reports:
    return Reports()


@pytest.fixture
def client(reports: Reports) -> Iterator[TestClient[Litestar]]:
    app = Litestar(
        [UsageController],
        dependencies={"usage": Provide(lambda: reports, sync_to_thread=False)},
        exception_handlers={Exception: ErrorResponses(GatewayMetrics(lambda: True))},
        openapi_config=None,
        logging_config=None,
    )
    inner = app.asgi_handler

    async def authenticated(scope: Any, receive: Any, send: Any) -> None:
        scope["auth"] = PRINCIPAL
        await inner(scope, receive, send)

    app.asgi_handler = authenticated
    with TestClient(app) as testing:
        yield testing


def test_the_answer_has_the_real_bounds_the_totals_and_a_line_for_each_hour_key_and_model(
    client: TestClient[Litestar],
) -> None:
    answer = client.get("/usage")
    assert answer.status_code == 200
    assert answer.json() == {
        "object": "usage",
        "team_id": "team_1",
        "from": "2030-03-17T17:00:00Z",
        "until": "2030-03-17T18:00:00Z",
        "totals": WIRE,
        "data": [{"hour": "2030-03-17T17:00:00Z", "key_id": "key_9", "model": "m", **WIRE}],
    }


def test_without_a_query_everything_is_left_to_the_defaults(client: TestClient[Litestar], reports: Reports) -> None:
    client.get("/usage")
    assert reports.asked == {"team_id": "team_1", "from_ms": None, "until_ms": None, "model": None, "key_id": None}


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("1900000000", 1_900_000_000),
        ("2030-03-17T17:46:40Z", 1_900_000_000),
        ("2030-03-17T17:46:40", 1_900_000_000),
        ("2030-03-17T19:46:40+02:00", 1_900_000_000),
        ("2030-03-17T19:46:40%2B02:00", 1_900_000_000),
        ("2030-03-17", 1_899_936_000),
        ("1577836800", 1_577_836_800),
        ("9999-12-31T23:00:00Z", 253_402_297_200),
    ],
)
def test_times_are_seconds_or_iso_8601(client: TestClient[Litestar], reports: Reports, text: str, seconds: int) -> None:
    assert client.get(f"/usage?from={text}&until=2031-01-01&model=m&key_id=k").status_code == 200
    assert reports.asked == {
        "team_id": "team_1",
        "from_ms": seconds * 1000,
        "until_ms": 1_924_992_000_000,
        "model": "m",
        "key_id": "k",
    }


@pytest.mark.parametrize(
    "text",
    [
        *("", "yesterday", "-1", "1e9", "9" * 30, "2030-02-30", "10000-01-01", "0001-01-01", "١٢"),
        *("0", "2026", "20261130", "2019-12-31T23:59:59Z", "9999-12-31T23:59:59Z", "253402300799"),
    ],
)
@pytest.mark.parametrize("name", ["from", "until"])
def test_a_time_that_is_none_is_refused_by_name(client: TestClient[Litestar], name: str, text: str) -> None:
    answer = client.get("/usage", params={name: text})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == name
    assert "from 2020 on" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("query", "param"),
    [("start=yesterday", "start"), ("From=2030-01-01", "From"), ("from=2030-01-01&team_id=t", "team_id"),
     ("model=a&model=b", "model")],
)  # fmt: skip
def test_what_is_not_known_or_given_twice_is_refused_by_name(
    client: TestClient[Litestar], reports: Reports, query: str, param: str
) -> None:
    answer = client.get(f"/usage?{query}")
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param
    assert reports.asked == {}
