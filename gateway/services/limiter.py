"""What a request may use: asked for once before it runs, told of while it runs, settled once when it has ended.

The meters are kept by a `LimitStore`; here is which of them a request goes by, what a refusal is called, and that every
admission is followed by a settlement or a cancellation, whatever becomes of the store meanwhile. What a store has lost
is `limit_epochs`' work. Knows nothing of HTTP.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Protocol

from gateway.domain.ids import KeyId, OrganizationId, RequestId
from gateway.domain.limits.admission import Ask, Verdict
from gateway.domain.limits.meters import MOST_TOKENS, Bucket, Quota
from gateway.domain.limits.periods import zone_named
from gateway.domain.limits.plan import Metered, MeterPlan, plan_of
from gateway.domain.limits.policy import Limit, Price
from gateway.domain.limits.rules import holdings, most_output
from gateway.domain.principal import Principal, lowest
from gateway.domain.record import RequestInfo
from gateway.domain.usage import TokenUsage
from gateway.errors import ContextLengthExceeded, LimitsUnavailable
from gateway.services.estimates import OutputEstimates
from gateway.services.grants import Grant, LateSettlement
from gateway.services.limit_store import LimitStore
from gateway.services.ports import Clock, Prepared
from gateway.services.refusals import RefusalMemory, gravest, refusal

LEASE_S = 15.0
MOST_PLANS = 20_000
MOST_QUOTAS = 50_000
MOST_UNPOSTED = 10_000
REVIVAL_S = 1.0
"""How long a request waits for a store that has lost its organization: when a process begins that is over at once."""

Refresh = Callable[[Principal], Awaitable[Principal]]
"""The principal as it is now, limits included."""


class LimitEvents(Protocol):
    """Told of what administrators want to see."""

    def refused(self, limit: Limit) -> None: ...

    def shadow_refused(self, limit: Limit) -> None:
        """It would have been, were the limit enforced."""


class NoEvents:
    """Implements `LimitEvents`; tells nobody."""

    def refused(self, limit: Limit) -> None: ...

    def shadow_refused(self, limit: Limit) -> None: ...


class Limiter:
    """The use case.

    Args:
        owner: this process's name.
        lease_s: a reservation is settled by others if nothing is heard of it for so long.
        refresh: asked when a request wants more than it was granted; None keeps to what was known.

    Attributes:
        live: requests that hold something, by organization.
        late: settlements that wait for the store.
        untold: requests that hold something in the store, or did and it has not taken their settlement.
        unposted: settlements that the store has taken and the ledger, as far as is known, has not; the oldest first. Of
            more than `MOST_UNPOSTED`, which only a database that is down for long can bring about, the newest.
        lost: organizations that the store has lost, hard quotas included; `has_lost` is set with the first.
        unsure: those with quotas of which it is not known that the store knows what is committed; nothing waits for
            that. `has_lost` is set with the first of them, too.
        awaited: those of them that somebody did wait for.
        is_used: somebody came whom a limit holds for.
        events: told of refusals.
        quotas: those that requests were last held to, by their meters' keys: the `MOST_QUOTAS` that were used last.
    """

    def __init__(
        self,
        store: LimitStore,
        clock: Clock,
        *,
        owner: str = "",
        lease_s: float = LEASE_S,
        refresh: Refresh | None = None,
    ) -> None:
        self.store = store
        self.lease_ms = int(lease_s * 1000)
        self.live: dict[OrganizationId, dict[RequestId, Grant]] = {}
        self.late: dict[OrganizationId, dict[RequestId, LateSettlement]] = {}
        self.untold: set[RequestId] = set()
        self.unposted: dict[RequestId, LateSettlement] = {}
        self._posted_untold: set[RequestId] = set()
        self.lost: set[OrganizationId] = set()
        self.unsure: set[OrganizationId] = set()
        self.awaited: set[OrganizationId] = set()
        self.has_lost = asyncio.Event()
        self._known_to_store: set[OrganizationId] = set()
        self.quotas: OrderedDict[str, tuple[OrganizationId, Metered]] = OrderedDict()
        self._clock = clock
        self._owner = owner
        self._refresh = refresh or _unchanged
        self.events: LimitEvents = NoEvents()
        self._estimates = OutputEstimates()
        self.is_used = False
        self._plans: OrderedDict[tuple[KeyId, str], tuple[Principal, Sequence[Price], MeterPlan]] = OrderedDict()
        self._refusals = RefusalMemory()
        self._revival = asyncio.Condition()

    def plan(self, principal: Principal, model: str, prices: Sequence[Price]) -> MeterPlan:
        """The meters that hold for requests of this principal now: the same value for as long as they stay so."""
        now_ms = int(self._clock.time() * 1000)
        place = (principal.key_id, model)
        kept = self._plans.get(place)
        if kept is not None:
            of, at_prices, plan = kept
            if of is principal and at_prices == prices and plan.valid_from_ms <= now_ms < plan.valid_until_ms:
                return plan
        plan = _plan(principal, model, prices, now_ms)
        self.is_used |= bool(plan.uses)
        self._plans[place] = (principal, prices, plan)
        self._plans.move_to_end(place)
        if len(self._plans) > MOST_PLANS:
            self._plans.popitem(last=False)
        return plan

    def guard(self, principal: Principal, model: str, prices: Sequence[Price]) -> None:
        """Refuse at once what was refused a moment ago and would be again, whatever its size. Raises as `admit`."""
        if not self._refusals:
            return
        plan = self.plan(principal, model, prices)
        found = self._refusals.find((principal.key_id, model), plan, self._clock.monotonic())
        if found is not None:
            index, remaining, wait_ms, is_by_share = found
            self._refuse(plan, index, remaining, wait_ms, needed=None, is_by_share=is_by_share)

    async def check(self, info: RequestInfo, model: str, prices: Sequence[Price]) -> None:
        """Refuse what has no room for one token, whatever its prompt; consumes nothing. Raises as `admit`."""
        plan = self.plan(info.principal, model, prices)
        if plan.uses:
            ask = self._ask(info, plan, prompt_tokens=0, min_output=1, expected=1, max_output=1)
            self._judge(info, model, plan, ask, await self._known(ask, self.store.check))

    async def admit(self, info: RequestInfo, prepared: Prepared, prices: Sequence[Price], *, num_choices: int) -> Grant:
        """What the request may use; it has to be settled.

        Args:
            num_choices: answers to each prompt.

        Raises:
            ContextLengthExceeded: a prompt is longer than a limit, or all are longer than what can be counted.
            LimitExceeded: one of a rate, quota or number of requests; nothing has been consumed.
            LimitsUnavailable: that cannot be told.
        """
        principal, model = info.principal, prepared.model
        plan = self.plan(principal, model, prices)
        caps = prepared.output_caps
        if plan.max_context is not None or plan.max_output is not None:
            caps = _sized(plan, prepared.prompt_lengths, caps)
        self._tell_sizes(plan, prepared.prompt_lengths, caps)
        prompt_tokens = prepared.num_prompt_tokens
        if plan.strict_rates:
            caps = await self._strict(info, plan, prompt_tokens, caps, num_choices)
        wanted = sum(caps) * num_choices
        now_ms, now_s = int(self._clock.time() * 1000), self._clock.monotonic()
        grant = Grant(info, model, prices, plan, caps, num_choices, wanted, now_ms, now_s)
        if not plan.uses:
            return grant
        min_output, max_output = min(len(caps) * num_choices, wanted), min(wanted, MOST_TOKENS - prompt_tokens)
        if min_output > max_output:
            raise ContextLengthExceeded(window=MOST_TOKENS, num_prompt_tokens=prompt_tokens)
        ask = self._ask(
            info,
            plan,
            prompt_tokens=prompt_tokens,
            min_output=min_output,
            expected=max_output
            if plan.strict_rates
            else self._expected(principal, model, caps, num_choices, max_output),
            max_output=max_output,
        )
        verdict = await self._known(ask, self.store.admit)
        for shadow in verdict.shadow_refused:
            self.events.shadow_refused(plan.metered[shadow].limit)
        self._judge(info, model, plan, ask, verdict)
        grant.ask = ask
        grant.granted = verdict.granted_output
        grant.is_by_share = verdict.is_by_share
        grant.remaining = verdict.remaining
        if plan.soft_quotas and _is_beyond(plan, ask, verdict):
            grant.request_class = lowest(info.request_class, "batch")
        self.live.setdefault(grant.organization_id, {})[info.request_id] = grant
        self.untold.add(info.request_id)
        if plan.quotas and not verdict.is_by_share and grant.organization_id not in self._known_to_store:
            self.unsure.add(grant.organization_id)
            self.has_lost.set()
        return grant

    async def raise_output(self, grant: Grant, wanted: int) -> int:
        """Output tokens over all answers that it may write now, at most `wanted`. Raises `LimitsUnavailable`."""
        if grant.ask is None or wanted <= grant.granted:
            return grant.granted
        if grant.plan.is_exact and grant.organization_id in self.lost:
            raise LimitsUnavailable  # the store would say that there is no more, which it does not know
        principal = await self._refresh(grant.info.principal)
        # Not one to keep: what admissions go by is made of a principal of their own, and so is what was refused by it.
        plan = _plan(principal, grant.model, grant.prices, int(self._clock.time() * 1000))
        changed = [use.meter for use in plan.uses if isinstance(use.meter, Quota)]
        granted = await self.store.raise_output(grant.organization_id, grant.info.request_id, wanted, changed)
        if granted is None:
            raise LimitsUnavailable
        grant.granted = max(grant.granted, granted)
        return grant.granted

    def settles_at_once(self, grant: Grant) -> bool:
        """Its settlement waits for nothing, so nothing can come between."""
        return grant.ask is None or self.store.never_waits

    def can_be_given_away(self, grant: Grant) -> bool:
        """A hard quota holds for it, in a store that others can reach while this process stands still."""
        return grant.plan.is_exact and grant.ask is not None and not grant.is_by_share and not self.store.never_waits

    async def find_out(self, grant: Grant) -> None:
        """Of one that can be given away, if nothing was heard of it for a whole lease: whether it was; then it ends."""
        asked_s, output = self._clock.monotonic(), grant.output
        if asked_s - grant.heard_s < self.lease_ms / 1000:
            return
        try:
            outputs = {grant.info.request_id: output}
            missing = await self.store.report(grant.organization_id, outputs, self.lease_ms)
        except LimitsUnavailable:
            grant.end(is_given_away=True)
            return
        if missing:
            grant.end(is_given_away=True)
        else:
            grant.held(output, asked_s)

    async def settle(self, grant: Grant, usage: TokenUsage) -> None:
        """The request has used this, or nothing at all. Never raises for the store: what it does not take is late."""
        if grant.ask is None:
            return
        organization_id, request_id = grant.organization_id, grant.info.request_id
        live = self.live.get(organization_id, {})
        live.pop(request_id, None)
        if not live:
            self.live.pop(organization_id, None)
        self._learn(grant, usage)
        is_taken = False
        try:
            # What a share holds is nothing that the store has to know first, nor what counts for no quota.
            waits = organization_id in self.lost and bool(grant.plan.quotas) and not grant.is_by_share
            is_taken = not waits and await self._settled(grant, usage)
        finally:
            if is_taken:
                self._note_taken(request_id, grant, usage)
            else:
                self.late.setdefault(organization_id, {})[request_id] = LateSettlement(grant, usage)

    async def settle_late(self, organization_id: OrganizationId) -> None:
        """Try again what the store did not take. Raises `LimitsUnavailable`."""
        late = self.late.get(organization_id, {})
        for request_id, (grant, usage) in list(late.items()):
            await self._settle_in_store(grant, usage)
            late.pop(request_id, None)
            self._note_taken(request_id, grant, usage)
        if not late:
            self.late.pop(organization_id, None)

    def posted(self, request_ids: Iterable[RequestId]) -> None:
        """These requests of this process are in the ledger."""
        for request_id in request_ids:
            self.unposted.pop(request_id, None)
            if request_id in self.untold:
                self._posted_untold.add(request_id)

    async def until_known(self, organization_id: OrganizationId) -> None:
        """Wait until the store knows what is committed of the organization's quotas. Raises `LimitsUnavailable` if that
        takes long."""
        if organization_id in self._known_to_store:
            return
        self.unsure.add(organization_id)
        self.awaited.add(organization_id)
        self.has_lost.set()
        try:
            async with asyncio.timeout(REVIVAL_S), self._revival:
                await self._revival.wait_for(lambda: organization_id in self._known_to_store)
        except TimeoutError:
            raise LimitsUnavailable from None

    async def note_known(self, organization_id: OrganizationId) -> None:
        """The store knows the organization again."""
        async with self._revival:
            self.lost.discard(organization_id)
            self.unsure.discard(organization_id)
            self.awaited.discard(organization_id)
            self._known_to_store.add(organization_id)
            self._revival.notify_all()

    def note_store_lost(self) -> None:
        """The store may not know any of the organizations.

        What it took for hard quotas and is not known to be in the ledger has to be told it again: until then whoever
        reads the ledger must find it reserved.
        """
        self._known_to_store.clear()
        for request_id, each in list(self.unposted.items()):
            if each.grant.plan.is_exact:
                del self.unposted[request_id]
                self.untold.add(request_id)
                self.late.setdefault(each.grant.organization_id, {})[request_id] = each
                self.note_lost(each.grant.organization_id)

    def note_lost(self, organization_id: OrganizationId) -> None:
        """The store does not know the organization."""
        self.lost.add(organization_id)
        self.has_lost.set()

    def _note_taken(self, request_id: RequestId, grant: Grant, usage: TokenUsage) -> None:
        self.untold.discard(request_id)
        if request_id in self._posted_untold:
            self._posted_untold.discard(request_id)
        elif grant.plan.quotas and usage.total_tokens:
            self.unposted[request_id] = LateSettlement(grant, usage)
            if len(self.unposted) > MOST_UNPOSTED:
                del self.unposted[next(iter(self.unposted))]

    async def _known(self, ask: Ask, decide: Callable[[Ask], Awaitable[Verdict]]) -> Verdict:
        """The store's answer; if it has lost the organization, the one after it was told again, if that is soon."""
        verdict = await decide(ask)
        if not verdict.is_lost:
            return verdict
        self.note_lost(ask.organization_id)
        try:
            async with asyncio.timeout(REVIVAL_S), self._revival:
                await self._revival.wait_for(lambda: ask.organization_id not in self.lost)
        except TimeoutError:
            return verdict
        return await decide(ask)

    async def _settled(self, grant: Grant, usage: TokenUsage) -> bool:
        try:
            is_known = await self._settle_in_store(grant, usage)
        except LimitsUnavailable:
            return False
        if not is_known and grant.plan.is_exact:
            # Not the store's knowledge any more, and a hard quota's truth: it has to be told, once it knows the rest.
            self.note_lost(grant.organization_id)
            return False
        return True

    async def _settle_in_store(self, grant: Grant, usage: TokenUsage) -> bool:
        """Whether the store knew the request."""
        organization_id, request_id = grant.organization_id, grant.info.request_id
        if usage.total_tokens == 0:
            is_known = await self.store.cancel(organization_id, request_id)
        else:
            is_known = await self.store.settle(organization_id, request_id, usage) is not None
        self._refusals.forget(grant.plan.uses)
        return is_known

    def _keep_quotas(self, organization_id: OrganizationId, plan: MeterPlan) -> None:
        for each in plan.metered:
            if each.period is not None:
                key = each.use.meter.key
                self.quotas[key] = (organization_id, each)
                self.quotas.move_to_end(key)
        while len(self.quotas) > MOST_QUOTAS:
            self.quotas.popitem(last=False)

    def _ask(
        self, info: RequestInfo, plan: MeterPlan, *, prompt_tokens: int, min_output: int, expected: int, max_output: int
    ) -> Ask:
        self._keep_quotas(info.principal.organization_id, plan)  # refused or not: other requests may have used it up
        return Ask(
            organization_id=info.principal.organization_id,
            request_id=info.request_id,
            owner=self._owner,
            lease_ms=self.lease_ms,
            prompt_tokens=prompt_tokens,
            min_output=min_output,
            expected_output=expected,
            max_output=max_output,
            uses=plan.uses,
        )

    def _judge(self, info: RequestInfo, model: str, plan: MeterPlan, ask: Ask, verdict: Verdict) -> None:
        """Raises what a refusal is."""
        if verdict.is_admitted:
            return
        if verdict.is_lost:
            raise LimitsUnavailable
        index, needed = gravest(ask, verdict)
        remaining = verdict.remaining[index]
        wait_ms = None if needed is not None else self._wait_ms(plan.metered[index], verdict)
        if needed is None:
            place = (info.principal.key_id, model)
            now_s = self._clock.monotonic()
            self._refusals.keep(place, plan, index, remaining, wait_ms, now_s, is_by_share=verdict.is_by_share)
        self._refuse(plan, index, remaining, wait_ms, needed=needed, is_by_share=verdict.is_by_share)

    def _wait_ms(self, metered: Metered, verdict: Verdict) -> int | None:
        if metered.period is not None:
            return max(0, metered.period.end_ms - int(self._clock.time() * 1000))
        return verdict.wait_ms

    def _refuse(
        self, plan: MeterPlan, index: int, remaining: int, wait_ms: int | None, *, needed: int | None, is_by_share: bool
    ) -> None:
        metered = plan.metered[index]
        self.events.refused(metered.limit)
        raise refusal(metered, remaining, wait_ms, needed=needed, is_by_share=is_by_share)

    async def _strict(
        self, info: RequestInfo, plan: MeterPlan, prompt_tokens: int, caps: Sequence[int], num_choices: int
    ) -> Sequence[int]:
        """The caps as strict token rates leave them: no request can write more than fits into a full one beside its
        prompts. Raises `LimitExceeded` if that is not a token for each answer."""
        num_answers = len(caps) * num_choices
        for index in plan.strict_rates:
            use = plan.uses[index]
            assert isinstance(use.meter, Bucket)
            most = most_output(use.weights, prompt_tokens, use.meter.capacity)
            if most < min(num_answers, sum(caps) * num_choices):
                needed = use.weights.cost(TokenUsage(prompt_tokens, num_answers))
                (left,) = await self.store.look(info.principal.organization_id, [use])
                self._refuse(plan, index, left, None, needed=needed, is_by_share=False)
            caps = [min(cap, most // num_answers) for cap in caps]
        return caps

    def _tell_sizes(self, plan: MeterPlan, lengths: Sequence[int], caps: Sequence[int]) -> None:
        """Of shadow limits on a request's size."""
        context, output = plan.shadow_context, plan.shadow_output
        if context is not None and any(length >= context.rule.amount for length in lengths):
            self.events.shadow_refused(context)
        if output is not None and any(cap > output.rule.amount for cap in caps):
            self.events.shadow_refused(output)

    def _expected(
        self, principal: Principal, model: str, caps: Sequence[int], num_choices: int, max_output: int
    ) -> int:
        expected = self._estimates.expected
        if len(caps) == 1:
            return min(max_output, num_choices * expected(principal.team_id, model, caps[0]))
        return min(max_output, num_choices * sum(expected(principal.team_id, model, cap) for cap in caps))

    def _learn(self, grant: Grant, usage: TokenUsage) -> None:
        num_answers = len(grant.caps) * grant.num_choices
        if usage.completion_tokens and not grant.plan.strict_rates:
            ask, principal = grant.ask, grant.info.principal
            assert ask is not None
            cap = max(grant.caps)
            self._estimates.learn(principal.team_id, grant.model, cap, -(-usage.completion_tokens // num_answers))


def _plan(principal: Principal, model: str, prices: Sequence[Price], now_ms: int) -> MeterPlan:
    zone = zone_named(principal.time_zone)
    return plan_of(principal.limits, principal.top_ups, prices, zone=zone, model=model, now_ms=now_ms)


async def _unchanged(principal: Principal) -> Principal:
    return principal


def _is_beyond(plan: MeterPlan, ask: Ask, verdict: Verdict) -> bool:
    """Whether a soft quota had nothing left before this request, whose worst case it holds now."""
    held = holdings(ask, verdict.granted_output)
    return any(verdict.remaining[index] + held[index] <= 0 for index in plan.soft_quotas)


def _sized(plan: MeterPlan, lengths: Sequence[int], caps: Sequence[int]) -> Sequence[int]:
    """The caps as limits on a request's size leave them. Raises `ContextLengthExceeded`."""
    context, output = plan.max_context, plan.max_output
    if context is not None:
        for length in lengths:
            if length >= context:
                raise ContextLengthExceeded(window=context, num_prompt_tokens=length)
        caps = [min(cap, context - length) for cap, length in zip(caps, lengths, strict=True)]
    return caps if output is None else [min(cap, output) for cap in caps]
