"""What a request with several choices or prompts has cost the engine."""

from __future__ import annotations

from local_backend_kit import EOS, FakeClient, FakeStream, events_of, request, started

from engine.messages import Output, Timings
from gateway.domain.request import Text
from gateway.domain.usage import EngineTimings


def end(request_id: str, choice: int, timings: Timings) -> Output:
    return Output(
        request_id=request_id, choice=choice, token_ids=(EOS,), finish="stop", stop_token_id=EOS, timings=timings
    )


async def test_engine_time_is_added_up_and_the_rest_is_of_the_one_that_took_longest() -> None:
    """So that the parts are a whole: the longest of each would be more than the time that passed."""
    first, second = FakeStream(), FakeStream()
    generation = await started(FakeClient(first, second), request(Text("aa"), Text("bb"), num_choices=2))
    first.feed(end("req_1-0", 0, Timings(queue_us=5, prefill_us=1, decode_us=10, engine_us=100, parked_us=4)))
    longest = Timings(queue_us=6, prefill_us=2, decode_us=9, preempted_us=3, engine_us=20, parked_us=1)
    first.feed(end("req_1-0", 1, longest))
    second.feed(end("req_1-1", 0, Timings(queue_us=7, engine_us=3)))
    second.feed(end("req_1-1", 1, Timings(queue_us=1, engine_us=4000)))
    await events_of(generation)

    assert generation.timings == EngineTimings(
        queue_us=6, prefill_us=2, decode_us=9, preempted_us=3, engine_us=4123, parked_us=1
    )
