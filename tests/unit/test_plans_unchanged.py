"""fcfs and static make the plans that they made before parking existed, and fair share's depend on nothing but events:
to the byte."""

from __future__ import annotations

import subprocess
import sys
from hashlib import sha256
from pathlib import Path
from random import Random

import msgspec
import pytest
from core_harness import CoreHarness


def plans_of_a_busy_day(policy: str, *, plan_ahead: bool) -> bytes:
    """Arrivals, shared prefixes, choices, caps and aborts in a pool that is too small for them; from a fixed seed."""
    random = Random(7)
    harness = CoreHarness(
        num_blocks=24, max_sequences=5, max_step_tokens=48, eos_every=40, plan_ahead=plan_ahead, policy=policy
    )
    for _ in range(400):
        draw = random.random()
        unfinished = sorted({key for (key, _), answer in harness.answers.items() if answer.finish is None})
        if draw < 0.25:
            first, num_shared = random.choice([1, 100, 300]), random.randrange(60)
            prompt = [first + i for i in range(num_shared)] + [random.randrange(1, 9) for _ in range(8)]
            harness.submit(
                prompt,
                random.randrange(1, 50),
                seed=random.randrange(4),
                num_choices=random.choice([1, 1, 2]),
                hold_at_cap=random.random() < 0.3,
                cache_salt=random.choice(["", "b"]),
            )
        elif draw < 0.3 and unfinished:
            harness.abort(random.choice(unfinished))
        elif draw < 0.4 and unfinished:
            harness.raise_cap(random.choice(unfinished), random.randrange(1, 60))
        else:
            harness.step()
    return msgspec.msgpack.encode(harness.runner.plans)


@pytest.mark.parametrize(
    ("policy", "plan_ahead", "digest"),
    [
        ("fcfs", False, "b1532f3c35eb9447"),
        ("fcfs", True, "766d805a45279982"),
        ("static", False, "f9ef316330fdc464"),
        ("static", True, "ef9241c872745de5"),
    ],
)
def test_the_plans_are_those_of_old(policy: str, plan_ahead: bool, digest: str) -> None:
    assert sha256(plans_of_a_busy_day(policy, plan_ahead=plan_ahead)).hexdigest()[:16] == digest


@pytest.mark.parametrize("plan_ahead", [False, True])
def test_the_plans_of_fair_share_do_not_depend_on_the_process(plan_ahead: bool) -> None:
    """Hashes of strings differ from process to process; an order taken from a set would, too."""
    program = (
        f"from test_plans_unchanged import plans_of_a_busy_day as day; print(day('fair', plan_ahead={plan_ahead}))"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join([str(Path(__file__).parent), *sys.path])},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2", "3")
    }

    assert len(outputs) == 1
