"""Fair share as a policy: one weight per node decides who gets the next tokens and the next slot.

Keeps the standing books between steps; `round.py` plans a step. The algorithm is told in `../README.md`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from engine.request import Request, RequestState
from engine.sched.cost import CostModel
from engine.sched.fair.claims import Claims, HeapClaims
from engine.sched.fair.parameters import FairParameters
from engine.sched.fair.promises import Credit, Drift, Promises
from engine.sched.fair.roster import Roster
from engine.sched.fair.round import Round
from engine.sched.fair.shop import Shop
from engine.sched.fair.slots import Yielders, find_yielder
from engine.sched.fair.standing import standing_of
from engine.sched.fair.teams import TeamBooks
from engine.sched.fair.tree import SCALE, Entry, Node, Tree
from engine.sched.fair.virtual_time import advance
from engine.sched.fair.window import HeapWindow, Window
from engine.sched.policy import Offers
from engine.standing import Standing, TeamShare


def _no_prefix(request: Request) -> int:  # noqa: ARG001 - the port's signature
    return 0


class FairShare:
    """A `Policy`.

    Args:
        max_sequences: rows of the runner.
        num_cached_tokens: leading tokens of a waiting request that need not be computed; a guess is good enough.
        claims, make_window, yielders: replaced by slow and obvious ones in tests.
    """

    def __init__(
        self,
        cost: CostModel,
        max_sequences: int,
        *,
        parameters: FairParameters | None = None,
        num_cached_tokens: Callable[[Request], int] = _no_prefix,
        claims: Claims | None = None,
        make_window: Callable[[int, int], Window] = HeapWindow,
        yielders: Yielders = find_yielder,
    ) -> None:
        parameters = parameters or FairParameters()
        claims = claims or HeapClaims()
        self.tree = Tree(parameters.class_weights, parameters.lag_steps * min(us for _, us in parameters.promises_us))
        self._shop = Shop(
            parameters=parameters,
            cost=cost,
            max_sequences=max_sequences,
            tree=self.tree,
            claims=claims,
            roster=Roster(self.tree, claims),
            promises=Promises(parameters),
            drift=Drift(parameters),
            credit=Credit(parameters, cost.fixed_us),
            make_window=make_window,
            yielders=yielders,
            num_cached_tokens=num_cached_tokens,
        )
        self._teams = TeamBooks(self._shop)
        self._round: Round | None = None
        self._num_rounds = 0
        self._backlogged: dict[Node, None] = {}

    def admit(self, request: Request) -> None:
        shop = self._shop
        shop.promises.enter(request.request_class)
        start = shop.num_cached_tokens(request)
        work_us = shop.cost.marginal_us(start, request.num_known, request.num_prompt_tokens)
        target_us, parameters = shop.target_us(request.arrival_us), shop.parameters
        shop.roster.admit(request, work_us, parameters.lag_steps * target_us, parameters.window_steps * target_us)

    def forget(self, request: Request) -> None:
        entry = self._shop.roster.entries[request]
        if self._round is not None and entry.is_pooled:
            self._round.lost_row(entry)
        self._shop.roster.forget(request)
        self._shop.promises.leave(request.request_class)
        if self._shop.senior is request:
            self._shop.senior = None

    def preempted(self, request: Request) -> None:
        entry = self._shop.roster.preempted(request)
        if self._round is not None:
            self._round.lost_row(entry)

    def parked(self, request: Request) -> None:
        entry = self._shop.roster.park(request)
        if self._round is not None:
            self._round.lost_row(entry)

    def offers(self, budget: int, now_us: int) -> Offers:
        self._num_rounds += 1
        self._round = Round(self._shop, self._num_rounds, budget, now_us)
        yield from self._round.offers()

    def revoke(self, request: Request, num_tokens: int) -> None:
        assert self._round is not None, "revoked before anything was offered"
        self._round.revoke(self._shop.roster.entries[request], num_tokens)

    def sealed(self) -> None:
        done, self._round = self._round, None
        assert done is not None, "sealed before anything was offered"
        self._teams.sealed(done)
        for entry in done.granted:
            self._shop.promises.ran(entry.request.request_class, done.now_us)
        for entry in done.demand:
            if entry.is_decode and entry.is_resident:
                entry.num_sat_out = 0 if entry.granted else entry.num_sat_out + 1
        self._shop.roster.expire_new(done.granted, done.window_us)
        if done.is_short:
            self._shop.credit.spend()
        cost_us = self._shop.cost.fixed_us + done.spent_us
        self._shop.credit.earn(cost_us)
        self._shop.drift.sealed(cost_us, done.target_us)
        senior = self._shop.senior
        if senior is not None and senior.state is not RequestState.WAITING:
            self._shop.senior = None
        self._advance_clocks(done)

    def yields_row(self, claimant: Request) -> Iterator[Request]:
        assert self._round is not None, "asked outside a step"
        holder = self._round.yielder(self._shop.roster.entries[claimant])
        if holder is not None:
            yield holder.request

    def victims(self, claimant: Request) -> Iterator[Request]:
        """Those without a slot first, then who came later than the claimant; each the latest first."""
        if claimant.row is None:
            return
        roster = self._shop.roster
        parked = sorted(roster.parked, key=_latest)
        later = sorted((e for e in roster.residents if e.request.arrival > claimant.arrival), key=_latest)
        for entry in (*parked, *later):
            if entry.request is not claimant and entry.request.table is not None and not entry.request.num_in_flight:
                yield entry.request

    def measured(self, elapsed_us: int) -> None:
        self._shop.drift.measured(elapsed_us)

    def standing(self, request: Request, now_us: int) -> Standing:
        last_step = self._num_rounds if self._round is None else 0
        return standing_of(self._shop, self._shop.roster.entries[request], now_us, last_step)

    def teams(self) -> tuple[TeamShare, ...]:
        return self._teams.shares()

    def set_weight(self, node_id: str, weight: int) -> None:
        self.tree.set_weight(node_id, weight)
        for node in self.tree.named(node_id):
            self._shop.claims.changed(node)

    def charge_external(self, node_id: str, cost_us: int) -> None:
        """Counts for the node and all above it; nothing is charged to a node that no request has brought."""
        for node in self.tree.named(node_id):
            for each in node.path:
                each.service += max(0, cost_us) * SCALE

    def _advance_clocks(self, done: Round) -> None:
        for node in self._backlogged:
            node.is_backlogged = node.is_behind = False
        left = [entry for entry in done.demand if entry.is_resident and entry.left > 0] + done.kept_waiting()
        self._backlogged = _with_ancestors(left)
        for node in self._backlogged:
            node.is_backlogged = True
        for node in _with_ancestors([entry for entry in left if not entry.is_new and not entry.is_decode]):
            node.is_behind = True
        backlogged = _by_parent(self._backlogged)
        for parent, children in backlogged.items():
            advance(parent, min([child.v for child in children]))
        for entry in done.granted:
            node = entry.leaf
            while node.moved_at != done.number and (family := node.parent) is not None:
                node.moved_at = done.number
                if family not in backlogged:
                    advance(family, node.service // node.weight)
                if family.sleepers:
                    self.tree.drop_sleepers(family)
                node = family
        for family in backlogged:
            if family.sleepers:
                self.tree.drop_sleepers(family)


def _with_ancestors(entries: list[Entry]) -> dict[Node, None]:
    nodes: dict[Node, None] = {}
    for entry in entries:
        for node in reversed(entry.leaf.path):
            if node in nodes:
                break
            nodes[node] = None
    return nodes


def _by_parent(nodes: dict[Node, None]) -> dict[Node, list[Node]]:
    families: dict[Node, list[Node]] = {}
    for node in nodes:
        assert node.parent is not None, "the root stands on no path"
        families.setdefault(node.parent, []).append(node)
    return families


def _latest(entry: Entry) -> int:
    return -entry.request.arrival
