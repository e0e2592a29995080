"""Whose a reservation is."""

from __future__ import annotations

from redis_limits_kit import Hub, lease, quota

from gateway.domain.limits.admission import Reservation


async def test_what_one_process_holds_is_told_apart(hub: Hub) -> None:
    of_one, _ = await hub.admit(lease(9), owner="one")
    of_other, _ = await hub.admit(lease(9), owner="other")
    ask = hub.ask(lease(9), owner="one")
    await hub.store.begin_epoch(hub.id, {}, [Reservation(ask=ask, granted_output=5, reserved=(1,))])

    assert set(await hub.store.held(hub.id)) == {of_one, of_other, ask.request_id}
    assert set(await hub.store.held(hub.id, "one")) == {of_one, ask.request_id}
    await hub.settle(of_one, 1, 1)
    assert await hub.store.held(hub.id, "one") == [ask.request_id]
    assert await hub.store.held(hub.id, "nobody") == []


async def test_a_raised_reservation_is_still_its_owners(hub: Hub) -> None:
    await hub.begin()
    request, _ = await hub.admit(quota(1_000), most=10, owner="one")
    assert await hub.store.raise_output(hub.id, request, 20) == 20
    assert await hub.store.report(hub.id, {request: 5}, 60_000) == []

    assert await hub.store.held(hub.id, "one") == [request]


async def test_output_that_was_told_is_not_taken_back(hub: Hub) -> None:
    """Who renews the lease of a process that died does not know how far its requests were."""
    await hub.begin()
    request, _ = await hub.admit(quota(1_000), prompt=10, most=50)
    await hub.store.report(hub.id, {request: 7}, 60_000)
    await hub.store.report(hub.id, {request: 0}, 60_000)
    await hub.passes(2 * 60_000)
    assert await hub.store.reap(hub.id, 1) == [request]

    assert await hub.left(quota(1_000)) == [1_000 - 17]
