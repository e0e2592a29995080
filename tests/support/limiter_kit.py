"""Principals with limits, and what requests of theirs ask of a limiter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from identity_kit import PRINCIPAL, SteppedClock

from gateway.domain.ids import RequestId, new_request_id
from gateway.domain.limits.meters import Use
from gateway.domain.limits.policy import Concurrency, Limit, QuotaRule, RequestRate, Rule, Scope, TokenRate, TopUp
from gateway.domain.principal import Principal, RequestClass
from gateway.domain.record import RequestInfo
from gateway.limits.memory import MemoryLimits
from gateway.services.grants import Grant
from gateway.services.limiter import Limiter
from gateway.services.ports import Generation

NOW_S = 1_795_995_200.0
"""2026-11-29T23:33:20Z, a Sunday: the day and the week end 1,600 s later, and the month does a day after that."""
MODEL = "m"
ORGANIZATION = PRINCIPAL.organization_id
_SCOPE_IDS: dict[Scope, str] = {"organization": ORGANIZATION, "team": PRINCIPAL.team_id, "key": PRINCIPAL.key_id}

REQUESTS = RequestRate(amount=60, period="minute", burst=2)
"""One a second."""
TOKENS = TokenRate(amount=600, period="minute", burst=100, max_debt=50)
"""Ten a second."""
RUNNING = Concurrency(amount=2)
HARD = QuotaRule(unit="tokens", period="day", amount=1_000)
SOFT = QuotaRule(unit="tokens", period="day", amount=1_000, is_hard=False)


def limit(rule: Rule, scope: Scope = "key", **fields: Any) -> Limit:
    return Limit(**{"scope": scope, "scope_id": _SCOPE_IDS[scope], "rule": rule, "changed_at_ms": 0} | fields)


def top_up(amount: int, *, of: Limit, period_id: str, **fields: Any) -> TopUp:
    return TopUp(
        **{
            "id": "top_1",
            "scope": of.scope,
            "scope_id": of.scope_id,
            "model": of.model,
            "name": of.name,
            "period_id": period_id,
            "amount": amount,
            "reason": "",
            "created_at_ms": 0,
        }
        | fields
    )


def limited(*limits: Limit | Rule, **fields: Any) -> Principal:
    """Who has these limits; rules are of its key."""
    held = tuple(each if isinstance(each, Limit) else limit(each) for each in limits)
    return msgspec.structs.replace(PRINCIPAL, limits=held, **fields)


def info_of(principal: Principal, request_class: RequestClass = "interactive", **fields: Any) -> RequestInfo:
    return RequestInfo(
        **{
            "request_id": new_request_id(0),
            "principal": principal,
            "request_class": request_class,
            "endpoint": "chat",
            "stream": True,
        }
        | fields
    )


@dataclass
class Wanted:
    """Implements `gateway.services.ports.Prepared` as far as a limiter looks at it: 10 tokens in, up to 100 out."""

    prompt_lengths: Sequence[int] = (10,)
    output_caps: Sequence[int] = (100,)
    model: str = MODEL
    num_parts: int = 1
    echo_texts: Sequence[str] = ()

    @property
    def num_prompt_tokens(self) -> int:
        return sum(self.prompt_lengths)

    def start(
        self, info: RequestInfo, output_caps: Sequence[int] | None = None, held_cap: int | None = None
    ) -> Generation:
        raise AssertionError("nobody runs it")


class Told:
    """Implements `gateway.services.limiter.LimitEvents`."""

    def __init__(self) -> None:
        self.refusals: list[str] = []
        self.shadow_refusals: list[str] = []

    def refused(self, limit: Limit) -> None:
        self.refusals.append(f"{limit.scope} {limit.name}")

    def shadow_refused(self, limit: Limit) -> None:
        self.shadow_refusals.append(f"{limit.scope} {limit.name}")


class Process:
    """A limiter over a store in memory, both by one clock that stands still.

    Attributes:
        principal: who asks, unless another one is named.
    """

    def __init__(self, *limits: Limit | Rule, **fields: Any) -> None:
        self.clock = SteppedClock(NOW_S)
        self.store = MemoryLimits(lambda: int(self.clock.time() * 1000))
        self.limiter = Limiter(self.store, self.clock, owner="p1")
        self.told = self.limiter.events = Told()
        self.principal = limited(*limits, **fields)

    async def begin(self, committed: Mapping[str, int] | None = None) -> None:
        """The epoch, and let the limiter know."""
        await self.store.begin_epoch(ORGANIZATION, committed or {}, ())
        await self.limiter.note_known(ORGANIZATION)

    async def admit(
        self, wanted: Wanted | None = None, *, info: RequestInfo | None = None, num_choices: int = 1
    ) -> Grant:
        return await self.limiter.admit(
            info or info_of(self.principal), wanted or Wanted(), (), num_choices=num_choices
        )

    async def left(self, principal: Principal | None = None) -> list[int]:
        """Of each of the limits that have a meter."""
        uses: Sequence[Use] = self.limiter.plan(principal or self.principal, MODEL, ()).uses
        return list(await self.store.look(ORGANIZATION, uses))

    @property
    def num_live(self) -> int:
        return sum(map(len, self.limiter.live.values()))

    @property
    def late_ids(self) -> list[RequestId]:
        return [request_id for late in self.limiter.late.values() for request_id in late]
