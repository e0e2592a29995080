"""Where a request stands in fair share: what it waits for, who is before it, about how long that takes.

Reads the standing books between two steps and changes nothing. It is asked for by people, so an estimate will do; it
must not hold up the engine.

**Slot.** Ahead are those that would get a slot before it, were slots dealt out one by one from now on (`position.py`).
New requests, which may go first inside the window, and changes still to come are not foreseen. The wait:

- With a row free, or with a claim to one that a sibling holds beyond its share: as many steps as it takes to seat those
  ahead, a quantum of work each.
- Else so many have to end first: those ahead, and one more. Ends come at the rate at which the engine can do requests,
  so the wait is (ahead + 1) x mean work x step time / marginal part of it. The mean is over residents and over those of
  its own team that are ahead, of prompt and output. How long an output gets nobody knows. Where requests come and go,
  what residents have written so far is on average half of a whole output if all are alike, and as much as one if few
  are very long (the long ones stay): so one counts as one and a half times that mean, at most the request's cap. Before
  anybody has written anything nothing is said.

**Blocks.** While a request waits for blocks nobody is let in before it, and nothing is said of the wait.

**Step.** A resident that got nothing in the last step, though it wanted something. Ahead are those that got something.
The wait: one step, after what new residents have still to get before they are new no more, or, where that is longer and
it is further ahead of its siblings than the window, after the time in which they catch up at their weights.
"""

from __future__ import annotations

from collections.abc import Iterable

from engine.request import Request
from engine.sched.fair.position import QueuePosition, first_seekers, position
from engine.sched.fair.shop import Shop
from engine.sched.fair.tree import KEY_LEVELS, SCALE, Entry
from engine.sched.line import in_line, names_of_team
from engine.standing import MOST_NAMED, Resource, Standing


def standing_of(shop: Shop, entry: Entry, now_us: int, last_step: int) -> Standing:
    """
    Args:
        last_step: number of the last step that was planned; 0 if that plan was dropped.
    """
    if entry.is_seeking:
        return _seeking(shop, entry, now_us)
    if not entry.is_resident:
        return Standing(resource="slot")  # its cap was raised just now; it gets in line when the next step is planned
    if entry.step == last_step and entry.left > 0 and not entry.granted:
        return _left_out(shop, entry, now_us, last_step)
    return Standing(expected_wait_us=0)


# --- waits for a slot, or for blocks ----------------------------------------------------------------------------------


def _seeking(shop: Shop, entry: Entry, now_us: int) -> Standing:
    request = entry.request
    place = position(entry)
    team = entry.leaf.path[1]
    team_ahead = first_seekers(team, min(place.num_ahead_in_team, MOST_NAMED))
    resource = _resource(shop, request)
    return Standing(
        resource=resource,
        ahead=place.by_class,
        ahead_of_team=names_of_team(request, team_ahead),
        expected_wait_us=None if resource == "blocks" else _seat_wait_us(shop, place, team_ahead, now_us),
    )


def _resource(shop: Shop, request: Request) -> Resource:
    has_free_row = len(shop.roster.residents) < shop.max_sequences
    if shop.senior is not None and request.table is None and (has_free_row or request is shop.senior):
        return "blocks"
    return "step" if has_free_row else "slot"


