"""Whose a step's time is: the requests in it share it by their tokens. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Sequence

from engine.request import Request, RequestState
from engine.sched.plan import Chunk


def share_step_time(requests: Sequence[Request], chunks: Sequence[Chunk], elapsed_us: int) -> int:
    """Add to each request's `engine_us`, in whole microseconds; the time that is nobody's.

    Together they are exactly `elapsed_us`. Nobody's is the share of a request that had ended before, as happens with
    plans made ahead: what it used has been told already.
    """
    finished = RequestState.FINISHED
    total = sum([chunk.num_tokens for chunk in chunks])
    num_tokens = shared_us = unshared_us = 0
    for request, chunk in zip(requests, chunks, strict=True):
        num_tokens += chunk.num_tokens
        until_us = elapsed_us * num_tokens // total
        if request.state is finished:
            unshared_us += until_us - shared_us
        else:
            request.engine_us += until_us - shared_us
        shared_us = until_us
    return unshared_us
