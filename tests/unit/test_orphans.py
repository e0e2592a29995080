"""What dead processes had reserved, over a store in memory and a ledger in memory."""

from __future__ import annotations

import msgspec
import pytest
from limits_kit import LEASE_MS, ORGANIZATION, ask
from metering_kit import MemoryStorage, opening, record

from gateway.domain.ids import RequestId
from gateway.domain.limits.meters import Lease, Quota
from gateway.domain.usage import TokenUsage
from gateway.limits.memory import MemoryLimits
from gateway.services.metering import row_of
from gateway.services.orphans import Orphans
from gateway.services.posting import post

DEAD, OTHER = "de", "0a"
QUOTA, SLOTS = Quota(key="q", amount=1_000), Lease(key="l", limit=9)


class Scene:
    """Three requests of a dead process and one of a living one; 10 tokens in, 20 out at most."""

    def __init__(self) -> None:
        self.now_ms = 0
        self.store = MemoryLimits(lambda: self.now_ms)
        self.storage = MemoryStorage()
        self.orphans = Orphans(self.store, self.storage, LEASE_MS)

    async def begin(self) -> None:
        await self.store.begin_epoch(ORGANIZATION, {}, ())
        for name, owner in (("a", DEAD), ("b", DEAD), ("c", DEAD), ("d", OTHER)):
            assert (await self.store.admit(ask(QUOTA, SLOTS, request=name, owner=owner))).is_admitted

    async def round(self, *, is_lost: bool = False) -> None:
        self.orphans.begin_round([ORGANIZATION])
        await self.orphans.tend(ORGANIZATION, is_lost=is_lost)

    async def reaped_in(self, ms: int) -> set[str]:
        reaped: set[str] = set()
        for _ in range(0, ms, LEASE_MS // 10):
            self.now_ms += LEASE_MS // 10
            await self.round()
            reaped.update(await self.store.reap(ORGANIZATION, 9))
        return reaped

    async def left(self) -> list[int]:
        return list(await self.store.look(ORGANIZATION, ask(QUOTA, SLOTS).uses))


@pytest.fixture
async def scene() -> Scene:
    scene = Scene()
    await scene.begin()
    return scene


async def posted(scene: Scene, name: str, usage: TokenUsage) -> None:
    row = msgspec.structs.replace(
        row_of(record(opening(name))),
        request_id=RequestId(name),
        organization_id=ORGANIZATION,
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        cached_tokens=0,
    )
    await post(scene.storage, [row])


async def test_leases_are_renewed_while_it_is_found_out_what_was_used(scene: Scene) -> None:
    await scene.store.report(ORGANIZATION, {RequestId("a"): 7}, LEASE_MS)
    scene.orphans.dying = lambda: [DEAD]
    assert await scene.reaped_in(3 * LEASE_MS) == {"d"}
    scene.orphans.dying = tuple
    assert await scene.reaped_in(LEASE_MS) == {"a", "b", "c"}

    assert await scene.left() == [1_000 - (10 + 7) - 3 * 10, 9], "what was told before counts"


async def test_what_is_left_of_a_dead_process_is_settled_by_the_ledger_or_was_never_used(scene: Scene) -> None:
    await posted(scene, "a", TokenUsage(10, 12))
    await posted(scene, "b", TokenUsage())
    await scene.round()
    assert await scene.left() == [1_000 - 4 * 30, 5], "it may still be running"
    scene.orphans.gone(DEAD)
    await scene.round()

    assert await scene.store.held(ORGANIZATION) == ["d"]
    assert await scene.left() == [1_000 - 30 - 22, 8]
    await scene.round()
    assert await scene.left() == [1_000 - 30 - 22, 8]


async def test_nothing_is_settled_in_a_store_that_does_not_know_what_is_committed(scene: Scene) -> None:
    await posted(scene, "a", TokenUsage(10, 12))
    scene.orphans.gone(DEAD)
    await scene.round(is_lost=True)
    assert await scene.left() == [1_000 - 4 * 30, 5]
    await scene.round()

    assert await scene.left() == [1_000 - 30 - 22, 8]
