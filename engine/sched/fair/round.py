"""The planning of one step: who is served, in which order, how much. Told what was granted, it keeps the step's books.

The decodes inside the wide window come first; then one walk hands out prompts and what decodes are left, a quantum at
a time. Where nothing is contended, which is most of the time, every decode gets its token and nothing is compared.
"""

from __future__ import annotations

from engine.request import RequestState
from engine.sched.fair.door import Door
from engine.sched.fair.order import Rank, rank
from engine.sched.fair.shop import Shop
from engine.sched.fair.slots import is_borrower
from engine.sched.fair.tree import TEAM_LEVEL, Entry, Node
from engine.sched.fair.virtual_time import charge
from engine.sched.policy import Offers


class Round:
    """One step in the making.

    Args:
        number: of this step, never used before.
        budget: tokens that the step may have; the scheduler sees to that.

    Attributes:
        granted: who got something, the first first.
        demand: residents that wanted something at the start.
        is_short: rule R2.
        target_us: T.
        window_us, lag_us: Λ and Θ.
    """

    def __init__(self, shop: Shop, number: int, budget: int, now_us: int) -> None:
        self.granted: dict[Entry, None] = {}
        self.demand: list[Entry] = []
        self.number = number
        self.now_us = now_us
        self.is_short = False
        self.spent_us = 0
        self._budget = budget
        self._shop = shop
        self._roster = shop.roster
        self._cost = shop.cost
        self.target_us = shop.target_us(now_us)
        self._quantum_us = max(1, self.target_us // shop.parameters.quanta_per_step)
        # Where the machine is too slow for the promise, at least half of a step is work.
        self._limit_us = max(self.target_us - shop.cost.fixed_us, shop.cost.fixed_us)
        self.window_us = shop.parameters.window_steps * self.target_us
        self.lag_us = shop.parameters.lag_steps * self.target_us
        self._window = shop.make_window(number, self.lag_us)
        self._pool: list[Entry] = []  # in the order of the window
        self._hurried: dict[Entry, None] = {}  # newcomers whose prompts this step can finish
        self._sat_out: dict[Entry, None] = {}
        self._left_out: list[Entry] = []  # of the walk, since no more fits into the step
        self._door = Door(shop, number, self.lag_us, self.window_us)

    # --- the order ----------------------------------------------------------------------------------------------------

    def offers(self) -> Offers:
        self._roster.wake_resumed()
        self._rescale()
        self._shop.claims.start(self.number)
        decodes, prompts = self._residents()
        seekers = self._door.first_seekers()
        costs_us = [self._span_us(entry, 1) for entry in decodes]
        if not prompts and not self._shop.tree.root.num_seekers:
            self._stretch(decodes, costs_us)
        if not prompts and not seekers and len(decodes) <= self._budget and sum(costs_us) <= self._limit_us:
            for entry, cost_us in zip(decodes, costs_us, strict=True):
                num_tokens = yield entry.request, 1
                if num_tokens and entry.start >= entry.request.high_water:
                    self._book_decode(entry, cost_us)
                else:
                    self._took(entry, num_tokens)
            return
        for entry in decodes:
            self._window.add(entry)
        self._pool_up(prompts + seekers)
        newcomers_us = self._make_way(decodes)
        yield from self._serve_decodes(decodes, newcomers_us)
        yield from self._walk()
        if self._sat_out:
            yield from self._serve_sat_out()
            yield from self._walk()

    def _serve_sat_out(self) -> Offers:
        """What room newcomers have left is theirs; of a step that was made short only if nobody got anything."""
        for entry in sorted(self._sat_out, key=_sat_out_longest):
            fits = not self.is_short and self.spent_us + self._span_us(entry, 1) <= self._limit_us
            is_within = entry.is_resident and self._window.holds(entry, self.window_us + self.lag_us)
            if is_within and (fits or not self.granted):
                self._window.remove(entry)
                self._took(entry, (yield entry.request, 1))

    def _stretch(self, decodes: list[Entry], costs_us: list[int]) -> None:
        """Where nobody waits and the decodes within their shares do not fit into a step, no order keeps the promise
        to all of them, and taking turns would only pay the fixed part more often. So the step is made as long as it
        takes, up to what no step may exceed."""
        if sum(costs_us) <= self._limit_us:
            return
        num_slots = self._shop.max_sequences
        within = zip(decodes, costs_us, strict=True)
        needed_us = sum([cost_us for entry, cost_us in within if not is_borrower(entry, num_slots, set())])
        most_us = self._shop.drift.in_model_us(self._shop.promises.longest_us) - self._cost.fixed_us
        self._limit_us = max(self._limit_us, min(needed_us, most_us))

    def _rescale(self) -> None:
        rescaled = self._shop.tree.rescaled
        while rescaled:
            self._shop.claims.rescaled(rescaled.popitem()[0])

    def _residents(self) -> tuple[list[Entry], list[Entry]]:
        decodes: list[Entry] = []
        prompts: list[Entry] = []
        for entry in self._roster.residents:
            if self._door.begin(entry):
                self.demand.append(entry)
                (decodes if entry.is_decode else prompts).append(entry)
            elif entry.request.state is RequestState.AT_CAP:
                self._door.paused(entry)
        return decodes, prompts

    def _pool_up(self, entries: list[Entry]) -> None:
        for entry in entries:
            entry.is_pooled = True
            self._window.add(entry)
        self._pool.extend(entries)
        self._pool.sort(key=self._rank)

    def _rank(self, entry: Entry) -> tuple[bool, Rank]:
        return entry not in self._hurried, rank(entry, self.now_us, self._span_us(entry, entry.left), entry.start)

    def _make_way(self, decodes: list[Entry]) -> int:
        """Rule R2: borrowers' decodes sit out while a newcomer's prompt waits, and a step that can complete prompts of
        newcomers is made short. Returns the work of those for whom it is, or 0."""
        new = [entry for entry in self._pool if entry.is_new and self._window.holds(entry, self._width_us(entry))]
        if not new:
            return 0
        level = min([entry.new_level for entry in new])
        total_us = 0
        for entry in new:  # in the order of the window
            total_us += (work_us := self._span_us(entry, entry.left))
            if entry.new_level != level or total_us > self._limit_us:
                total_us -= work_us
                break
            self._hurried[entry] = None
        self._pool.sort(key=self._rank)
        self.is_short = self._is_made_short(total_us, level)
        if self.is_short or level == TEAM_LEVEL:
            self._let_borrowers_sit_out(decodes, {node for entry in new for node in entry.leaf.path})
        return total_us if self.is_short else 0

    def _is_made_short(self, newcomers_us: int, level: int) -> bool:
        fixed_us = self._cost.fixed_us
        limit_us = (fixed_us + newcomers_us) * 5 // 4 - fixed_us
        if not newcomers_us or limit_us >= self._limit_us:
            return False
        if not self._shop.credit.allows(is_for_all=level == TEAM_LEVEL):
            return False
        self._limit_us = max(limit_us, newcomers_us)
        return True

    def _let_borrowers_sit_out(self, decodes: list[Entry], spared: set[Node]) -> None:
        most = self._shop.parameters.most_sat_out
        for entry in decodes:
            if entry.num_sat_out < most and is_borrower(entry, self._shop.max_sequences, spared):
                self._sat_out[entry] = None  # and stays in the window: nobody leaves it behind meanwhile

    def _serve_decodes(self, decodes: list[Entry], newcomers_us: int) -> Offers:
        parameters = self._shop.parameters
        width_us = self.window_us + self.lag_us
        limit_us = self._limit_us
        if newcomers_us:
            limit_us -= newcomers_us
        elif self._pool:
            limit_us = limit_us * (100 - parameters.reserve_percent) // 100
        eligible: list[Entry] = []
        later: list[Entry] = []
        for entry in decodes:
            if entry not in self._sat_out:
                (eligible if self._window.holds(entry, width_us) else later).append(entry)
        # Where not all fit, those go first who hold no more than their share of the slots.
        num_slots = self._shop.max_sequences
        eligible.sort(key=lambda entry: (is_borrower(entry, num_slots, set()), -entry.num_sat_out))
        for entry in eligible:
            if not entry.is_resident:  # parked for somebody in this very step
                self._window.remove(entry)
                continue
            most_us = self._limit_us if entry.num_sat_out >= parameters.most_sat_out else limit_us
            fits = not self.granted or self.spent_us + self._span_us(entry, 1) <= most_us
            if not fits or not self._window.holds(entry, width_us):
                later.append(entry)
                continue
            self._window.remove(entry)
            self._took(entry, (yield entry.request, 1))
        if newcomers_us:  # they are done in this step, whatever was due before them
            self._limit_us = max(self._limit_us, self.spent_us + newcomers_us)
        for entry in later:
            self._window.remove(entry)
        self._pool_up([entry for entry in later if entry.is_resident])

    def _walk(self) -> Offers:
        while self.spent_us < self._limit_us or not self.granted:
            if not self._pool and not self._refill():
                return
            entry = self._first_within()
            if entry is None:  # those who are behind sit out, or want more than is left
                return
            may_run = entry.is_resident or self._door.may_seat(entry)
            size = self._slice(entry) if may_run else 0
            if may_run and not size:  # it stays in the window: nobody gets ahead by filling the hole
                entry.is_pooled = False
                self._pool.remove(entry)
                self._left_out.append(entry)
                continue
            if not may_run:
                self._drop(entry)
                continue
            num_tokens = yield entry.request, size
            if entry.is_pooled and not entry.is_resident and entry.request.row is None:
                self._door.refused(entry)
            self._took(entry, num_tokens)
            if entry.is_pooled and (num_tokens < size or not entry.left):
                self._drop(entry)

    def _first_within(self) -> Entry | None:
        """Of the pool, in its order. The window says the same of all of a key that are new, or are not."""
        without: set[tuple[Node | None, bool]] = set()
        for entry in self._pool:
            kind = entry.leaf.parent, entry.is_new
            if kind not in without:
                if self._window.holds(entry, self._width_us(entry)):
                    return entry
                without.add(kind)
        return None

    def _width_us(self, entry: Entry) -> int:
        """How far ahead of its siblings a request of the walk may be: as far as a decode while it is new."""
        return self.window_us + (self.lag_us if entry.is_new else 0)

    def _refill(self) -> bool:
        """Whom the deal comes to next, if anybody. Not for a hole that was too small for somebody before them: all who
        wait would be looked at for it, in every step."""
        if self._left_out:
            return False
        while seekers := self._door.more_seekers():
            self._pool_up(seekers)
            if self._pool:
                return True
        return False

    def _slice(self, entry: Entry) -> int:
        """A quantum of the entry's work, or what still fits into the step; at least one token if nobody has any."""
        if entry.is_decode:
            fits = self.spent_us + self._span_us(entry, 1) <= self._limit_us
            return 1 if fits or not self.granted else 0
        room_us = self._limit_us - self.spent_us
        size = self._num_within(entry, min(self._quantum_us, room_us))
        if size < self._shop.parameters.least_quantum_tokens:
            size = min(self._num_within(entry, room_us), self._shop.parameters.least_quantum_tokens)
        return size or int(not self.granted)

    def kept_waiting(self) -> list[Entry]:
        """Those for whom there was a row, free or to be claimed, and no time."""
        waiting = (entry for entry in self._pool + self._left_out if not entry.is_resident)
        return [entry for entry in waiting if self._door.may_seat(entry)]

    # --- the books ----------------------------------------------------------------------------------------------------

    def _took(self, entry: Entry, num_tokens: int) -> None:
        request = entry.request
        if not entry.is_resident and request.row is not None:
            self._roster.seat(entry, self.number)
            entry.start, entry.left = request.num_scheduled, request.num_wanted
            self.demand.append(entry)
        if num_tokens:
            self._book(entry, num_tokens)
            self.granted[entry] = None

    def _book(self, entry: Entry, num_tokens: int) -> None:
        """Charge a grant, or give a part of it back if num_tokens is negative."""
        request = entry.request
        end = entry.start + entry.granted
        low, high = (end, end + num_tokens) if num_tokens > 0 else (end + num_tokens, end)
        sign = 1 if num_tokens > 0 else -1
        self.spent_us += sign * self._cost.marginal_us(low, high, request.num_prompt_tokens)
        useful = max(low, min(high, request.high_water))
        cost_us = sign * self._cost.marginal_us(useful, high, request.num_prompt_tokens)
        entry.granted += num_tokens
        entry.left -= num_tokens
        entry.charged_us += cost_us
        entry.served_us += cost_us
        charge(entry.leaf, cost_us)

    def _book_decode(self, entry: Entry, cost_us: int) -> None:
        """The same for one token never computed before: most of all grants."""
        self.spent_us += cost_us
        entry.granted, entry.charged_us = 1, cost_us
        entry.left -= 1
        entry.served_us += cost_us
        charge(entry.leaf, cost_us)
        self.granted[entry] = None

    def yielder(self, claimant: Entry) -> Entry | None:
        """Who is to be parked for the claimant."""
        return self._door.yielder(claimant)

    def revoke(self, entry: Entry, num_tokens: int) -> None:
        self._book(entry, -num_tokens)
        self._window.gave_back(entry)
        self._shop.claims.changed(entry.leaf)
        if not entry.granted:
            self.granted.pop(entry, None)

    def lost_row(self, entry: Entry) -> None:
        """Preempted or parked in this step: it is not served any more in it."""
        self._shop.claims.pass_over(entry)
        if entry.step == self.number and entry.is_pooled:
            self._drop(entry)

    def _drop(self, entry: Entry) -> None:
        entry.is_pooled = False
        self._pool.remove(entry)
        self._window.remove(entry)

    def _span_us(self, entry: Entry, num_tokens: int) -> int:
        start = entry.start + entry.granted
        return self._cost.marginal_us(start, start + num_tokens, entry.request.num_prompt_tokens)

    def _num_within(self, entry: Entry, budget_us: int) -> int:
        start = entry.start + entry.granted
        return self._cost.num_tokens_within(budget_us, start, start + entry.left, entry.request.num_prompt_tokens)


def _sat_out_longest(entry: Entry) -> int:
    return -entry.num_sat_out
