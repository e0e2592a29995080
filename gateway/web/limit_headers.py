"""What a caller is told of its rates: the ``x-ratelimit-`` headers of the OpenAI API, with true values.

Of several limits of a kind (requests, tokens) the one that has least left is told of. A reset is when the bucket would
be full again if nothing came.
"""

from __future__ import annotations

from gateway.domain.limits.meters import Bucket
from gateway.services.grants import Grant

Headers = list[tuple[bytes, bytes]]
DEGRADED_HEADER = ("x-evenhand-limits", "degraded")
"""Of what was decided by one process's share of the limits, since Redis did not answer."""


_REQUESTS, _TOKENS = (
    tuple(f"x-ratelimit-{what}-{name}".encode() for what in ("limit", "remaining", "reset"))
    for name in ("requests", "tokens")
)


def limit_headers(grant: Grant) -> Headers:
    """Of an admitted request."""
    headers: Headers = []
    if grant.remaining:
        for names, indices in ((_REQUESTS, grant.plan.request_rates), (_TOKENS, grant.plan.token_rates)):
            if not indices:
                continue
            index = indices[0] if len(indices) == 1 else min(indices, key=grant.remaining.__getitem__)
            bucket, remaining = grant.plan.uses[index].meter, grant.remaining[index]
            assert isinstance(bucket, Bucket)
            limit, left, reset = names
            headers += (
                (limit, b"%d" % bucket.capacity),
                (left, b"%d" % max(remaining, 0)),
                (reset, _reset(bucket, remaining)),
            )
    if grant.is_clamped:
        headers.append((b"x-evenhand-output-cap", b"%d" % grant.granted))
        headers.append((b"x-evenhand-output-cap-reason", b"quota"))
    if grant.is_by_share:
        headers.append((DEGRADED_HEADER[0].encode(), DEGRADED_HEADER[1].encode()))
    if grant.request_class != grant.info.request_class:
        headers.append((b"x-evenhand-class", grant.request_class.encode()))
        headers.append((b"x-evenhand-class-reason", b"soft-quota"))
    return headers


def _reset(bucket: Bucket, remaining: int) -> bytes:
    """As the OpenAI API writes times: ``6m0s``, ``1.5s``, ``20ms``."""
    if not bucket.refill:
        return b"0s" if remaining >= bucket.capacity else b"never"
    wait_ms = -(-(bucket.capacity - remaining) * bucket.period_ms // bucket.refill)
    return duration(max(wait_ms, 0)).encode()


def duration(ms: int) -> str:
    if ms < 1000:
        return f"{ms}ms" if ms else "0s"
    seconds, rest_ms = divmod(ms, 1000)
    minutes, seconds = divmod(seconds, 60)
    hours, minutes = divmod(minutes, 60)
    last = f"{seconds}.{rest_ms:03}".rstrip("0") if rest_ms else str(seconds)
    if hours:
        return f"{hours}h{minutes}m{last}s"
    return f"{minutes}m{last}s" if minutes else f"{last}s"
