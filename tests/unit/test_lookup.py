"""The use case "where does my request stand": who is asked, who is told, and what is said while nobody knows."""

from __future__ import annotations

import asyncio

import pytest
from client_kit import until
from metering_kit import Clock, MemoryStorage, OwnRequests, opening, record

from gateway.domain.ids import RequestId, TeamId, as_request_id, new_request_id
from gateway.domain.ledger import LedgerRow
from gateway.domain.standing import LiveRequest
from gateway.domain.usage import EngineTimings
from gateway.errors import EngineDown, RequestNotFound, StorageDown
from gateway.services import lookup as lookup_module
from gateway.services.lookup import Found, RequestLookup
from gateway.services.metering import row_of

ID = RequestId("req_00000000000132ef235c7387485eecda")
"""Always the same, since it is part of tests' names."""
TEAM, OTHER = TeamId("team_1"), TeamId("team_2")


def live(team_id: TeamId = TEAM) -> LiveRequest:
    return LiveRequest(
        request_id=ID,
        team_id=team_id,
        request_class="interactive",
        status="running",
        waiting_for=None,
        ahead={},
        ahead_of_team=(),
        expected_wait_us=0,
        timings=EngineTimings(),
    )


def row(request_id: RequestId = ID) -> LedgerRow:
    return row_of(record(opening(request_id)))


class Engine:
    """The part of a backend that is asked; a list of answers is used up one by one, the last one stays."""

    def __init__(self, *answers: LiveRequest | Exception | None) -> None:
        self.answers = list(answers) or [None]
        self.num_asked = 0

    async def standing(self, request_id: RequestId) -> LiveRequest | None:
        self.num_asked += 1
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer


class Desk:
    """A lookup and all that it asks."""

    def __init__(self, *answers: LiveRequest | Exception | None, wait_s: float = 0.0) -> None:
        self.engine, self.storage, self.own, self.clock = Engine(*answers), MemoryStorage(), OwnRequests(), Clock()
        self.lookup = RequestLookup(self.engine, self.storage, self.own, self.clock, wait_s=wait_s)  # type: ignore[arg-type]

    async def find(self, text: str = ID, team_id: TeamId = TEAM) -> Found:
        return await self.lookup.find(text, team_id)


DOWN = EngineDown("down", retry_after_s=5)


async def test_the_engine_is_asked_first() -> None:
    desk = Desk(live())
    desk.storage.is_down = True
    assert await desk.find() == live()


async def test_what_the_engine_does_not_have_is_in_the_ledger() -> None:
    desk = Desk()
    desk.storage.rows[ID] = row()
    assert await desk.find() == row()


async def test_what_this_process_has_settled_it_tells_without_asking_anybody() -> None:
    desk = Desk(DOWN)
    desk.storage.is_down = True
    desk.own.known[ID] = row()
    assert await desk.find() == row()
    assert desk.engine.num_asked == 0


async def test_what_is_being_settled_here_is_told_as_far_as_it_is_known() -> None:
    desk = Desk()
    desk.own.known[ID] = opening(ID)
    assert await desk.find() == opening(ID)


async def test_with_the_engine_down_what_has_ended_is_told_and_of_the_rest_nothing_is_said() -> None:
    desk = Desk(DOWN)
    with pytest.raises(EngineDown):
        await desk.find()
    desk.storage.rows[ID] = row()
    assert await desk.find() == row()


async def test_with_the_database_down_nobody_is_said_not_to_exist() -> None:
    desk = Desk()
    desk.storage.is_down = True
    with pytest.raises(StorageDown):
        await desk.find()


@pytest.mark.parametrize(
    "text",
    [
        *("", "req_", "r", "req_" + "0" * 31, "req_" + "0" * 33, "req_" + "A" * 32, "req_" + "٣" * 32),
        *(f"{ID}-0", f" {ID}", f"{ID}\n"),
    ],
)
async def test_what_can_be_no_id_is_refused_at_once(text: str) -> None:
    desk = Desk(live(), wait_s=60)
    with pytest.raises(RequestNotFound):
        await desk.find(text)
    assert desk.engine.num_asked == 0


def test_every_id_that_is_made_is_one() -> None:
    for now_ms in (0, 1, 1_900_000_000_000, 1 << 48):
        made = new_request_id(now_ms)
        assert as_request_id(made) == made


async def test_another_teams_request_is_not_told_apart_from_one_that_never_was() -> None:
    """By nothing: not by the error, nor by how often or how long it was looked for."""

    async def refusal(desk: Desk) -> tuple[str, int]:
        finding = asyncio.create_task(desk.find(team_id=OTHER))
        await until(lambda: desk.engine.num_asked == 2 or finding.done(), "it has been looked for twice")
        assert not finding.done(), "its time is not over"
        desk.clock.now_s += 1
        with pytest.raises(RequestNotFound) as refused:
            await finding
        return refused.value.message, desk.engine.num_asked

    running, ended, settling, never = (Desk(live(), wait_s=1), *(Desk(wait_s=1) for _ in range(3)))
    ended.storage.rows[ID] = row()
    settling.own.known[ID] = opening(ID)
    assert len({await refusal(desk) for desk in (running, ended, settling, never)}) == 1


async def test_a_request_that_another_process_is_about_to_post_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookup_module, "POLL_S", 0.001)
    desk = Desk(wait_s=1)
    finding = asyncio.create_task(desk.find())
    await until(lambda: desk.engine.num_asked > 2, "it has been looked for more than once")
    desk.storage.rows[ID] = row()
    assert await finding == row()


async def test_a_request_that_another_process_is_about_to_hand_over_is_waited_for() -> None:
    assert await Desk(None, live(), wait_s=1).find() == live()


async def test_a_request_that_is_settled_between_two_looks_is_found() -> None:
    """It has left the engine when that is asked, and is not yet in the ledger when that is read."""
    desk = Desk()
    desk.own.known[ID] = opening(ID)

    class Settles(Engine):
        async def standing(self, request_id: RequestId) -> LiveRequest | None:
            desk.own.known[ID] = row()
            return None

    lookup = RequestLookup(Settles(), desk.storage, desk.own, desk.clock, wait_s=0)  # type: ignore[arg-type]
    assert await lookup.find(ID, TEAM) == row()


async def test_a_request_of_this_process_is_not_said_to_be_settling_while_the_engine_does_not_answer() -> None:
    desk = Desk(DOWN)
    desk.own.known[ID] = opening(ID)
    with pytest.raises(EngineDown):
        await desk.find()


async def test_a_team_that_asks_for_many_holds_up_nobody_else() -> None:
    """One engine that answers one question at a time, and twenty of one team before the other's."""
    asked: list[RequestId] = []
    free = asyncio.Semaphore(0)

    class Slow(Engine):
        async def standing(self, request_id: RequestId) -> LiveRequest | None:
            asked.append(request_id)
            await free.acquire()
            return live(OTHER) if request_id == ID else None

    desk = Desk()
    lookup = RequestLookup(Slow(), desk.storage, desk.own, desk.clock, wait_s=60)  # type: ignore[arg-type]
    many = [asyncio.create_task(lookup.find(new_request_id(i), TEAM)) for i in range(20)]
    await until(lambda: len(asked) == 1, "the first is under way")
    other = asyncio.create_task(lookup.find(ID, OTHER))
    await until(lambda: ID in asked, "the other team's is under way")
    assert len(asked) == 2
    free.release()
    free.release()
    assert await other == live(OTHER)
    for task in many:
        task.cancel()
    await asyncio.gather(*many, return_exceptions=True)
