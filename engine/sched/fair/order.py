"""The order inside the window, where it is free: new first, those with a row before those without, then how long a
request has waited for its size, the longest prefix already computed, age."""

from __future__ import annotations

from engine.sched.fair.tree import Entry


def rank(entry: Entry, now_us: int, work_us: int, num_cached_tokens: int) -> tuple[bool, bool, int, int, int]:
    """Smaller goes first.

    Slack is coarse, in doublings of own work: between two that have waited about as long for their size the prefix
    decides. A batch request has no deadline, and so always the slack of one that has just come.

    Args:
        work_us: what it has left to do until its next token.
        num_cached_tokens: leading tokens that it need not compute.
    """
    request = entry.request
    waited_us = now_us - request.arrival_us if request.request_class != "batch" else 0
    urgency = (waited_us // max(1, work_us)).bit_length()
    return not entry.is_new, request.row is None, -urgency, -num_cached_tokens, request.arrival
