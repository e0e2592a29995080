"""Where a request stands, put together when somebody asks: what it waits for is its policy's to say, the rest its own.

Changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from msgspec import structs

from engine.kv.kv_cache import KVCache
from engine.request import Phase, Request, RequestState
from engine.sched.line import team_of
from engine.sched.policy import Policy
from engine.standing import RequestPhase, Resource, Standing

_PHASES: dict[Phase, RequestPhase] = {
    Phase.QUEUE: "queue",
    Phase.PREFILL: "prefill",
    Phase.DECODE: "decode",
    Phase.PREEMPTED: "preempted",
    Phase.PARKED: "parked",
}


class Standings:
    """Looks into one engine's books.

    Args:
        live: the choices that have not ended, by request_id; kept up to date by their owner.
        max_sequences: rows of the runner.
    """

    def __init__(
        self, live: Mapping[str, Sequence[Request]], policy: Policy, kv: KVCache, *, max_sequences: int
    ) -> None:
        self._live = live
        self._policy = policy
        self._kv = kv
        self._max_sequences = max_sequences

    def of(self, request_ids: Iterable[str], now_us: int) -> Standing:
        """Of all choices of these requests, the one that is furthest behind; phase ``unknown`` if there is none.

        A choice that waits for choice 0's prompt is passed over: it stands where choice 0 does.
        """
        choices = [request for request_id in request_ids for request in self._live.get(request_id, ())]
        known = [request for request in choices if request.state is not RequestState.HELD]
        if not known:
            return Standing()
        request = min(known, key=_progress)
        is_at_cap = request.state is RequestState.AT_CAP
        standing = Standing() if is_at_cap else self._policy.standing(request, now_us)
        passed_us = request.phase_us.copy()
        passed_us[request.phase] += now_us - request.phase_since_us
        return structs.replace(
            standing,
            team_id=team_of(request),
            request_class=request.request_class,
            phase="at_cap" if is_at_cap else _PHASES[request.phase],
            resource=self._narrowed(standing.resource),
            queue_us=passed_us[Phase.QUEUE],
            prefill_us=passed_us[Phase.PREFILL],
            decode_us=passed_us[Phase.DECODE],
            preempted_us=passed_us[Phase.PREEMPTED],
            parked_us=passed_us[Phase.PARKED],
        )

    def _narrowed(self, resource: Resource) -> Resource:
        """A policy that knows of no rows says ``slot`` of all that wait; while one is free it is something else."""
        if resource != "slot":
            return resource
        everybody = [request for choices in self._live.values() for request in choices]
        if sum(request.row is not None for request in everybody) >= self._max_sequences:
            return "slot"
        num_tokens = self._kv.num_available * self._kv.block_tokens
        waiting = (request for request in everybody if request.state is RequestState.WAITING)
        return "blocks" if any(len(request.token_ids) > num_tokens for request in waiting) else "step"


def _progress(request: Request) -> tuple[int, int, int]:
    """Of two that are equally far the later one is behind."""
    return request.num_output_tokens, request.high_water, -request.arrival
