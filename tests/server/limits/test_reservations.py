"""What is reserved for one request is nobody else's, and what it does not use is anybody's the moment it has ended."""

from __future__ import annotations

from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from cluster import SharedCluster
from limit_kit import Customer, Held, LimitOffice, begun, eventually, standings
from limit_load import Caller, Running, stop_at, taken, what_happened

from gateway.domain.limits.policy import QuotaRule

pytestmark = pytest.mark.slow

QUOTA = "quota-tokens/day"
LASTING = 4000
"""Tokens of the one that runs on, prompt included."""
WITHIN_S = 2.0
"""Of the end of a request whose client does not hear of it."""


def quota(amount: int) -> Held:
    return Held("key", QuotaRule(unit="tokens", period="day", amount=amount))


class Rush(NamedTuple):
    """So many requests at once on so much of a quota, all of one size."""

    left: int
    num: int
    prompt: int
    output: int
    n: int = 1

    @property
    def num_whole(self) -> int:
        return self.left // (self.prompt + self.n * self.output)

    @property
    def cut_output(self) -> int:
        """What one more gets, over all its choices; 0 if it is refused. An answer each has at least one token."""
        rest = self.left - self.num_whole * (self.prompt + self.n * self.output) - self.prompt
        return rest // self.n * self.n if rest >= self.n else 0


RUSHES = {
    "four whole, a fifth cut": Rush(1000, 50, 20, 200),
    "exactly five": Rush(1100, 50, 20, 200),
    "one token short of five": Rush(1099, 50, 20, 200),
    "no room for a prompt": Rush(900, 30, 25, 200),
    "room for a prompt and one token": Rush(901, 30, 20, 200),
    "room for a prompt alone": Rush(900, 30, 20, 200),
    "four choices each": Rush(1000, 40, 20, 50, n=4),
    "rest not to be shared evenly": Rush(1000, 40, 15, 33, n=6),
    "none is whole": Rush(300, 40, 10, 500),
    "not one": Rush(10, 20, 10, 5),
}


@pytest.mark.parametrize("is_stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("name", RUSHES)
async def test_as_many_run_at_full_length_as_there_is_room_for_and_one_more_is_cut(
    pair: SharedCluster, office: LimitOffice, caller: Caller, name: str, is_stream: bool
) -> None:
    """What breaks it: with a check first and the charge at the end all of them run, since none has ended when the last
    one comes."""
    rush = RUSHES[name]
    customer = await office.customer(quota(rush.left))
    await begun(pair, customer)

    answers = await caller.ask_all(
        caller.ask(
            pair.gateways[i % 2].url, customer.key, prompt=rush.prompt, output=rush.output, n=rush.n, stream=is_stream
        )
        for i in range(rush.num)
    )

    whole = [answer for answer in taken(answers) if answer.output == rush.n * rush.output]
    cut = [answer for answer in taken(answers) if answer not in whole]
    assert len(whole) == rush.num_whole, what_happened(answers)
    assert [answer.output for answer in cut] == ([rush.cut_output] if rush.cut_output else [])
    assert all(answer.is_clamped and set(answer.causes.values()) == {"quota_exceeded"} for answer in cut)
    assert not any(answer.is_clamped or answer.causes for answer in whole)
    assert {answer.code for answer in answers if not answer.is_taken} == {"insufficient_quota"}
    used = sum(answer.total for answer in answers)
    assert used <= rush.left
    assert {(await standings(each.url, customer.key)).left(QUOTA) for each in pair.gateways} == {rush.left - used}


async def is_back(office: LimitOffice, pair: SharedCluster, customer: Customer) -> bool:
    """All but what the one that lasts holds, and what the three are charged for."""
    rows = await office.rows(customer)
    used = sum(row.prompt_tokens + row.completion_tokens for row in rows)
    left = (await standings(pair.gateways[0].url, customer.key)).left(QUOTA)
    return len(rows) == 3 and left == 3 * 1520 - used


@pytest.mark.parametrize("ending", ["stop string", "client leaves"])
async def test_three_that_end_early_make_room_at_once(
    pair: SharedCluster, office: LimitOffice, caller: Caller, ending: str, smollm2_path: Path
) -> None:
    """Four run and hold all there is, so a fifth is refused. When three have ended before their time, a request of just
    the size of what they left is taken, is not cut, and uses the quota up to the token.

    What breaks it: three reservations that are kept until they expire, or are settled at what was reserved."""
    customer = await office.customer(quota(LASTING + 3 * 1520))
    await begun(pair, customer)
    one, other = (gateway.url for gateway in pair.gateways)
    fields = {"stop": stop_at(150, smollm2_path)} if ending == "stop string" else {}
    async with AsyncExitStack() as stack:

        async def start(url: str, output: int = 1500, **fields: Any) -> Running:
            return await stack.enter_async_context(
                caller.running(url, customer.key, prompt=20, output=output, after=5, **fields)
            )

        lasting = await start(one, LASTING - 20)
        early = [await start(url, **fields) for url in (one, other, one)]
        refused = await caller.ask(other, customer.key, prompt=20, output=1)
        for each in early:
            await (each.leave() if ending == "client leaves" else each.end())
        if ending == "client leaves":  # nobody is told then when it is settled
            await eventually(lambda: is_back(office, pair, customer), "what was not used is free", WITHIN_S)
        left = (await standings(other, customer.key)).left(QUOTA)
        prompt = 20 + (left - 20) % 8
        whole = await caller.ask(other, customer.key, prompt=prompt, n=8, output=(left - prompt) // 8)
        assert not lasting.answer.is_over, "all this was while it ran"

    assert (refused.status, refused.code) == (429, "insufficient_quota")
    rows = await office.settled(customer, 5)
    if ending == "stop string":
        assert [each.answer.output for each in early] == [150] * 3
        assert left == 3 * (1520 - 170)
    assert (whole.total, whole.is_clamped) == (left, False)
    used = sum(row.prompt_tokens + row.completion_tokens for row in rows)
    assert (await standings(other, customer.key)).left(QUOTA) == LASTING + 3 * 1520 - used
