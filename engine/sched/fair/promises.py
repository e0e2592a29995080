"""How large a step may be: the tightest promise of the classes that are present. And the credit for short steps."""

from __future__ import annotations

from engine.messages import RequestClass
from engine.sched.fair.parameters import FairParameters


class Promises:
    """Which classes are present: those with requests, and those that ran not long ago."""

    def __init__(self, parameters: FairParameters) -> None:
        keep = 100 - parameters.margin_percent
        self._targets_us = {name: promise_us * keep // 100 for name, promise_us in parameters.promises_us}
        self._linger_us = parameters.linger_us
        self._num_requests = dict.fromkeys(self._targets_us, 0)
        self._last_ran_us: dict[RequestClass, int] = {}

    def enter(self, request_class: RequestClass) -> None:
        self._num_requests[request_class] += 1

    def leave(self, request_class: RequestClass) -> None:
        self._num_requests[request_class] -= 1

    def ran(self, request_class: RequestClass, now_us: int) -> None:
        self._last_ran_us[request_class] = now_us

    def target_us(self, now_us: int) -> int:
        """T: what the next step is to take, at most."""
        return min(
            [target_us for name, target_us in self._targets_us.items() if self._is_present(name, now_us)],
            default=max(self._targets_us.values()),
        )

    def _is_present(self, name: RequestClass, now_us: int) -> bool:
        last_ran_us = self._last_ran_us.get(name)
        return bool(self._num_requests[name]) or (last_ran_us is not None and now_us - last_ran_us < self._linger_us)


class Credit:
    """Rule R2: short steps cost the others a fixed part each, and may cost them a small part of all time.

    Args:
        fixed_us: what a step costs whatever is in it.
    """

    def __init__(self, parameters: FairParameters, fixed_us: int) -> None:
        self._percent = parameters.credit_percent
        self._fixed = 100 * fixed_us
        self._most = parameters.most_credit_steps * self._fixed
        self._credit = self._most  # in hundredths of a microsecond

    def allows(self, *, is_for_all: bool) -> bool:
        """Whether a short step can be paid. For who is new only among its own team's keys half of what can be saved is
        left to the others."""
        return self._credit >= self._fixed + (0 if is_for_all else self._most // 2)

    def earn(self, step_us: int) -> None:
        self._credit = min(self._most, self._credit + self._percent * step_us)

    def spend(self) -> None:
        self._credit -= self._fixed
