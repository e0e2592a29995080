"""What a key means over HTTP: statuses and codes, names in answers and lists, the class header."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import msgspec
import pytest
from identity_kit import KEY, PEPPERS, PRINCIPAL, FixedKeys, SteppedClock, holder_of, new_key

from gateway.app import build
from gateway.backends.scripted import Script, ScriptedBackend
from gateway.domain.catalog import Alias, Model
from gateway.domain.tenancy import KeyHolder
from gateway.errors import StorageDown
from gateway.services.authenticate import Authenticator
from gateway.services.catalog import FixedListing
from gateway.settings import ServerSettings

BATCH_KEY, LATE_KEY, DISABLED_KEY = new_key(), new_key(), new_key()
MODELS = (Model(name="small", created_at_ms=0), Model(name="big", created_at_ms=0))
ALIASES = (Alias(name="gpt-4o", model="small", system_default="Be brief.", created_at_ms=3000),)


def disabled(holder: KeyHolder) -> KeyHolder:
    return msgspec.structs.replace(holder, team=msgspec.structs.replace(holder.team, disabled_at_ms=1))


class Hub:
    """Three keys on a scripted backend: one may use anything, one is limited, one has to be looked up first."""

    def __init__(self) -> None:
        limited = msgspec.structs.replace(
            PRINCIPAL, default_class="batch", models=frozenset({"gpt-4o"}), endpoints=frozenset({"chat"})
        )
        self.keys = FixedKeys(
            holder_of(KEY),
            holder_of(BATCH_KEY, limited),
            disabled(holder_of(DISABLED_KEY)),
            late=(holder_of(LATE_KEY),),
        )
        self.backend = ScriptedBackend(dict.fromkeys(("small", "big"), Script.saying("hello", " you")))
        self.app = build(
            backend=self.backend,
            authenticator=Authenticator(self.keys, PEPPERS, SteppedClock()),
            listings=FixedListing(MODELS, ALIASES),
            server=ServerSettings(),
        )
        self.client = httpx.AsyncClient(transport=httpx.ASGITransport(self.app), base_url="http://test")

    async def get(self, path: str, key: str = KEY) -> httpx.Response:
        return await self.client.get(path, headers={"x-api-key": key})

    async def chat(self, model: str, key: str = KEY, *, stream: bool = False, **headers: str) -> httpx.Response:
        body = {"model": model, "messages": [{"role": "user", "content": "hi"}], "stream": stream}
        return await self.client.post("/v1/chat/completions", json=body, headers={"x-api-key": key} | headers)

    async def complete(self, model: str, key: str = KEY) -> httpx.Response:
        return await self.client.post(
            "/v1/completions", json={"model": model, "prompt": "hi"}, headers={"x-api-key": key}
        )

    @property
    def last_class(self) -> str:
        return self.backend.generations[-1].info.request_class


@pytest.fixture
async def hub() -> AsyncIterator[Hub]:
    hub = Hub()
    async with hub.client:
        yield hub


def code_of(answer: httpx.Response) -> tuple[int, str | None]:
    return answer.status_code, answer.json()["error"]["code"]


async def test_a_key_that_has_to_be_looked_up_is_let_in(hub: Hub) -> None:
    assert (await hub.chat("small", LATE_KEY)).status_code == 200
    assert hub.keys.asked == [LATE_KEY[3:15]], "the keys it was given, not a copy of them"


async def test_refusals_have_their_status_and_code(hub: Hub) -> None:
    assert code_of(await hub.chat("small", new_key())) == (401, "invalid_api_key")
    assert code_of(await hub.chat("small", DISABLED_KEY)) == (403, "team_disabled")
    assert code_of(await hub.get("/v1/models", DISABLED_KEY)) == (403, "team_disabled")
    assert code_of(await hub.complete("gpt-4o", BATCH_KEY)) == (403, "endpoint_not_allowed")
    assert code_of(await hub.chat("small", BATCH_KEY)) == (404, "model_not_found")
    assert code_of(await hub.get("/v1/models/small", BATCH_KEY)) == (404, "model_not_found")
    assert not hub.backend.generations


async def test_a_database_that_does_not_answer_is_503(hub: Hub) -> None:
    async def find(public_id: str) -> None:
        raise StorageDown

    hub.keys.find = find  # type: ignore[method-assign]
    answer = await hub.chat("small", LATE_KEY)

    assert code_of(answer) == (503, "storage_unavailable")
    assert answer.headers["retry-after"] == "2"


async def test_the_list_of_models_is_the_key_s(hub: Hub) -> None:
    def names(answer: httpx.Response) -> list[str]:
        return [card["id"] for card in answer.json()["data"]]

    assert names(await hub.get("/v1/models")) == ["small", "big", "gpt-4o"]
    assert names(await hub.get("/v1/models", BATCH_KEY)) == ["gpt-4o"]
    assert (await hub.get("/v1/models/gpt-4o")).json() == {
        "id": "gpt-4o",
        "object": "model",
        "created": 3,
        "owned_by": "evenhand",
        "max_model_len": 4096,
    }


@pytest.mark.parametrize("name", ["small", "gpt-4o"])
async def test_answers_say_the_name_that_was_asked_for(hub: Hub, name: str) -> None:
    assert (await hub.chat(name)).json()["model"] == name
    assert (await hub.complete(name)).json()["model"] == name
    chunks = [
        json.loads(line.removeprefix("data: "))
        for line in (await hub.chat(name, stream=True)).text.splitlines()
        if line.startswith("data: {")
    ]
    assert {chunk["model"] for chunk in chunks} == {name}
    assert {generation.request.model for generation in hub.backend.generations} == {"small"}


@pytest.mark.parametrize(
    ("key", "asked", "expected"),
    [
        (KEY, {}, "interactive"),
        (KEY, {"x-evenhand-class": "standard"}, "standard"),
        (KEY, {"X-Evenhand-Class": "Batch"}, "batch"),
        (BATCH_KEY, {}, "batch"),
        (BATCH_KEY, {"x-evenhand-class": "interactive"}, "batch"),
    ],
    ids=["none", "lower", "lowest", "the key's", "higher than the key's"],
)
async def test_a_request_may_lower_its_class_but_not_raise_it(
    hub: Hub, key: str, asked: dict[str, Any], expected: str
) -> None:
    assert (await hub.chat("gpt-4o", key, **asked)).status_code == 200
    assert hub.last_class == expected


@pytest.mark.parametrize("value", ["", "urgent", "interactive,batch", "\xe9"])
async def test_a_class_that_does_not_exist_is_refused(hub: Hub, value: str) -> None:
    answer = await hub.chat("small", **{"x-evenhand-class": value.encode("latin-1")})  # type: ignore[arg-type]

    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "x-evenhand-class"
    assert not hub.backend.generations


async def test_options_needs_no_key(hub: Hub) -> None:
    assert (await hub.client.options("/v1/chat/completions")).status_code == 204
