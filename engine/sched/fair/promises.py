"""How large a step may be: the tightest promise of the classes that are present, in the cost model's microseconds. And
the credit for short steps."""

from __future__ import annotations

from collections import deque

from engine.messages import RequestClass
from engine.sched.fair.parameters import FairParameters


class Promises:
    """Which classes are present: those with requests, and those that ran not long ago.

    Attributes:
        longest_us: of any step, whoever is present.
    """

    def __init__(self, parameters: FairParameters) -> None:
        keep = 100 - parameters.margin_percent
        self._targets_us = {name: promise_us * keep // 100 for name, promise_us in parameters.promises_us}
        self.longest_us = max(self._targets_us.values())
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
            default=self.longest_us,
        )

    def _is_present(self, name: RequestClass, now_us: int) -> bool:
        last_ran_us = self._last_ran_us.get(name)
        return bool(self._num_requests[name]) or (last_ran_us is not None and now_us - last_ran_us < self._linger_us)


class Drift:
    """How much longer full steps take than the model says. Charges go by the model, step sizes by what is measured.

    A promise is about real time, and a model is a straight line through a curved machine. Steps that take longer count
    at once, shorter ones slowly: too small a step costs a little throughput, too large a one breaks the promise.
    """

    def __init__(self, parameters: FairParameters) -> None:
        self._most = parameters.most_drift_permille
        self._costs_us: deque[tuple[int, bool]] = deque()  # of sealed steps that were not measured yet
        self.permille = 1000

    def sealed(self, cost_us: int, target_us: int) -> None:
        self._costs_us.append((cost_us, 2 * cost_us >= target_us))

    def measured(self, elapsed_us: int) -> None:
        cost_us, is_full = self._costs_us.popleft()
        if not is_full or elapsed_us <= 0:
            return
        seen = max(1_000_000 // self._most, min(self._most, 1000 * elapsed_us // cost_us))
        share = 8 if seen > self.permille else 32
        self.permille += (seen - self.permille) // share

    def in_model_us(self, target_us: int) -> int:
        """So much of real time, as the model counts."""
        return target_us * 1000 // self.permille


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
