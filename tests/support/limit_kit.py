"""What administrators do about limits while a cluster runs, and where callers see that their limits stand."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx
from cluster import MODEL, SharedCluster

from gateway.clock import SystemClock
from gateway.domain.credential import Peppers
from gateway.domain.ids import KeyId, OrganizationId, TeamId
from gateway.domain.ledger import LedgerRow
from gateway.domain.limits.policy import Rule, Scope
from gateway.pepper_file import load_peppers
from gateway.services.admin_keys import KeyTerms
from gateway.services.administration import Administration
from gateway.services.audit import Actor
from gateway.services.ports import Clock
from gateway.services.tenants import TenantChange
from gateway.settings import Settings
from gateway.storage.database import Database
from gateway.storage.redis_feed import RedisFeed

ACTOR = Actor("cli:test")
WITHIN_S = 20.0
_numbers = itertools.count(1)


class Customer(NamedTuple):
    """A key with those it belongs to."""

    organization_id: OrganizationId
    team_id: TeamId
    key_id: KeyId
    key: str

    def scope_id(self, scope: Scope) -> str:
        return {"organization": self.organization_id, "team": self.team_id, "key": self.key_id}[scope]


class Held(NamedTuple):
    """A limit to be set."""

    scope: Scope
    rule: Rule
    model: str | None = None
    is_shadow: bool = False


class LimitOffice:
    """Administers beside the gateways, as the command line does: they hear of it through Redis, or by asking."""

    def __init__(self, storage: Database, administration: Administration) -> None:
        self._storage = storage
        self._administration = administration

    async def customer(self, *limits: Held, time_zone: str = "UTC") -> Customer:
        """A key of a new team of a new organization. Nobody knows it yet, so these limits hold from its first use."""
        tenants = self._administration.tenants
        name = f"customer {time.time_ns()} {next(_numbers)}"
        organization = await tenants.create_organization(ACTOR, name=name, time_zone=time_zone)
        team = await tenants.create_team(ACTOR, organization_id=organization.id, name="crew")
        customer = Customer(organization.id, team.id, *await self._new_key(team.id))
        for each in limits:
            await self.set(customer, each)
        return customer

    async def colleague(self, of: Customer, *limits: Held, same_team: bool = True) -> Customer:
        """Another key of a customer's team, or of a new team of its organization."""
        team_id = of.team_id
        if not same_team:
            name = f"crew {next(_numbers)}"
            made = await self._administration.tenants.create_team(ACTOR, organization_id=of.organization_id, name=name)
            team_id = made.id
        colleague = Customer(of.organization_id, team_id, *await self._new_key(team_id))
        for each in limits:
            await self.set(colleague, each)
        return colleague

    async def set(self, customer: Customer, held: Held) -> None:
        """Set a limit, or change it: there is one of a name for a scope and model."""
        await self._administration.limits.set(
            ACTOR,
            scope_id=customer.scope_id(held.scope),
            rule=held.rule,
            model=held.model,
            is_shadow=held.is_shadow,
        )

    async def remove(self, customer: Customer, held: Held) -> None:
        await self._administration.limits.remove(
            ACTOR, scope_id=customer.scope_id(held.scope), name=held.rule.name, model=held.model
        )

    async def top_up(self, customer: Customer, held: Held, amount: int) -> None:
        """More of a quota, in the present period."""
        await self._administration.quotas.top_up(
            ACTOR,
            scope_id=customer.scope_id(held.scope),
            name=held.rule.name,
            model=held.model,
            amount=amount,
            reason="a test",
        )

    async def price(self, *, prompt: int, cached: int, completion: int, model: str = MODEL) -> None:
        """What its tokens cost from now on, in micro-USD for a million."""
        await self._administration.prices.add(ACTOR, model=model, prompt=prompt, cached=cached, completion=completion)

    async def revoke(self, customer: Customer) -> None:
        await self._administration.keys.revoke(ACTOR, customer.key_id)

    async def disable_team(self, customer: Customer) -> None:
        await self._administration.tenants.change_team(ACTOR, customer.team_id, TenantChange(is_disabled=True))

    async def disable_organization(self, customer: Customer) -> None:
        wanted = TenantChange(is_disabled=True)
        await self._administration.tenants.change_organization(ACTOR, customer.organization_id, wanted)

    async def committed(self, customer: Customer) -> dict[str, int]:
        """By the ledger: what was used of each quota of the present period, by the key of its meter."""
        async with self._storage.reading() as work:
            return dict(await work.ledger.committed(customer.organization_id, since_ms=0))

    async def alerts(self, customer: Customer) -> set[int]:
        """The percentages of quotas that administrators of the organization were told of."""
        async with self._storage.reading() as work:
            return {percent for _, percent, _ in await work.limits.alerts(customer.organization_id, limit=100)}

    async def rows(self, customer: Customer) -> Sequence[LedgerRow]:
        """What the ledger has of the customer's team so far, the newest first."""
        found: list[LedgerRow] = []
        async with self._storage.reading() as work:
            while page := await work.ledger.page(
                after=found[-1].request_id if found else "", limit=1000, team_id=customer.team_id
            ):
                found += page
        return found

    async def settled(self, customer: Customer, num: int) -> Sequence[LedgerRow]:
        """The same, as soon as there are at least so many."""
        rows: Sequence[LedgerRow] = []

        async def are_there() -> bool:
            nonlocal rows
            rows = await self.rows(customer)
            return len(rows) >= num

        await eventually(are_there, f"{num} rows in the ledger")
        return rows

    async def _new_key(self, team_id: TeamId) -> tuple[KeyId, str]:
        issued = await self._administration.keys.create(ACTOR, team_id=team_id, terms=KeyTerms(name="a test's"))
        return issued.key.id, issued.raw


