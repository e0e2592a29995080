"""Sessions from HTTP to the engine: what headers and bodies say is in the path that the engine is given.

The gateway is on a port of its own, the engine behind its real protocol; only the model is missing.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx
import msgspec
import pytest
from byte_text import VOCAB_SIZE, byte_assets
from client_kit import PATIENT, connected
from engine_kit import MODEL, EngineThread, card
from identity_kit import KEY, PEPPERS, PRINCIPAL, FixedKeys, SteppedClock, holder_of, new_key
from scripted_core import ScriptedCore

from engine.carriers.zeromq_client import ZeroMQClient
from engine.carriers.zeromq_server import ZeroMQServer
from engine.intake import Limits
from engine.link import EngineLink
from engine.messages import Submit
from engine.sched.fair.tree import Tree
from gateway.app import build
from gateway.backends.local import LocalBackend
from gateway.domain.ids import KeyId
from gateway.http_server import serve_http
from gateway.services.authenticate import Authenticator
from gateway.settings import ServerSettings
from gateway.shutdown import Shutdown

OTHER_KEY = new_key()
CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
PROMPTS: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]},
    COMPLETIONS: {"prompt": "Once upon a time"},
}
BOTH_ROUTES = pytest.mark.parametrize("route", PROMPTS)
STREAMED_OR_NOT = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])


class Hub:
    """A gateway with two keys of one team, and what its engine has been given."""

    def __init__(self, client: httpx.AsyncClient, core: ScriptedCore) -> None:
        self._client = client
        self._core = core

    async def post(self, route: str, *, key: str = KEY, headers: dict[str, str] | None = None, **body: Any) -> Any:
        return await self._client.post(
            route,
            json={"model": MODEL, "max_tokens": 2, **PROMPTS[route], **body},
            headers={"authorization": f"Bearer {key}", **(headers or {})},
        )

    async def submits(self, route: str, **options: Any) -> list[Submit]:
        """What the engine was given for one request, which must have been answered."""
        before = set(self._core.submitted)
        answer = await self.post(route, **options)
        assert answer.status_code == 200, answer.text
        return [submit for name, submit in self._core.submitted.items() if name not in before]

    async def session(self, route: str, **options: Any) -> str:
        """The path's last node."""
        [submit] = await self.submits(route, **options)
        return submit.path[-1].id


@pytest.fixture
async def hub(endpoint: str, free_port: Callable[[], int]) -> AsyncIterator[Hub]:
    ready = msgspec.structs.replace(card(), vocab_size=VOCAB_SIZE)
    with EngineThread(ScriptedCore(), ZeroMQServer(endpoint), ready) as engine:
        link = EngineLink(ready.engine_id, ZeroMQClient(endpoint), times=PATIENT)
        async with connected(link, client_id="gateway") as client:
            await client.wait_up(MODEL, 20)
            backend = LocalBackend(client, {MODEL: byte_assets()})
            async with _serving(backend, free_port()) as http:
                yield Hub(http, engine.core)


@asynccontextmanager
async def _serving(backend: LocalBackend, port: int) -> AsyncIterator[httpx.AsyncClient]:
    other = msgspec.structs.replace(PRINCIPAL, key_id=KeyId("key_2"))
    keys = FixedKeys(holder_of(KEY), holder_of(OTHER_KEY, other))
    settings, shutdown = ServerSettings(port=port), Shutdown()
    app = build(backend=backend, authenticator=Authenticator(keys, PEPPERS, SteppedClock()), server=settings)
    serving = asyncio.create_task(serve_http(app, settings, settings.host, shutdown))
    try:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=20) as client:
            await _until_open(client)
            yield client
    finally:
        shutdown.request()
        await asyncio.wait_for(serving, 20)


async def _until_open(client: httpx.AsyncClient) -> None:
    async with asyncio.timeout(20):
        while True:
            try:
                await client.get("/health")
            except httpx.TransportError:
                await asyncio.sleep(0.01)
            else:
                return


@BOTH_ROUTES
@STREAMED_OR_NOT
async def test_a_session_is_the_path_s_last_node_below_its_key(hub: Hub, route: str, stream: bool) -> None:
    [submit] = await hub.submits(route, stream=stream, headers={"x-session-id": "run-1"})

    organization, team, key, session = submit.path
    assert [(node.id, node.weight) for node in (organization, team, key)] == [
        ("org:org_1", 1),
        ("team:team_1", 1),
        ("key:key_1", 1),
    ]
    assert session.id.startswith("session:")
    assert "run-1" not in session.id
    assert session.weight == 1
    assert submit.request_class == "interactive"


