"""What a key may use: models by their names, endpoints, classes, deadlines, and how many of its requests may wait."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from identity_kit import PRINCIPAL, SteppedClock

from gateway.backends.scripted import Fail, Gate, Pause, Say, Script, ScriptedBackend
from gateway.domain.catalog import Alias, Model
from gateway.domain.ids import KeyId, new_request_id
from gateway.domain.ledger import Opening
from gateway.domain.limits.policy import Price
from gateway.domain.principal import Principal, RequestClass
from gateway.domain.record import RequestInfo, RequestRecord
from gateway.domain.request import Conversation, GenerationRequest, Message, Prompt, Text
from gateway.errors import ClientGone, EngineDown, ModelNotFound, NotAllowed, QueueFull, Unavailable
from gateway.limit_opening import in_memory
from gateway.services.call import Call
from gateway.services.catalog import Catalog, FixedListing, Resolved
from gateway.services.inference import Inference
from gateway.services.limiter import Limiter
from gateway.services.ports import Running
from gateway.services.waiting import WaitingRequests

ASK = Message("user", "hi")
TALK = Conversation((ASK,))
MODELS = (
    Model(name="small", created_at_ms=0),
    Model(name="off", created_at_ms=0, disabled_at_ms=5),
    Model(name="gone", created_at_ms=0),
)
ALIASES = (
    Alias(name="gpt-4o", model="small", created_at_ms=7000),
    Alias(name="claude-x", model="small", system_default="Be brief.", request_class="standard", created_at_ms=0),
    Alias(name="to-off", model="off", created_at_ms=0),
    Alias(name="to-gone", model="gone", created_at_ms=0),
    Alias(name="to-nothing", model="never-heard-of", created_at_ms=0),
    Alias(name="small", model="gone", created_at_ms=0),
    Alias(name="unlisted", model="small", created_at_ms=0),
    Alias(name="gone", model="small", created_at_ms=0),
)


def key(**fields: Any) -> Principal:
    return msgspec.structs.replace(PRINCIPAL, **fields)


class Hub:
    """Models "small", "off" and "unlisted" are served; "gone" is in the catalogue only, "unlisted" is not in it."""

    def __init__(self, *steps: Say | Pause | Gate | Fail, refuse: EngineDown | None = None) -> None:
        clock = SteppedClock()
        script = Script(steps=steps, refuse=refuse)
        self.backend = ScriptedBackend(dict.fromkeys(("small", "off", "unlisted"), script), sleep=clock.sleep)
        self.catalog = Catalog(self.backend, FixedListing(MODELS, ALIASES))
        self.openings: list[Opening] = []
        self.records: list[RequestRecord] = []
        self.disk_full = False
        self.inference = Inference(self.backend, self.catalog, clock, self, Limiter(in_memory(clock), clock))

    def opened(self, opening: Opening, running: Running) -> None:
        if self.disk_full:
            raise Unavailable("full")
        self.openings.append(opening)

    def settled(self, record: RequestRecord) -> None:
        self.records.append(record)

    async def call(
        self,
        model: str = "small",
        principal: Principal = PRINCIPAL,
        *,
        prompt: Prompt = TALK,
        request_class: RequestClass = "interactive",
        deadline_ms: int | None = None,
    ) -> Call:
        info = RequestInfo(
            request_id=new_request_id(0),
            principal=principal,
            request_class=request_class,
            endpoint="chat",
            stream=False,
        )
        wanted = GenerationRequest(model=model, prompts=(prompt,), deadline_ms=deadline_ms)
        return await self.inference.prepare(wanted, info)

    async def answered(self, *args: Any, **options: Any) -> tuple[GenerationRequest, Opening]:
        """The request as the backend got it, and what went on record."""
        async with await self.call(*args, **options) as call:
            async for _ in call:
                pass
        return self.backend.generations[-1].request, self.openings[-1]


async def test_a_name_comes_with_the_prices_of_the_model_that_answers() -> None:
    prices = [
        Price(model=model, valid_from_ms=n, prompt=n, cached=0, completion=n)
        for n in (1, 2)
        for model in ("small", "fast", "off")
    ]
    catalog = Catalog(
        Hub().backend, FixedListing(MODELS, (Alias(name="fast", model="small", created_at_ms=0),), prices)
    )

    of_small = (prices[0], prices[3])
    assert await catalog.resolve("small", PRINCIPAL) == Resolved("small", prices=of_small)
    assert await catalog.resolve("fast", PRINCIPAL) == Resolved("small", prices=of_small)
    assert (await catalog.resolve("unlisted", PRINCIPAL)).prices == ()


async def test_an_alias_is_answered_by_its_model_under_its_own_name() -> None:
    hub = Hub(Say("a"))
    call = await hub.call("gpt-4o")
    request, opening = await hub.answered("gpt-4o")

    assert request.model == "small"
    assert (opening.model, opening.requested_model) == ("small", "gpt-4o")
    assert call.requested_model == "gpt-4o"


@pytest.mark.parametrize("name", ["small", "unlisted"])
async def test_a_model_s_own_name_wins_over_an_alias(name: str) -> None:
    request, opening = await Hub(Say("a")).answered(name)

    assert request.model == opening.model == name


@pytest.mark.parametrize("name", ["off", "to-off", "to-gone", "to-nothing", "gone", "nobody"])
async def test_what_nobody_may_use_or_nobody_serves_does_not_exist(name: str) -> None:
    hub = Hub(Say("a"))
    with pytest.raises(ModelNotFound) as raised:
        await hub.call(name)

    assert raised.value.message == ModelNotFound(name).message, "by the name that was asked for"
    with pytest.raises(ModelNotFound):
        await hub.catalog.card(name, PRINCIPAL)


async def test_an_engine_that_is_down_is_another_matter() -> None:
    hub = Hub(Say("a"))
    hub.backend.is_up = False
    with pytest.raises(EngineDown):
        await hub.call("gpt-4o")


@pytest.mark.parametrize(
    ("scope", "allowed"),
    [(None, ["small", "gpt-4o"]), ({"small"}, ["small"]), ({"gpt-4o"}, ["gpt-4o"]), (set(), [])],
    ids=repr,
)
async def test_a_scope_is_of_names(scope: set[str] | None, allowed: list[str]) -> None:
    """An alias does not open its model, nor a model its aliases."""
    hub = Hub(Say("a"))
    principal = key(models=None if scope is None else frozenset(scope))
    for name in ("small", "gpt-4o"):
        if name in allowed:
            await hub.call(name, principal)
            assert (await hub.catalog.card(name, principal)).id == name
        else:
            with pytest.raises(ModelNotFound) as raised:
                await hub.call(name, principal)
            assert raised.value.message == ModelNotFound(name).message
            with pytest.raises(ModelNotFound):
                await hub.catalog.card(name, principal)
    listed = [card.id for card in await hub.catalog.cards(principal)]
    assert [name for name in listed if name in ("small", "gpt-4o")] == allowed


async def test_the_list_has_models_and_then_aliases_that_can_be_used() -> None:
    cards = await Hub().catalog.cards(PRINCIPAL)

    assert [card.id for card in cards] == ["small", "unlisted", "claude-x", "gpt-4o"]
    assert (cards[3].created, cards[3].max_model_len) == (7, cards[0].max_model_len)


async def test_an_endpoint_out_of_scope_is_refused() -> None:
    hub = Hub(Say("a"))
    await hub.call(principal=key(endpoints=frozenset({"chat"})))
    with pytest.raises(NotAllowed) as raised:
        await hub.call("nobody", key(endpoints=frozenset({"completions"})))

    assert (raised.value.status, raised.value.code) == (403, "endpoint_not_allowed")


BRIEF = Message("system", "Be brief.")
STRICT = Message("system", "Be strict.")


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        (TALK, Conversation((BRIEF, ASK))),
        (Conversation((STRICT, ASK)), Conversation((STRICT, ASK))),
        (Conversation((ASK, STRICT)), Conversation((ASK, STRICT))),
        (Text("hi"), Text("hi")),
    ],
    ids=["none", "its own", "a late one", "text"],
)
async def test_an_alias_s_system_message_is_for_conversations_without_one(prompt: Prompt, expected: Prompt) -> None:
    request, opening = await Hub(Say("a")).answered("claude-x", prompt=prompt)

    assert request.prompts == (expected,)
    assert opening.prompt_tokens == hub_tokens(expected)
    assert (await Hub(Say("a")).answered("gpt-4o", prompt=prompt))[0].prompts == (prompt,)


def hub_tokens(prompt: Prompt) -> int:
    texts: Sequence[str] = (
        [message.content for message in prompt.messages] if isinstance(prompt, Conversation) else [prompt.text]  # type: ignore[union-attr]
    )
    return sum(len(text.split()) for text in texts)


@pytest.mark.parametrize(
    ("name", "asked", "expected"),
    [
        ("small", "interactive", "interactive"),
        ("small", "batch", "batch"),
        ("claude-x", "interactive", "standard"),
        ("claude-x", "batch", "batch"),
    ],
)
async def test_an_alias_may_lower_the_class(name: str, asked: RequestClass, expected: str) -> None:
    hub = Hub(Say("a"))
    _, opening = await hub.answered(name, request_class=asked)

    assert opening.request_class == expected
    assert hub.backend.generations[-1].info.request_class == expected


@pytest.mark.parametrize(("asked", "expected"), [(None, 500), (900, 900), (100, 100)])
async def test_a_key_s_deadline_is_for_requests_that_set_none(asked: int | None, expected: int) -> None:
    request, _ = await Hub(Say("a")).answered(principal=key(deadline_ms=500), deadline_ms=asked)

    assert request.deadline_ms == expected


WITHIN_S = 10.0
"""For what a wrong count of those that wait would hold up for ever."""


def num_free_places(waiting: WaitingRequests, principal: Principal) -> int:
    """How many more requests of the key may wait now; at most one more than may ever."""
    assert principal.max_queue_depth is not None
    with contextlib.ExitStack() as places:
        for num in range(principal.max_queue_depth + 1):
            try:
                places.callback(waiting.enter(principal).leave)
            except QueueFull:
                return num
    return principal.max_queue_depth + 1


async def test_as_many_requests_wait_as_may_and_no_more() -> None:
    hub = Hub(Gate("go"), Say("a"), Gate("never"))
    principal = key(max_queue_depth=2)

    async def run() -> None:
        async with await hub.call(principal=principal) as call:
            async for _ in call:
                pass

    async with asyncio.timeout(WITHIN_S):
        waiting = [asyncio.create_task(run()) for _ in range(2)]
        await hub.backend.wait_until(lambda: len(hub.backend.generations) == 2)
        with pytest.raises(QueueFull) as raised:
            await run()
        assert (raised.value.status, raised.value.code, raised.value.retry_after_s) == (429, "queue_full", 1)
        assert len(hub.backend.generations) == len(hub.openings) == 2
        async with await hub.call(principal=key(key_id=KeyId("key_2"), max_queue_depth=1)):
            pass

        hub.backend.gate("go").set()  # both get their first token and wait for nothing but the rest
        await hub.backend.wait_until(lambda: sum(each.num_told for each in hub.backend.generations) == 2)
        third = asyncio.create_task(run())
        await hub.backend.wait_until(lambda: len(hub.backend.generations) == 4)
        for task in (*waiting, third):
            task.cancel()
        await asyncio.gather(*waiting, third, return_exceptions=True)
        assert num_free_places(hub.inference._waiting, principal) == 2


@pytest.mark.parametrize("ending", ["refused", "disk full", "finished", "failed", "client gone", "cancelled", "bug"])
@pytest.mark.parametrize("told", [False, True])
async def test_a_place_is_given_back_once_whatever_the_ending(ending: str, told: bool) -> None:
    steps: list[Say | Gate | Fail] = [Say("a")] if told else []
    if ending == "failed":
        steps.append(Fail(EngineDown("lost")))
    elif ending != "finished":
        steps.append(Gate("never"))
    hub = Hub(*steps, refuse=EngineDown("no") if ending == "refused" else None)
    hub.disk_full = ending == "disk full"
    principal = key(max_queue_depth=2)
    waiting = hub.inference._waiting
    other = waiting.enter(principal)
    free: list[int] = []

    async def run() -> None:
        async with await hub.call(principal=principal) as call:
            async for _ in call:
                free.append(num_free_places(waiting, principal))
                if ending in ("client gone", "bug"):
                    break
            if ending != "finished":
                raise ClientGone if ending == "client gone" else ZeroDivisionError

    if ending in ("client gone", "bug") and not told:
        hub.backend.gate("never").set()
    task = asyncio.create_task(run())
    async with asyncio.timeout(WITHIN_S):
        if ending == "cancelled":
            await hub.backend.wait_until(lambda: bool(hub.backend.generations))
            await asyncio.sleep(0)
            task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    assert set(free) <= {1}, "what has its first events waits no more"
    assert num_free_places(waiting, principal) == 1, "the other one still waits"
    other.leave()
    other.leave()
    assert num_free_places(waiting, principal) == 2
