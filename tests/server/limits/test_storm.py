"""Requests of all kinds, sizes and endings at once, under limits of all kinds that are changed meanwhile."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest
from cluster import MODEL, SharedCluster
from examples import examples
from limit_kit import Customer, Held, LimitOffice, Standings, begun, eventually, standings
from limit_load import Answer, Caller, stop_at, taken, what_happened

from gateway.domain.limits.policy import Concurrency, QuotaRule, RequestRate, TokenRate

pytestmark = pytest.mark.slow

NUM = 300
OVER_S = 3.0
TOP_UP = 1_500
NUM_TOP_UPS = 2
Ending = Literal["whole", "stream", "stop string", "leaves", "leaves at once", "invalid", "unknown model", "too long"]
ENDINGS: tuple[Ending, ...] = (
    *("whole", "whole", "stream", "stream", "stop string", "stop string"),
    *("leaves", "leaves", "leaves at once", "invalid", "unknown model", "too long"),
)

OF_ALL = Held("organization", QuotaRule(unit="tokens", period="day", amount=9_000))
MONEY = Held("organization", QuotaRule(unit="microusd", period="month", amount=110_000))
OF_TEAM = Held("team", QuotaRule(unit="tokens", period="week", amount=7_000))
OF_MODEL = Held("key", QuotaRule(unit="tokens", period="month", amount=4_000), MODEL)
SLOTS = Held("organization", Concurrency(amount=8))
SLOTS_OF_KEY = Held("key", Concurrency(amount=3))
RATE = Held("team", RequestRate(amount=60, period="second"))
TOKEN_RATE = Held("key", TokenRate(amount=3_000, period="second", burst=6_000))
SOFT = Held("team", QuotaRule(unit="tokens", period="day", amount=100, is_hard=False))
SHADOW = Held("organization", QuotaRule(unit="tokens", period="week", amount=100), is_shadow=True)
EXACT = (OF_ALL, MONEY, OF_TEAM, OF_MODEL)
LEASES = (SLOTS, SLOTS_OF_KEY)


@dataclass
class Storm:
    """Everything that is sent, and what is seen of the limits while it is."""

    pair: SharedCluster
    caller: Caller
    rng: random.Random
    model: Path
    customers: Sequence[Customer]
    answers: list[tuple[Ending, Customer, Answer]] = field(default_factory=list)
    looks: list[Standings] = field(default_factory=list)
    is_over: asyncio.Event = field(default_factory=asyncio.Event)

    async def send_all(self) -> None:
        stops = [stop_at(num, self.model) for num in (3, 20, 60)]
        async with asyncio.TaskGroup() as group:
            for _ in range(NUM):
                group.create_task(self._send(self.rng.choice(ENDINGS), self.rng.uniform(0, OVER_S), stops))
        self.is_over.set()

    async def _send(self, ending: Ending, after_s: float, stops: Sequence[str]) -> None:
        rng, customer = self.rng, self.rng.choice(self.customers)
        answer = Answer(rng.choice(self.pair.gateways).url)
        self.answers.append((ending, customer, answer))
        fields: dict[str, Any] = {
            "prompt": rng.randint(5, 80),
            "output": rng.randint(1, 150),
            "n": rng.choice([1, 1, 3]),
        }
        fields |= {
            "whole": {},
            "stream": {"stream": True},
            "stop string": {"stop": stops, "stream": rng.random() < 0.5, "output": 100},
            "leaves": {"stream": True, "output": 1_500},
            "leaves at once": {"stream": rng.random() < 0.5, "output": 1_500},
            "invalid": {"n": 99},
            "unknown model": {"model": "nothing-like-that"},
            "too long": {"prompt": "too long " * 9_000},
        }[ending]
        leave_after = rng.randint(1, 60)
        leave_after_s = rng.uniform(0, 0.05)
        await asyncio.sleep(after_s)
        asking = asyncio.create_task(self.caller.ask(answer.url, customer.key, answer=answer, **fields))
        if ending == "leaves at once":
            await asyncio.wait({asking}, timeout=leave_after_s)
            asking.cancel()
        elif ending == "leaves":
            while not asking.done() and answer.num_chunks < leave_after:
                await asyncio.wait({asking}, timeout=0.01)
            asking.cancel()
        await asyncio.wait({asking})

    async def look_on(self) -> None:
        """Again and again until it is over, at both."""
        while not self.is_over.is_set():
            for gateway in self.pair.gateways:
                self.looks += [await standings(gateway.url, each.key) for each in self.customers]


@pytest.mark.parametrize("seed", range(examples(2)))
async def test_in_a_storm_no_limit_is_exceeded_and_after_it_nothing_is_missing(
    pair: SharedCluster, office: LimitOffice, caller: Caller, smollm2_path: Path, seed: int
) -> None:
    """Four keys of two teams. Whoever looks sees no hard quota and no number of slots below nothing; in the end every
    slot is free, and of each quota is used what the ledger says, which is what callers were told."""
    await office.price(prompt=2_500_000, cached=700_000, completion=10_300_000)
    first = await office.customer(OF_ALL, MONEY, OF_TEAM, OF_MODEL, SLOTS, SLOTS_OF_KEY, RATE, TOKEN_RATE, SOFT, SHADOW)
    second = await office.colleague(first, OF_MODEL, SLOTS_OF_KEY, TOKEN_RATE)
    third = await office.colleague(first, OF_TEAM, OF_MODEL, SLOTS_OF_KEY, RATE, same_team=False)
    fourth = await office.colleague(first, TOKEN_RATE, same_team=False)
    customers = [first, second, third, fourth]
    await begun(pair, first)
    storm = Storm(pair, caller, random.Random(seed), smollm2_path, customers)

    async def administer() -> None:
        for num in range(NUM_TOP_UPS):
            await eventually(lambda num=num: enough(num), "the storm goes on")
            await office.top_up(first, OF_ALL, TOP_UP)

    async def enough(num: int) -> bool:
        decided = [each for _, _, each in storm.answers if each.status]
        return len(decided) > (num + 1) * NUM // 4

    async with asyncio.TaskGroup() as group:
        group.create_task(storm.look_on())
        group.create_task(administer())
        await storm.send_all()

    answers = [answer for _, _, answer in storm.answers]
    check_answers(storm)
    assert {answer.code for answer in answers} >= {"insufficient_quota", "concurrency_limit_exceeded"}, what_happened(
        answers
    )
    assert len(storm.looks) > 20
    for look in storm.looks:
        for limit in look.limits:
            if limit["name"] == "concurrent" or (limit.get("is_hard") and limit["is_enforced"]):
                assert limit["remaining"] >= 0, limit

    async def is_quiet() -> bool:
        looks = [await standings(pair.gateways[0].url, each.key) for each in customers]
        slots = [each for look in looks for each in look.limits if each["name"] == "concurrent"]
        return all(each["remaining"] == each["amount"] for each in slots)

    await eventually(is_quiet, "all slots are free")
    team_ids = {each.team_id: each for each in customers}
    told = {answer.request_id: answer for answer in taken(answers) if answer.usage}

    async def are_all_posted() -> bool:
        nonlocal rows
        rows = [row for each in team_ids.values() for row in await office.rows(each)]
        return {row.request_id for row in rows} >= {each.request_id for each in taken(answers)}

    rows: list[Any] = []
    await eventually(are_all_posted, "all rows")
    for row in rows:
        if row.request_id in told and told[row.request_id].is_over and told[row.request_id].reasons:
            answer = told[row.request_id]
            assert (row.prompt_tokens, row.completion_tokens) == (answer.prompt, answer.output)

    async def adds_up() -> bool:
        return await is_what_the_ledger_says(pair, office, customers)

    await eventually(adds_up, f"what is left is what the ledger says: {what_happened(answers)}", 5)


def check_answers(storm: Storm) -> None:
    for ending, _, answer in storm.answers:
        codes = {
            "invalid": {None},
            "unknown model": {"model_not_found"},
            "too long": {"context_length_exceeded"},
        }.get(ending, {None})
        limits = {"insufficient_quota", "rate_limit_exceeded", "concurrency_limit_exceeded"}
        if ending in ("leaves", "leaves at once") and not answer.status:
            continue
        assert answer.code in codes | limits, (ending, answer.status, answer.error)
        if answer.code is None and ending != "invalid":
            assert answer.status == 200, (ending, answer.error)


async def is_what_the_ledger_says(pair: SharedCluster, office: LimitOffice, customers: Sequence[Customer]) -> bool:
    """Of every quota of everybody, at both gateways."""
    committed = await office.committed(customers[0])
    for customer in customers:
        for gateway in pair.gateways:
            for limit in (await standings(gateway.url, customer.key)).limits:
                if "period" not in limit:
                    continue
                scope_id = customer.scope_id(limit["scope"])
                key = f"{limit['name']}:{scope_id}:{limit['period']}:{limit['model'] or ''}"
                if limit["remaining"] != limit["amount"] - committed.get(key, 0):
                    return False
    return True
