"""Turns what is replayed into a `Run`, so that a recording has the same figures as a simulation.

An arrival is one choice of a request. Its times are those of the engine's clock, from the first event on; what a step
is charged is reckoned with the recorded cost model, what it took was measured.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from hashlib import sha256

import msgspec
from msgspec import structs

from engine.messages import Output, PathNode, Submit
from engine.recording.format import Header
from engine.sched.plan import NewRow, StepPlan
from engine.sim.plan_diff import Submissions
from engine.sim.step_books import Entry, StepBooks
from engine.sim.trace import RequestTrace, Run, StepTrace
from engine.sim.workload import FIRST_SHARED_ID, TEAM_DEPTH, Arrival, Segment, Workload

_NO_NODE = PathNode("-")
"""Stands where a path ends above the team."""


class RecordedRun:
    """Told what happens in the order in which it happens."""

    def __init__(self, name: str, header: Header, submissions: Submissions) -> None:
        self._name = name
        self._header = header
        self._submissions = submissions
        self._most_tokens = min(header.max_model_len, header.num_blocks * header.block_tokens)
        self._books = StepBooks(header.cost, self._arrival_of)
        self._live: dict[tuple[str, int], RequestTrace] = {}
        self._traces: dict[int, RequestTrace] = {}
        self._in_flight: deque[Entry] = deque()
        self._elapsed_us: int | None = None
        self._steps: list[StepTrace] = []
        self._digest = sha256()
        self._encoder = msgspec.msgpack.Encoder()
        self._began_us: int | None = None
        self._now_us = 0

    def submitted(self, message: Submit, now_us: int) -> None:
        at_us = self._at(now_us)
        for choice in range(message.num_choices):
            arrival = Arrival(
                id=len(self._traces),
                at_us=at_us,
                path=(*message.path, *[_NO_NODE] * (TEAM_DEPTH - len(message.path))),
                prompt=(Segment(FIRST_SHARED_ID + len(self._traces), len(message.token_ids)),),
                num_output_tokens=self._most_outputs(message.output_cap, len(message.token_ids)),
                request_class=message.request_class,
            )
            trace = RequestTrace(arrival, at_us, at_us)
            self._traces[arrival.id] = self._live[message.request_id, choice] = trace
            self._books.expect(arrival.id, arrival.num_output_tokens)

    def cap_raised(self, request_id: str, output_cap: int) -> None:
        """One that is no higher than before changes nothing."""
        for trace in self._of(request_id):
            arrival = trace.arrival
            most = self._most_outputs(output_cap, arrival.num_prompt_tokens)
            if most > arrival.num_output_tokens:
                trace.arrival = structs.replace(arrival, num_output_tokens=most)
                self._books.expect(arrival.id, most)

    def aborted(self, request_id: str, now_us: int) -> None:
        """The finals come with the next step only."""
        for trace in self._of(request_id):
            trace.ended_us = self._at(now_us)
            self._books.forget(trace.arrival.id)

    def planned(self, plan: StepPlan) -> None:
        self._digest.update(self._encoder.encode(plan))
        self._in_flight.append(self._books.enter(plan))

    def computed(self, elapsed_us: int) -> None:
        """The oldest step in flight took so long; it is taken in by the call that goes on."""
        self._elapsed_us = elapsed_us

    def stepped(self, outputs: Iterable[Output], now_us: int) -> None:
        at_us = self._at(now_us)
        if self._elapsed_us is not None:
            entry = self._in_flight.popleft()
            self._steps.append(StepTrace(at_us - self._elapsed_us, at_us, entry.charges, entry.backlog))
            self._elapsed_us = None
        for output in outputs:
            self._note(output, at_us)

    def finished(self) -> Run:
        arrivals = tuple(trace.arrival for trace in self._traces.values())
        workload = Workload(
            name=self._name,
            about=f"{self._header.model}, as recorded",
            seed=0,
            until_us=self._now_us,
            arrivals=arrivals,
            max_sequences=self._header.max_sequences,
        )
        return Run(
            workload=structs.replace(workload, watched=workload.teams()),
            policy=self._header.policy,
            cost=self._header.cost,
            requests=self._traces,
            steps=self._steps,
            ended_us=self._now_us,
            plans_digest=self._digest.hexdigest(),
        )

    def _note(self, output: Output, at_us: int) -> None:
        trace = self._live[output.request_id, output.choice]
        trace.token_us.extend([at_us] * len(output.token_ids))
        trace.num_cached_tokens = output.num_cached_tokens
        if output.finish is not None:
            assert output.timings is not None, "a finish without timings"
            del self._live[output.request_id, output.choice]
            self._books.forget(trace.arrival.id)
            trace.finish = output.finish
            trace.ended_us = at_us if trace.ended_us is None else trace.ended_us
            trace.held_us = output.timings.preempted_us + output.timings.parked_us
            trace.arrival = structs.replace(trace.arrival, num_output_tokens=output.num_delivered_tokens)

    def _of(self, request_id: str) -> list[RequestTrace]:
        """Its choices that have not ended."""
        return [trace for (of, _), trace in self._live.items() if of == request_id and trace.ended_us is None]

    def _at(self, now_us: int) -> int:
        if self._began_us is None:
            self._began_us = now_us
        self._now_us = now_us - self._began_us
        return self._now_us

    def _most_outputs(self, output_cap: int, num_prompt_tokens: int) -> int:
        return min(output_cap, self._most_tokens - num_prompt_tokens)

    def _arrival_of(self, new: NewRow) -> int:
        return self._live[self._submissions.whose(new)].arrival.id