@BOTH_ROUTES
@STREAMED_OR_NOT
async def test_header_and_cache_key_reach_the_engine(hub: Hub, route: str, stream: bool) -> None:
    nameless = await hub.session(route, stream=stream)
    by_header = await hub.session(route, stream=stream, headers={"X-Session-Id": "run-1"})
    by_body = await hub.session(route, stream=stream, prompt_cache_key="run-1")
    of_other_run = await hub.session(route, stream=stream, prompt_cache_key="run-2")

    assert by_header == by_body
    assert len({nameless, by_header, of_other_run}) == 3


async def test_streamed_and_whole_requests_of_a_run_are_in_one_session(hub: Hub) -> None:
    found = [
        await hub.session(route, stream=stream, headers={"x-claude-code-session-id": "run-1"})
        for route in PROMPTS
        for stream in (False, True)
    ]

    assert len(set(found)) == 1


async def test_later_turns_without_a_name_stay_in_their_session(hub: Hub) -> None:
    first = PROMPTS[CHAT]["messages"]
    later = [*first, {"role": "assistant", "content": "Hi."}, {"role": "user", "content": "And now?"}]

    assert await hub.session(CHAT) == await hub.session(CHAT, messages=later)
    assert await hub.session(CHAT) != await hub.session(CHAT, messages=later[2:])


async def test_tools_tell_nameless_conversations_apart(hub: Hub) -> None:
    tools = [{"type": "function", "function": {"name": "look_up", "parameters": {"type": "object"}}}]
    with_tools = await hub.session(CHAT, tools=tools)

    assert with_tools == await hub.session(CHAT, tools=tools, temperature=0.5)
    assert with_tools != await hub.session(CHAT)
    assert await hub.session(CHAT, tools=None) == await hub.session(CHAT)


async def test_two_keys_never_share_a_session(hub: Hub) -> None:
    named = {"headers": {"x-session-id": "run-1"}}

    assert await hub.session(CHAT, **named) != await hub.session(CHAT, key=OTHER_KEY, **named)
    assert await hub.session(CHAT) != await hub.session(CHAT, key=OTHER_KEY)


async def test_sessions_of_a_team_share_cached_prompts(hub: Hub) -> None:
    [one] = await hub.submits(CHAT, prompt_cache_key="run-1")
    [two] = await hub.submits(CHAT, key=OTHER_KEY, prompt_cache_key="run-2")

    assert one.cache_salt == two.cache_salt == "team:team_1"


async def test_all_prompts_of_a_request_are_in_one_session(hub: Hub) -> None:
    submits = await hub.submits(COMPLETIONS, prompt=["Once", "Twice", "Thrice"])

    assert len(submits) == 3
    assert len({submit.path for submit in submits}) == 1


@BOTH_ROUTES
@pytest.mark.parametrize("wrong", [5, True, ["run-1"], {"a": 1}])
async def test_a_cache_key_that_is_no_string_is_refused(hub: Hub, route: str, wrong: object) -> None:
    answer = await hub.post(route, prompt_cache_key=wrong)

    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "prompt_cache_key"


@BOTH_ROUTES
@pytest.mark.parametrize("blank", [None, "", "  "])
async def test_a_blank_cache_key_says_nothing(hub: Hub, route: str, blank: str | None) -> None:
    assert await hub.session(route, prompt_cache_key=blank) == await hub.session(route)


async def test_the_fair_tree_reads_the_path_as_it_is_meant(hub: Hub) -> None:
    """Gateway and engine agree on which node is what; the class comes in between, and is named by its team."""
    [submit] = await hub.submits(CHAT, headers={"x-evenhand-class": "batch"})
    limits = Limits(max_model_len=8192, kv_capacity_tokens=8192, vocab_size=VOCAB_SIZE, eos_token_ids=(2,))
    [arrived] = limits.requests(submit, seed=0, first_arrival=0, now_us=0)
    nodes = Tree((("interactive", 4), ("standard", 2), ("batch", 1)), 0).enter(arrived).leaf.path

    assert [node.id for node in nodes[:-1]] == ["org:org_1", "team:team_1", "team:team_1:batch", "key:key_1"]
    assert nodes[-1].id == submit.path[-1].id
