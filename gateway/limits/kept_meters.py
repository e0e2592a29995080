"""Where the meters of one organization stand, in memory."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import msgspec

from gateway.domain.limits.meters import PARTS, Bucket, Meter, Quota, Use
from gateway.domain.limits.rules import Level, given_back, level_at

BUCKET_IDLE_MS = 7 * 86_400_000
"""A bucket that nobody touched for so long is forgotten if it is full."""
QUOTA_IDLE_MS = 40 * 86_400_000
"""A quota likewise, if nothing is reserved: longer than any period, so nobody asks for it again."""


class _KeptBucket(Level, gc=False):
    """`meter` is as it was last charged, to tell whether it is full."""

    meter: Bucket


class KeptQuota(msgspec.Struct):
    at_ms: int
    committed: int = 0
    reserved: int = 0
    is_told: bool = False


class KeptMeters:
    """Buckets and quotas are in the order in which they were touched last."""

    def __init__(self) -> None:
        self.buckets: OrderedDict[str, _KeptBucket] = OrderedDict()
        self.quotas: OrderedDict[str, KeptQuota] = OrderedDict()
        self.leases: dict[str, int] = {}

    def standing(self, meter: Meter, now_ms: int) -> int:
        if isinstance(meter, Bucket):
            return level_at(meter, self.buckets.get(meter.key), now_ms)
        if isinstance(meter, Quota):
            quota = self.quotas.get(meter.key)
            return meter.amount if quota is None else meter.amount - quota.committed - quota.reserved
        return meter.limit - self.leases.get(meter.key, 0)

    def standings(self, uses: Sequence[Use], now_ms: int) -> list[int]:
        return [self.standing(use.meter, now_ms) for use in uses]

    def take(self, uses: Sequence[Use], reserved: Sequence[int], standings: Sequence[int], now_ms: int) -> None:
        """
        Args:
            reserved: of each use, and of a bucket no more than it can take.
            standings: where they stand at the moment.
        """
        for use, units, standing in zip(uses, reserved, standings, strict=True):
            meter = use.meter
            if isinstance(meter, Bucket):
                self._fill(meter, standing - units * PARTS, now_ms)
            elif isinstance(meter, Quota):
                self.quota(meter.key, now_ms).reserved += units
            else:
                self.leases[meter.key] = self.leases.get(meter.key, 0) + units

    def change(
        self, uses: Sequence[Use], freed: Sequence[int], charged: Sequence[int], charge: Sequence[int], now_ms: int
    ) -> tuple[int, ...]:
        """Of each use: what is no longer reserved, what had been charged, and what is charged instead of both.

        Returns what is forgiven.
        """
        forgiven = [0] * len(uses)
        for index, use in enumerate(uses):
            meter, free = use.meter, freed[index]
            if isinstance(meter, Bucket):
                units = free + charged[index] - charge[index]
                if units:
                    standing = level_at(meter, self.buckets.get(meter.key), now_ms)
                    parts, forgiven[index] = given_back(meter, standing, units)
                    self._fill(meter, parts, now_ms)
            elif isinstance(meter, Quota):
                quota = self.quota(meter.key, now_ms)
                quota.reserved -= free
                quota.committed += charge[index] - charged[index]
            elif free:
                left = self.leases[meter.key] = self.leases[meter.key] - free
                if not left:
                    del self.leases[meter.key]
        return tuple(forgiven)

    def quota(self, key: str, now_ms: int) -> KeptQuota:
        """To be changed."""
        quota = self.quotas.get(key)
        if quota is None:
            quota = self.quotas[key] = KeptQuota(now_ms)
        quota.at_ms = now_ms
        self.quotas.move_to_end(key)
        return quota

    def forget(self, num: int, now_ms: int) -> None:
        """Look at some of the meters that nobody touched for longest: at more than one request can add."""
        for _ in range(num):
            if not self.buckets or now_ms - next(iter(self.buckets.values())).at_ms < BUCKET_IDLE_MS:
                break
            key, bucket = self.buckets.popitem(last=False)
            if level_at(bucket.meter, bucket, now_ms) < bucket.meter.capacity * PARTS:
                self.buckets[key] = bucket
        for _ in range(num):
            if not self.quotas or now_ms - next(iter(self.quotas.values())).at_ms < QUOTA_IDLE_MS:
                break
            key, quota = self.quotas.popitem(last=False)
            if quota.reserved:
                self.quotas[key] = quota

    def _fill(self, bucket: Bucket, parts: int, now_ms: int) -> None:
        """Set its level, which was that of the moment."""
        key = bucket.key
        kept = self.buckets.get(key)
        if kept is None:
            self.buckets[key] = _KeptBucket(parts, now_ms, bucket)
            return
        kept.parts, kept.meter = parts, bucket
        if now_ms > kept.at_ms:
            kept.at_ms = now_ms
        self.buckets.move_to_end(key)