def _seat_wait_us(shop: Shop, place: QueuePosition, team_ahead: Iterable[Request], now_us: int) -> int | None:
    target_us = shop.promises.target_us(now_us)
    num_free = shop.max_sequences - len(shop.roster.residents)
    if place.num_ahead < num_free or _has_claim(shop, place):
        return (1 + place.num_ahead // shop.parameters.quanta_per_step) * target_us
    num_output = _mean_output(shop)
    if num_output is None:
        return None
    requests = [*(resident.request for resident in shop.roster.residents), *team_ahead]
    total_us = sum(_work_us(shop, request, num_output) for request in requests)
    marginal_us = _step_marginal_us(shop, target_us)
    num_ends = place.num_ahead - num_free + 1
    return num_ends * total_us * (shop.cost.fixed_us + marginal_us) // (marginal_us * len(requests))


def _has_claim(shop: Shop, place: QueuePosition) -> bool:
    """There is one when those ahead have what is theirs (`slots.py`): with the slot that is to be its own, some node
    on its path is within its share and a sibling above, or one holds as much by weight without one of its slots."""
    for node, num in place.places:
        parent = node.parent
        assert parent is not None, "the root stands on no path"
        if len(node.path) > KEY_LEVELS:
            continue
        num_slots = parent.num_rows if parent.path else shop.max_sequences
        num_held = node.num_rows + num
        is_within = num_held * parent.weight_present <= num_slots * node.weight
        for sibling in parent.holders:
            is_above = sibling.num_rows * parent.weight_present > num_slots * sibling.weight
            holds_more = (sibling.num_rows - 1) * node.weight >= num_held * sibling.weight
            if sibling is not node and ((is_within and is_above) or holds_more):
                return True
    return False


def _mean_output(shop: Shop) -> int | None:
    """One and a half times what residents have written so far, on average over those that write; None if none does."""
    written = [entry.request.num_output_tokens for entry in shop.roster.residents]
    num_writing = sum(num > 0 for num in written)
    return 3 * sum(written) // (2 * num_writing) if num_writing else None


def _work_us(shop: Shop, request: Request, num_output: int) -> int:
    end = request.num_prompt_tokens + min(request.output_cap, max(num_output, request.num_output_tokens))
    return shop.cost.marginal_us(request.num_cached_tokens, end, request.num_prompt_tokens)


def _step_marginal_us(shop: Shop, target_us: int) -> int:
    """Of a step like those that the residents need now; at least 1."""
    limit_us = max(1, target_us - shop.cost.fixed_us)
    total_us = 0
    for entry in shop.roster.residents:
        request = entry.request
        start = request.num_scheduled
        total_us += shop.cost.marginal_us(start, start + request.num_wanted, request.num_prompt_tokens)
        if total_us >= limit_us:
            return limit_us
    return max(1, total_us)


# --- was left out of the last step ------------------------------------------------------------------------------------


def _left_out(shop: Shop, entry: Entry, now_us: int, last_step: int) -> Standing:
    served = [each.request for each in shop.roster.residents if each.step == last_step and each.granted]
    standing = in_line(entry.request, served, "step")
    target_us = shop.promises.target_us(now_us)
    marginal_us = _step_marginal_us(shop, target_us)
    engine_us = max(_catch_up_us(shop, entry, target_us), _newcomers_us(shop, entry, target_us))
    return Standing(
        resource=standing.resource,
        ahead=standing.ahead,
        ahead_of_team=standing.ahead_of_team,
        expected_wait_us=target_us + engine_us * (shop.cost.fixed_us + marginal_us) // marginal_us,
    )


def _catch_up_us(shop: Shop, entry: Entry, target_us: int) -> int:
    """Engine time until its siblings' clock is within the window, at the node of its path where that takes longest."""
    parameters = shop.parameters
    width_us = (parameters.window_steps + (parameters.lag_steps if entry.is_decode else 0)) * target_us
    longest_us = 0
    for node in entry.leaf.path:
        parent = node.parent
        assert parent is not None, "the root stands on no path"
        ahead_us = (node.service - parent.clock * node.weight) // SCALE - width_us
        longest_us = max(longest_us, ahead_us * (parent.weight_present - node.weight) // node.weight)
    return longest_us


def _newcomers_us(shop: Shop, entry: Entry, target_us: int) -> int:
    """Engine time that new residents may get before all others."""
    window_us = shop.parameters.window_steps * target_us
    total_us = 0
    for each in shop.roster.new:
        if each.is_resident and each is not entry:
            num_prompt_tokens = each.request.num_prompt_tokens
            left_us = shop.cost.marginal_us(each.request.num_scheduled, num_prompt_tokens, num_prompt_tokens)
            total_us += max(0, min(left_us, window_us - each.served_us))
    return total_us
