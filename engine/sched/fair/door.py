"""Who of those without a slot may come in in this step: as many as there are slots free, in the order of the deal, and
beyond these who can claim a slot that is held.

Knows nothing of time: whether who may come in gets any tokens is for the window to say.
"""

from __future__ import annotations

from itertools import islice

from engine.sched.fair.shop import Shop
from engine.sched.fair.tree import KEY_LEVELS, TEAM_LEVEL, Entry, is_ahead


class Door:
    """The door of one step.

    Args:
        number: of the step.
        lag_us: Θ.
        lead_us: Λ. Nobody is new any more whose node was served further ahead.
    """

    def __init__(self, shop: Shop, number: int, lag_us: int, lead_us: int) -> None:
        self._shop = shop
        self._number = number
        self._lag_us = lag_us
        self._lead_us = lead_us
        self._paused: list[Entry] = []
        self._later: list[Entry] = []  # dealt for a slot that was to be another one's
        self._num_refused = 0
        self._takes_newcomers = True  # False once the blocks for one were not to be had

    def begin(self, entry: Entry) -> bool:
        """Set the entry up for this step; False if it wants nothing."""
        request = entry.request
        if entry.is_new and self._is_ahead(entry):
            self._shop.roster.age(entry)
        entry.step, entry.granted, entry.charged_us = self._number, 0, 0
        entry.is_pooled = False
        if request.table is None:
            entry.start = self._shop.num_cached_tokens(request)
            entry.left = request.num_known - entry.start
        else:
            entry.start, entry.left = request.num_scheduled, request.num_wanted
        entry.is_decode = entry.left == 1 and entry.start >= request.num_prompt_tokens
        return entry.left > 0

    def paused(self, entry: Entry) -> None:
        """The entry has a slot and waits at its cap: whoever has a claim takes that slot first."""
        if not entry.request.num_in_flight:
            self._paused.append(entry)

    def first_seekers(self) -> list[Entry]:
        """Set up. However many are new and have no claim, those who are next in the deal are asked too."""
        if not self._shop.tree.root.num_seekers:
            return []
        num_free = self._shop.max_sequences - len(self._shop.roster.residents)
        dealt = self._deal()
        known = set(dealt)
        new = (entry for entry in self._shop.roster.new if entry.is_seeking and entry not in known)
        with_claims = self._with_claims(list(islice(new, self._shop.parameters.look)))
        with_claims += self._with_claims(dealt[num_free:])
        known = {*dealt[:num_free], *with_claims}
        with_claims += self._with_claims([entry for entry in self._in_turn() if entry not in known])
        self._later = [entry for entry in dealt[num_free:] if entry not in with_claims]
        return dealt[:num_free] + with_claims

    def more_seekers(self) -> list[Entry]:
        """The next in the deal, set up; whether there is a slot for them is asked when it is their turn."""
        shop = self._shop
        if not shop.tree.root.num_seekers:
            return []
        if len(shop.roster.residents) < shop.max_sequences:  # whoever these were for did not come in
            if self._later:
                later, self._later = self._later, []
                return later
            if not self._takes_newcomers:
                return [entry for entry in shop.roster.parked if entry.step != self._number and self._wakes(entry)]
        elif self._num_refused >= shop.parameters.most_refused_claims:
            return []
        return self._deal()

    def may_seat(self, entry: Entry) -> bool:
        """There is a slot for the request, or somebody who yields one; and blocks have not run out before it."""
        shop = self._shop
        if entry.request.table is None and not self._takes_newcomers and entry.request is not shop.senior:
            return False
        if len(shop.roster.residents) < shop.max_sequences or self.yielder(entry) is not None:
            return True
        self._num_refused += 1
        return False

    def refused(self, entry: Entry) -> None:
        """No slot though there was one to be had: the blocks are short. Nobody passes this request until it is in."""
        self._num_refused += 1
        if entry.request.table is None and self._takes_newcomers:
            self._takes_newcomers = False
            self._shop.senior = entry.request

    def yielder(self, claimant: Entry) -> Entry | None:
        """Who is to be parked for the claimant."""
        for entry in self._paused:
            if entry.is_resident:
                return entry
        return self._shop.yielders(claimant, self._shop.max_sequences, self._lag_us, self._number)

    def _deal(self) -> list[Entry]:
        """The next seekers, but for those that this step has seen already."""
        look = self._shop.parameters.look
        dealt = self._shop.claims.deal(self._shop.tree.root, look, look)
        return [entry for entry in dealt if entry.step != self._number and self.begin(entry)]

    def _in_turn(self) -> list[Entry]:
        """Some who wait, others in every step: nobody's claim goes unasked for ever behind those that are refused."""
        waiting = self._shop.tree.waiting
        asked: list[Entry] = []
        for _ in range(min(self._shop.parameters.asked_in_turn, len(waiting))):
            leaf = next(iter(waiting))
            waiting.move_to_end(leaf)
            asked.append(leaf.seekers[0][2])
        return asked

    def _wakes(self, entry: Entry) -> bool:
        return entry.is_seeking and self.begin(entry)

    def _with_claims(self, seekers: list[Entry]) -> list[Entry]:
        found: list[Entry] = []
        self._num_refused = 0
        for entry in seekers:
            if self._num_refused >= self._shop.parameters.most_refused_claims:
                break
            if self.yielder(entry) is None:
                self._num_refused += 1
            elif entry.step == self._number or self.begin(entry):
                found.append(entry)
        return found

    def _is_ahead(self, entry: Entry) -> bool:
        first = 0 if entry.new_level == TEAM_LEVEL else entry.new_level
        return any(is_ahead(node, self._lead_us) for node in entry.leaf.path[first:KEY_LEVELS])
