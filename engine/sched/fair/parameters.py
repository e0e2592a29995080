"""The figures of fair share. Times in microseconds of engine time."""

from __future__ import annotations

from dataclasses import dataclass

from engine.messages import RequestClass


@dataclass(frozen=True, slots=True, kw_only=True)
class FairParameters:
    """What the rules leave open; `../README.md` says what each is for.

    Attributes:
        promises_us: what a step may take while a class is present; for batch a cap and no promise.
        margin_percent: what the planner keeps of a promise for the errors of its cost model.
        class_weights: how the classes of one team split its share.
        window_steps: Λ in target steps.
        lag_steps: Θ in target steps.
        quanta_per_step: a quantum is the target step divided by this.
        least_quantum_tokens: a quantum is never smaller.
        reserve_percent: ρ, of a step for waiting prompts.
        most_sat_out: m, steps in a row that an eligible decode sits out.
        credit_percent: of step time, for short steps.
        most_credit_steps: short steps that can be saved up.
        linger_us: a class counts as present for so long after it last ran.
        look: waiting requests that are looked at together, per leaf and per round.
        asked_in_turn: leaves whose claims are asked for in a step besides, whatever the deal says.
        most_refused_claims: claims for a slot that may fail in one step before the planner stops asking.
        most_drift_permille: how far from the cost model measured times may take the size of a step, either way.
    """

    promises_us: tuple[tuple[RequestClass, int], ...] = (
        ("interactive", 50_000),
        ("standard", 150_000),
        ("batch", 500_000),
    )
    margin_percent: int = 5
    class_weights: tuple[tuple[RequestClass, int], ...] = (("interactive", 4), ("standard", 2), ("batch", 1))
    window_steps: int = 4
    lag_steps: int = 16
    quanta_per_step: int = 16
    least_quantum_tokens: int = 16
    reserve_percent: int = 25
    most_sat_out: int = 3
    credit_percent: int = 2
    most_credit_steps: int = 10
    linger_us: int = 10_000_000
    look: int = 16
    asked_in_turn: int = 4
    most_refused_claims: int = 8
    most_drift_permille: int = 4000