@asynccontextmanager
async def limit_office(cluster: SharedCluster, clock: Clock | None = None) -> AsyncIterator[LimitOffice]:
    """The office of a cluster.

    Args:
        clock: the gateways', if it is not this machine's.
    """
    peppers = load_peppers(Settings(home=cluster.home))
    async with office_at(cluster.database_url, cluster.redis.url, peppers, clock) as office:
        yield office


@asynccontextmanager
async def office_at(
    database_url: str, redis_url: str, peppers: Peppers, clock: Clock | None = None
) -> AsyncIterator[LimitOffice]:
    """The office of all gateways on this database and Redis."""
    async with AsyncExitStack() as stack:
        storage = Database.open(database_url, Path("unused"))
        stack.push_async_callback(storage.close)
        feed = RedisFeed(redis_url)
        stack.push_async_callback(feed.close)
        yield LimitOffice(storage, Administration.over(storage, feed, peppers, clock or SystemClock()))


class Standings(NamedTuple):
    """What ``GET /v1/limits`` tells, a limit each."""

    limits: Sequence[Mapping[str, Any]]

    def find(self, name: str, scope: Scope = "key", model: str | None = None) -> Mapping[str, Any]:
        wanted = (name, scope, model)
        [found] = [each for each in self.limits if (each["name"], each["scope"], each["model"]) == wanted]
        return found

    def left(self, name: str, scope: Scope = "key", model: str | None = None) -> int:
        """What is left of a limit."""
        remaining: int = self.find(name, scope, model)["remaining"]
        return remaining


async def standings(url: str, key: str) -> Standings:
    """Where a key's limits stand right now, by the gateway at this address."""
    found = await standings_if_known(url, key)
    assert found is not None, "limits_unavailable"
    return found


async def standings_if_known(url: str, key: str) -> Standings | None:
    """None while the gateway cannot tell: Redis does not answer, or what a dead process has used is not all in the
    ledger yet."""
    async with httpx.AsyncClient(base_url=url, timeout=20) as client:
        answer = await client.get("/v1/limits", headers={"authorization": f"Bearer {key}"})
    if answer.status_code == 503 and answer.json()["error"]["code"] == "limits_unavailable":
        return None
    assert answer.status_code == 200, answer.text
    return Standings(answer.json()["data"])


async def known(
    cluster: SharedCluster,
    customer: Customer,
    is_so: Callable[[Standings], bool],
    what: str,
    within_s: float = WITHIN_S,
) -> None:
    """Wait until the limits of a customer are so, at every gateway. Of a quota that cannot be told in Redis' first
    seconds."""
    for gateway in cluster.gateways:

        async def is_known(url: str = gateway.url) -> bool:
            found = await standings_if_known(url, customer.key)
            return found is not None and is_so(found)

        await eventually(is_known, f"{what}, at {gateway.name}", within_s)


async def begun(cluster: SharedCluster, customer: Customer, within_s: float = WITHIN_S) -> None:
    """As `begun_at`, at all gateways of a cluster."""
    await begun_at([gateway.url for gateway in cluster.gateways], customer, within_s)


async def begun_at(urls: Sequence[str], customer: Customer, within_s: float = WITHIN_S) -> None:
    """Wait until requests that a hard quota holds for are not refused any more because Redis does not know the
    organization yet. Nothing is consumed: what is sent is too long for the model."""
    body = {"model": MODEL, "messages": [{"role": "user", "content": "too long " * 9000}]}
    headers = {"authorization": f"Bearer {customer.key}"}
    async with httpx.AsyncClient(timeout=20, headers=headers) as client:

        async def is_known() -> bool:
            answers = [await client.post(f"{url}/v1/chat/completions", json=body) for url in urls]
            codes = {answer.json()["error"]["code"] for answer in answers}
            assert codes <= {"context_length_exceeded", "limits_unavailable"}, codes
            return codes == {"context_length_exceeded"}

        await eventually(is_known, "the organization is known to Redis", within_s)


async def eventually(is_so: Callable[[], Awaitable[bool]], what: str, within_s: float = WITHIN_S) -> None:
    """Wait for what other processes bring about."""
    deadline = time.monotonic() + within_s
    while not await is_so():
        assert time.monotonic() < deadline, f"not within {within_s} s: {what}"
        await asyncio.sleep(0.02)
