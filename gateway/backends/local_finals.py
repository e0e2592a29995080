"""Final counts that our engines keep for gateways that were lost, as the recovery wants them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec

from engine.client import CollectedFinals
from engine.messages import FinalCounts
from gateway.domain.usage import EngineTimings
from gateway.services.recovery import FinalsPage


class Client(Protocol):
    """What we use of `engine.client.EngineClient`."""

    async def collect_finals(self, acknowledge: Sequence[str] = ..., *, client_id: str = ...) -> CollectedFinals: ...


class LocalFinal(msgspec.Struct, frozen=True):
    """Implements `gateway.services.metering.EngineFinal`."""

    request_id: str
    cached_tokens: int
    completion_tokens: int
    finish_reason: str
    timings: EngineTimings


class LocalFinals:
    """Implements `gateway.services.recovery.FinalsSource` over a pool of engines."""

    def __init__(self, client: Client) -> None:
        self._client = client

    async def collect(self, writer_id: str, acknowledge: Sequence[str] = ()) -> FinalsPage:
        collected = await self._client.collect_finals(acknowledge, client_id=writer_id)
        return FinalsPage([_final(counts) for counts in collected.counts], collected.is_complete)


def _final(counts: FinalCounts) -> LocalFinal:
    timings = counts.timings
    return LocalFinal(
        request_id=counts.request_id,
        cached_tokens=counts.num_cached_tokens,
        completion_tokens=counts.num_output_tokens,
        finish_reason=counts.finish if counts.finish in ("stop", "length") else "",
        timings=EngineTimings(
            queue_us=timings.queue_us,
            prefill_us=timings.prefill_us,
            decode_us=timings.decode_us,
            preempted_us=timings.preempted_us,
            engine_us=timings.engine_us,
            parked_us=timings.parked_us,
        ),
    )
