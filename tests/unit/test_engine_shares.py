"""A step's time is shared out to the microsecond."""

from __future__ import annotations

from dataclasses import dataclass

from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.request import RequestState
from engine.sched.plan import Chunk
from engine.shares import share_step_time


@dataclass
class Request:
    state: RequestState = RequestState.RUNNING
    engine_us: int = 0


def share(elapsed_us: int, *rows: tuple[int, RequestState]) -> tuple[list[int], int]:
    requests = [Request(state) for _, state in rows]
    chunks = [Chunk(row=i, start=0, num_tokens=num) for i, (num, _) in enumerate(rows)]
    unshared_us = share_step_time(requests, chunks, elapsed_us)  # type: ignore[arg-type]
    return [request.engine_us for request in requests], unshared_us


RUNNING, FINISHED = RequestState.RUNNING, RequestState.FINISHED


def test_shares_go_by_tokens() -> None:
    assert share(1000, (3, RUNNING), (1, RUNNING)) == ([750, 250], 0)


def test_the_share_of_a_request_that_has_ended_is_nobodys() -> None:
    assert share(1000, (3, RUNNING), (1, FINISHED)) == ([750, 0], 250)


@settings(max_examples=examples(200), deadline=None)
@given(
    elapsed_us=st.integers(0, 10_000_000),
    rows=st.lists(st.tuples(st.integers(1, 4096), st.sampled_from([RUNNING, FINISHED])), min_size=1, max_size=64),
)
def test_shares_add_up_and_are_fair_to_a_microsecond(elapsed_us: int, rows: list[tuple[int, RequestState]]) -> None:
    shares, unshared_us = share(elapsed_us, *rows)
    assert sum(shares) + unshared_us == elapsed_us
    total = sum(num for num, _ in rows)
    for (num, state), share_us in zip(rows, shares, strict=True):
        assert state is FINISHED or abs(share_us - elapsed_us * num / total) < 1
