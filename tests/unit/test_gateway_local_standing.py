"""Where a request stands, from the engines' words into the gateway's."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
from client_kit import until

from engine.errors import EngineUnavailable
from engine.standing import Standing
from gateway.backends import local_standing
from gateway.backends.local_standing import LocalStandings
from gateway.domain.ids import new_request_id
from gateway.domain.standing import LiveRequest
from gateway.domain.usage import EngineTimings
from gateway.errors import EngineDown

ID, OTHER = new_request_id(1), new_request_id(2)


class Client:
    """Answers as the test says, when it says."""

    def __init__(self, answer: Standing | Exception) -> None:
        self.answer = answer
        self.asked: list[tuple[str, Sequence[str]]] = []
        self.may_answer = asyncio.Event()
        self.may_answer.set()

    async def standing(self, request_id: str, other_ids: Sequence[str] = ()) -> Standing:
        self.asked.append((request_id, other_ids))
        await self.may_answer.wait()
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


async def test_everything_is_taken_over() -> None:
    client = Client(
        Standing(
            team_id="team:team_7",
            request_class="batch",
            phase="preempted",
            resource="blocks",
            ahead={"interactive": 2, "batch": 1},
            ahead_of_team=(f"{OTHER}-0", f"{OTHER}-3", f"{ID}-1"),
            expected_wait_us=5,
            queue_us=1,
            prefill_us=2,
            decode_us=3,
            preempted_us=4,
            parked_us=6,
        )
    )
    assert await LocalStandings(client).of(ID) == LiveRequest(
        request_id=ID,
        team_id="team_7",
        request_class="batch",
        status="preempted",
        waiting_for="blocks",
        ahead={"interactive": 2, "batch": 1},
        ahead_of_team=(OTHER,),  # a request with several prompts is one, and not ahead of itself
        expected_wait_us=5,
        timings=EngineTimings(queue_us=1, prefill_us=2, decode_us=3, preempted_us=4, parked_us=6),
    )


async def test_parts_of_the_request_are_asked_for_as_well() -> None:
    client = Client(Standing())
    assert await LocalStandings(client).of(ID) is None
    assert client.asked == [(ID, [f"{ID}-{i}" for i in range(128)])]


@pytest.mark.parametrize(
    ("phase", "status"),
    [("queue", "queued"), ("prefill", "running"), ("decode", "running"), ("parked", "parked"), ("at_cap", "at_cap")],
)
async def test_phases_have_words_of_their_own(phase: str, status: str) -> None:
    answer = Standing(phase=phase, request_class="interactive")  # type: ignore[arg-type]
    live = await LocalStandings(Client(answer)).of(ID)
    assert live is not None
    assert (live.status, live.waiting_for) == (status, None)


async def test_an_engine_that_is_lost_or_silent_is_down(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_standing, "ANSWER_WITHIN_S", 0.01)
    silent = Client(Standing())
    silent.may_answer.clear()
    for client in (Client(EngineUnavailable("lost")), silent):
        with pytest.raises(EngineDown):
            await LocalStandings(client).of(ID)


async def test_one_question_at_a_time_gets_to_the_engines() -> None:
    client = Client(Standing())
    client.may_answer.clear()
    standings = LocalStandings(client)
    askers = [asyncio.create_task(standings.of(ID)) for _ in range(5)]
    await until(lambda: len(client.asked) == 1, "the first is asked")
    for _ in range(10):
        await asyncio.sleep(0)
    assert len(client.asked) == 1
    client.may_answer.set()
    await asyncio.gather(*askers)
    assert len(client.asked) == 5
