"""The order inside the window, where it is free: new first, those with a row before those without, then how long a
request has waited for its size, the longest prefix already computed, age."""

from __future__ import annotations

from engine.sched.fair.tree import NOT_NEW, Entry

Rank = tuple[int, int, bool, int, int, int]


def rank(entry: Entry, now_us: int, work_us: int, num_cached_tokens: int) -> Rank:
    """Smaller goes first.

    Who is new in an organization or a team goes before who is new among its own team's keys only, else a team could be
    new all the time by using many keys. Among the new of one level goes first whose age is the largest, less the work
    that its node has brought together with it: so nobody's burst stands before another one's single request.

    Slack is coarse, in doublings of own work: between two that have waited about as long for their size the prefix
    decides. A batch request has no deadline, and so always the slack of one that has just come.

    Args:
        work_us: what it has left to do until its next token.
        num_cached_tokens: leading tokens that it need not compute.
    """
    request = entry.request
    if entry.is_new:
        return entry.new_level, entry.due_us, False, 0, 0, request.arrival
    waited_us = now_us - request.arrival_us if request.request_class != "batch" else 0
    urgency = (waited_us // max(1, work_us)).bit_length()
    return NOT_NEW, 0, request.row is None, -urgency, -num_cached_tokens, request.arrival
