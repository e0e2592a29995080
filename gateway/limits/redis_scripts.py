"""The scripts that Redis runs, and how what they are given and answer is written."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import cache, lru_cache
from importlib import resources

import msgspec

from gateway.domain.ids import OrganizationId
from gateway.domain.limits.admission import Settlement, Verdict
from gateway.domain.limits.meters import Bucket, Lease, Quota, Use

VERSION = "eh1"
"""Of what the scripts keep. Begins every key, so processes of two versions never read each other's."""

REFUSED, ADMITTED, LOST, TOO_LATE = range(4)
"""What `admit.lua` answers."""


class Script(msgspec.Struct, frozen=True):
    name: str
    text: str
    sha: str


@cache
def load(name: str) -> Script:
    folder = resources.files("gateway.limits") / "scripts"
    text = "\n".join((folder / f"{part}.lua").read_text("utf-8") for part in ("common", name))
    return Script(name, text, hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest())


def prefix(organization_id: OrganizationId) -> str:
    """Of all keys of an organization. In braces is what decides where in a cluster they are: all in one place."""
    return f"{VERSION}:{{{organization_id}}}:"


def quota_name(key: str) -> str:
    """What follows the prefix."""
    return f"q:{key}"


@lru_cache(maxsize=16_384)
def packed(use: Use) -> tuple[str, msgspec.Raw]:
    """The name of its meter, to follow the prefix, and the rest of it as the scripts read it."""
    meter, weights = use.meter, use.weights
    match meter:
        case Bucket(key=key):
            name, figures = f"b:{key}", (1, meter.is_shadow, meter.capacity, meter.parts_per_ms, meter.max_debt)
        case Quota(key=key):
            name, figures = quota_name(key), (2, meter.is_shadow, meter.amount, int(meter.is_hard), 0)
        case Lease(key=key):
            name, figures = f"l:{key}", (3, meter.is_shadow, meter.limit, 0, 0)
    costs = (weights.prompt, weights.cached, weights.output, weights.per_request)
    return name, msgspec.Raw(msgspec.msgpack.encode((*map(int, figures), *costs)))


def verdict_of(answer: Sequence[int]) -> Verdict:
    """Of what `admit.lua` has answered, if it was not too late."""
    code, granted, binding, wait_ms, is_never, _, num_uses = answer[:7]
    if code == LOST:
        return Verdict(is_admitted=False, is_lost=True)
    return Verdict(
        is_admitted=code == ADMITTED,
        granted_output=granted,
        binding=None if binding < 0 else binding,
        remaining=tuple(answer[7 : 7 + num_uses]),
        wait_ms=None if wait_ms < 0 else wait_ms,
        is_never=is_never == 1,
        shadow_refused=tuple(answer[7 + num_uses :]),
    )


def settlement_of(answer: Sequence[int]) -> Settlement | None:
    """Of what `settle.lua` has answered."""
    if not answer:
        return None
    middle = 2 + (len(answer) - 2) // 2
    return Settlement(
        charged=tuple(answer[2:middle]),
        forgiven=tuple(answer[middle:]),
        was_reaped=answer[0] == 1,
        was_settled=answer[1] == 1,
    )
