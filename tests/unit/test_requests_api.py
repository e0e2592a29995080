"""GET /v1/requests/{id}: what is answered while a request waits, while it is settled, and afterwards."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import httpx
import msgspec
import pytest
from identity_kit import KEY, PRINCIPAL, fixed_authenticator
from metering_kit import Clock, MemoryStorage, OwnRequests, opening, record

from gateway.app import build
from gateway.backends.scripted import ScriptedBackend
from gateway.domain.ids import RequestId, new_request_id
from gateway.domain.standing import LiveRequest
from gateway.domain.usage import EngineTimings
from gateway.errors import EngineDown
from gateway.services.lookup import RequestLookup
from gateway.services.metering import row_of
from gateway.settings import ServerSettings

ID, EARLIER = new_request_id(2), new_request_id(1)
PARTS = ("queue_us", "prefill_us", "decode_us", "preempted_us", "parked_us")


class Backend(ScriptedBackend):
    """Its one request stands as the test says."""

    def __init__(self) -> None:
        super().__init__({})
        self.live: LiveRequest | Exception | None = None

    async def standing(self, request_id: RequestId) -> LiveRequest | None:
        if isinstance(self.live, Exception):
            raise self.live
        return self.live


class Hub:
    def __init__(self) -> None:
        self.backend, self.storage, self.own = Backend(), MemoryStorage(), OwnRequests()
        app = build(
            backend=self.backend,
            authenticator=fixed_authenticator(),
            server=ServerSettings(),
            lookup=RequestLookup(self.backend, self.storage, self.own, Clock(), wait_s=0),  # type: ignore[arg-type]
        )
        self.client = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test")

    async def get(self, request_id: str = ID, key: str | None = KEY, prefix: str = "/v1") -> httpx.Response:
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        return await self.client.get(f"{prefix}/requests/{request_id}", headers=headers)


@pytest.fixture
async def hub() -> AsyncIterator[Hub]:
    hub = Hub()
    async with hub.client:
        yield hub


def waiting(**fields: Any) -> LiveRequest:
    standing = LiveRequest(
        request_id=ID,
        team_id=PRINCIPAL.team_id,
        request_class="standard",
        status="queued",
        waiting_for="slot",
        ahead={"interactive": 12, "batch": 3},
        ahead_of_team=(EARLIER,),
        expected_wait_us=811_001,
        timings=EngineTimings(queue_us=7, prefill_us=5, decode_us=4, preempted_us=3, parked_us=2),
    )
    return msgspec.structs.replace(standing, **fields)


@pytest.mark.parametrize("prefix", ["/v1", ""])
async def test_a_waiting_request_is_told_why(hub: Hub, prefix: str) -> None:
    hub.backend.live = waiting()
    answer = await hub.get(prefix=prefix)
    assert answer.status_code == 200
    assert answer.json() == {
        "id": ID,
        "object": "request",
        "status": "queued",
        "class": "standard",
        "waiting_for": "slot",
        "ahead": {"interactive": 12, "batch": 3},
        "ahead_of_team": [EARLIER],
        "expected_wait_ms": 812,
        "timings": {
            "queue_us": 7,
            "prefill_us": 5,
            "decode_us": 4,
            "preempted_us": 3,
            "parked_us": 2,
            "total_us": 21,
        },
    }


async def test_what_cannot_be_said_of_the_wait_is_null_and_no_wait_is_0(hub: Hub) -> None:
    hub.backend.live = waiting(expected_wait_us=None)
    assert (await hub.get()).json()["expected_wait_ms"] is None
    hub.backend.live = waiting(expected_wait_us=0, waiting_for=None, status="running", ahead={}, ahead_of_team=())
    said = (await hub.get()).json()
    assert (said["expected_wait_ms"], said["waiting_for"], said["ahead"], said["ahead_of_team"]) == (0, None, {}, [])


async def test_an_ended_request_has_its_row_and_parts_that_sum_to_the_whole(hub: Hub) -> None:
    timings = EngineTimings(
        queue_us=100_000, prefill_us=50_000, decode_us=200_000, preempted_us=20_000, engine_us=9_000, parked_us=30_000
    )
    hub.storage.rows[ID] = row_of(msgspec.structs.replace(record(opening(ID)), timings=timings))
    answer = await hub.get()
    assert answer.status_code == 200
    said = answer.json()
    assert said == {
        "id": ID,
        "object": "request",
        "status": "ended",
        "class": "interactive",
        "model": "alias",
        "endpoint": "chat",
        "stream": True,
        "key_id": "key_1",
        "opened_at": "2030-03-17T17:46:40.000Z",
        "closed_at": "2030-03-17T17:46:40.500Z",
        "outcome": "finished",
        "finish_reason": "stop",
        "error_code": None,
        "usage": {
            "prompt_tokens": 20,
            "cached_tokens": 16,
            "completion_tokens": 8,
            "engine_us": 9_000,
            "cost_microusd": 19,
        },
        "timings": {
            "queue_us": 100_000,
            "prefill_us": 50_000,
            "decode_us": 200_000,
            "preempted_us": 20_000,
            "parked_us": 30_000,
            "gateway_us": 100_000,
            "total_us": 500_000,
            "ttft_us": 250_000,
        },
    }
    parts = said["timings"]
    assert sum(parts[name] for name in (*PARTS, "gateway_us")) == parts["total_us"]


async def test_of_a_lost_request_the_time_in_the_engine_is_all_that_is_known(hub: Hub) -> None:
    row = row_of(record(opening(ID), outcome="lost"))
    hub.storage.rows[ID] = msgspec.structs.replace(row, total_us=None, ttft_us=None, finish_reason="")
    said = (await hub.get()).json()
    assert (said["outcome"], said["finish_reason"]) == ("lost", None)
    assert (said["timings"]["gateway_us"], said["timings"]["ttft_us"]) == (None, None)
    assert sum(said["timings"][name] for name in PARTS) == said["timings"]["total_us"] == 16


async def test_a_request_that_is_being_settled_says_so(hub: Hub) -> None:
    hub.own.known[ID] = opening(ID)
    said = (await hub.get()).json()
    assert (said["id"], said["status"], said["model"]) == (ID, "settling", "alias")


async def test_other_teams_and_no_ids_get_one_and_the_same_404(hub: Hub) -> None:
    hub.backend.live = waiting(team_id="team_2")
    theirs = await hub.get()
    hub.backend.live = None
    nobodys, none = await hub.get(), await hub.get("x")
    assert theirs.json() == nobodys.json()
    assert theirs.status_code == nobodys.status_code == none.status_code == 404
    assert theirs.json()["error"] == {
        "message": f"The request '{ID}' does not exist or is not one of your team.",
        "type": "invalid_request_error",
        "param": "request_id",
        "code": "request_not_found",
    }
    assert none.json()["error"]["code"] == "request_not_found"


async def test_with_the_engine_down_what_may_live_is_503_and_what_has_ended_200(hub: Hub) -> None:
    hub.backend.live = EngineDown("down", retry_after_s=5)
    refused = await hub.get()
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "engine_unavailable")
    assert refused.headers["retry-after"] == "5"
    hub.storage.rows[ID] = row_of(record(opening(ID)))
    assert (await hub.get()).json()["status"] == "ended"


async def test_without_a_key_nothing_is_told(hub: Hub) -> None:
    hub.backend.live = waiting()
    refused = await hub.get(key=None)
    assert (refused.status_code, refused.json()["error"]["code"]) == (401, "invalid_api_key")
