"""The named workloads. Each is a function of a seed and a cost model, and gives the same data every time.

How much arrives is measured in the engine's own time, and what lasts, lasts longer on a slow engine: so one workload
loads a slow machine and a fast one alike.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from engine.errors import ConfigError
from engine.sched.cost import CostModel
from engine.sim.pen import Pen, S, path_of
from engine.sim.workload import Arrival, Segment, Workload


def make_workload(name: str, seed: int, cost: CostModel) -> Workload:
    """Raises `ConfigError` for a name that is unknown."""
    make = _WORKLOADS.get(name)
    if make is None:
        raise ConfigError(f"no workload '{name}'; there are {', '.join(_WORKLOADS)}")
    return make(name, Pen(seed, cost))


def workload_names() -> tuple[str, ...]:
    return tuple(_WORKLOADS)


def _flood(name: str, pen: Pen) -> Workload:
    until_us = pen.s(25)
    _greedy(pen, "flood", until_us)
    pen.stream(path_of("quiet"), load=0.05, num_prompt_tokens=100, num_output_tokens=16, until_us=until_us - pen.s(5))
    about = "many at once of one team, beside a few short requests of another"
    return _workload(name, about, pen, until_us, greedy=["flood"], watched=["quiet"])


def _long_prompt(name: str, pen: Pen) -> Workload:
    until_us = pen.s(2) + 4 * pen.cost.marginal_us(0, pen.long_tokens, pen.long_tokens)
    pen.arrive(pen.s(2), path_of("long"), 8, num_prompt_tokens=pen.long_tokens)
    pen.clients(4 * pen.slots, path_of("short"), num_prompt_tokens=100, num_output_tokens=60, until_us=until_us)
    about = f"a prompt of {pen.long_tokens} tokens under a flood of short requests of another team"
    return _workload(name, about, pen, until_us, greedy=["short"], watched=["long"], measure_from_us=pen.s(2))


def _three_long(name: str, pen: Pen) -> Workload:
    until_us = 90 * S
    pen.clients(4, path_of("stream"), num_prompt_tokens=100, num_output_tokens=300, until_us=30 * S)
    for i in range(3):
        pen.arrive(S + i, path_of("long"), 8, num_prompt_tokens=pen.long_tokens)
    about = f"four streams beside three prompts of {pen.long_tokens} tokens of another team"
    return _workload(name, about, pen, until_us, watched=["stream"], measure_from_us=S)


def _agents(name: str, pen: Pen) -> Workload:
    until_us = pen.s(40)
    for team in ("red", "green", "blue"):
        system = pen.segment(2000)
        for agent in range(pen.slots):
            _agent(pen, team, agent, system, until_us)
    about = "agents of three teams: long shared beginnings, many turns, tools that take their time"
    return _workload(name, about, pen, until_us, watched=["red"])


def _agent(pen: Pen, team: str, agent: int, system: Segment, until_us: int) -> None:
    path = path_of(team, session=f"agent{agent}")
    prompt: tuple[Segment, ...] = (system,)
    last: Arrival | None = None
    for _ in range(8):
        at_us = pen.rng.randrange(until_us // 4) if last is None else pen.length(pen.s(1))
        prompt = (*prompt, pen.segment(pen.length(300)))
        last = pen.arrive(at_us, path, pen.length(60), prompt=prompt, after=last)
        prompt = (*prompt, last.answer)


def _on_off(name: str, pen: Pen) -> Workload:
    until_us, period_us = pen.s(30), pen.s(5)
    _greedy(pen, "steady", until_us)
    for i, team in enumerate(("odd", "even")):
        for begin_us in range(i * period_us, until_us, 2 * period_us):
            pen.stream(
                path_of(team),
                load=0.6,
                num_prompt_tokens=400,
                num_output_tokens=120,
                from_us=begin_us,
                until_us=begin_us + period_us,
                canceled=0.1,
            )
    about = "two teams that come and go by turns, with cancels, beside one that is always there"
    return _workload(name, about, pen, until_us, greedy=["steady"])


def _shares(name: str, pen: Pen) -> Workload:
    until_us = pen.s(120)
    for team, weight in (("one", 1), ("two", 2), ("four", 4)):
        _greedy(pen, team, until_us, weight)
    about = "three teams with weights 1:2:4, all of which always have more"
    return _workload(name, about, pen, until_us, greedy=["one", "two", "four"])


def _equal(name: str, pen: Pen) -> Workload:
    until_us = pen.s(90)
    teams = ("red", "green", "blue", "gold")
    for i, team in enumerate(teams):
        _greedy(pen, team, until_us, num_clients=pen.slots * (1 + i))
    about = "four equal teams, with one, two, three and four times the slots at once"
    return _workload(name, about, pen, until_us, greedy=teams)


def _nested(name: str, pen: Pen) -> Workload:
    until_us = pen.s(240)
    teams = {"a1": ("a", 1, 1), "a3": ("a", 1, 3), "b2": ("b", 2, 2), "b1": ("b", 2, 1)}
    for team, (org, org_weight, weight) in teams.items():
        _greedy(pen, team, until_us, weight, org=org, org_weight=org_weight)
    about = "organizations 1:2, their teams 1:3 and 2:1, all of which always have more"
    return _workload(name, about, pen, until_us, greedy=list(teams))


def _split(name: str, pen: Pen) -> Workload:
    until_us = pen.s(90)
    _greedy(pen, "whole", until_us)
    for key in range(8):
        _greedy(pen, "keys", until_us, num_clients=pen.slots, key=f"key{key}")
    for session in range(8 * pen.slots):
        _greedy(pen, "sessions", until_us, num_clients=1, session=f"session{session}")
    about = "a team with one session, and two that split twice as much over eight keys and over many sessions"
    return _workload(name, about, pen, until_us, greedy=["whole", "keys", "sessions"])


def _limited(name: str, pen: Pen) -> Workload:
    until_us = pen.s(40)
    for team, load in (("little", 0.05), ("some", 0.12)):
        pen.stream(path_of(team), load=load, num_prompt_tokens=300, num_output_tokens=60, until_us=until_us)
    for team in ("greedy1", "greedy2"):
        _greedy(pen, team, until_us)
    about = "two teams that want less than their share beside two that always want more"
    return _workload(name, about, pen, until_us, greedy=["greedy1", "greedy2"], watched=["little", "some"])


def _unlike(name: str, pen: Pen) -> Workload:
    until_us = pen.s(40)
    pen.clients(2 * pen.slots, path_of("reads"), num_prompt_tokens=1500, num_output_tokens=2, until_us=until_us)
    pen.clients(2 * pen.slots, path_of("writes"), num_prompt_tokens=20, num_output_tokens=400, until_us=until_us)
    about = "a team that only reads beside one that only writes: weights do not divide unlike work exactly"
    return _workload(name, about, pen, until_us, greedy=["reads", "writes"])


def _classes(name: str, pen: Pen) -> Workload:
    until_us = pen.s(30)
    for request_class in ("interactive", "standard", "batch"):
        pen.clients(
            pen.slots,
            path_of("mixed", key=request_class),
            num_prompt_tokens=400,
            num_output_tokens=120,
            until_us=until_us,
            request_class=request_class,
        )
    about = "one team whose interactive, standard and batch requests all always have more"
    return _workload(name, about, pen, until_us, greedy=["mixed"])


def _thousand(name: str, pen: Pen) -> Workload:
    until_us = pen.s(20)
    for i in range(1000):
        load = 1.1 / 1000 if i >= 10 else 0.03
        pen.stream(
            path_of(f"team{i}", 1 + i % 4, org=f"org{i % 50}"),
            load=load,
            num_prompt_tokens=200,
            num_output_tokens=40,
            until_us=until_us,
        )
    about = "1,000 teams of 50 organizations that want a little more together than there is"
    return _workload(name, about, pen, until_us, watched=["team999"])


def _vtc_overload(name: str, pen: Pen) -> Workload:
    until_us = pen.s(40)
    for team, load in (("client1", 0.7), ("client2", 1.4)):
        pen.stream(path_of(team), load=load, num_prompt_tokens=256, num_output_tokens=256, until_us=until_us)
    about = "VTC paper: two clients, both over half of the engine, one asks twice as often"
    return _workload(name, about, pen, until_us, greedy=["client1", "client2"])


def _vtc_on_off(name: str, pen: Pen) -> Workload:
    until_us, period_us = pen.s(40), pen.s(5)
    for begin_us in range(0, until_us, 2 * period_us):
        pen.stream(
            path_of("client1"),
            load=0.25,
            num_prompt_tokens=256,
            num_output_tokens=256,
            from_us=begin_us,
            until_us=begin_us + period_us,
        )
    pen.stream(path_of("client2"), load=1.4, num_prompt_tokens=256, num_output_tokens=256, until_us=until_us)
    about = "VTC paper: a client below its share that comes and goes, one that overloads"
    return _workload(name, about, pen, until_us, greedy=["client2"], watched=["client1"])


def _vtc_lengths(name: str, pen: Pen) -> Workload:
    until_us = pen.s(40)
    for team, num_prompt, num_output in (("client1", 64, 512), ("client2", 512, 64)):
        pen.stream(
            path_of(team), load=1.0, num_prompt_tokens=num_prompt, num_output_tokens=num_output, until_us=until_us
        )
    about = "VTC paper: short prompts with long answers against long prompts with short ones"
    return _workload(name, about, pen, until_us, greedy=["client1", "client2"])


def _vtc_ramp(name: str, pen: Pen) -> Workload:
    until_us, period_us = pen.s(40), pen.s(5)
    pen.stream(path_of("client1"), load=0.2, num_prompt_tokens=256, num_output_tokens=64, until_us=until_us)
    for i, begin_us in enumerate(range(0, until_us, period_us)):
        pen.stream(
            path_of("client2"),
            load=0.25 * (1 + i),
            num_prompt_tokens=256,
            num_output_tokens=64,
            from_us=begin_us,
            until_us=begin_us + period_us,
        )
    about = "VTC paper: a client below its share beside one that asks more and more"
    return _workload(name, about, pen, until_us, watched=["client1"])


def _greedy(
    pen: Pen,
    team: str,
    until_us: int,
    weight: int = 1,
    *,
    org: str = "org",
    org_weight: int = 1,
    key: str = "key",
    session: str = "session",
    num_clients: int = 0,
) -> None:
    """A team that always has more: so many at once (four times the slots if left out), all alike."""
    pen.clients(
        num_clients or 4 * pen.slots,
        path_of(team, weight, org=org, org_weight=org_weight, key=key, session=session),
        num_prompt_tokens=400,
        num_output_tokens=120,
        until_us=until_us,
    )


def _workload(
    name: str,
    about: str,
    pen: Pen,
    until_us: int,
    *,
    greedy: Sequence[str] = (),
    watched: Sequence[str] = (),
    measure_from_us: int | None = None,
) -> Workload:
    """
    Args:
        measure_from_us: None leaves a while for those who begin together to spread.
    """
    return Workload(
        name=name,
        about=about,
        seed=pen.seed,
        until_us=until_us,
        arrivals=tuple(pen.arrivals),
        measure_from_us=pen.s(5) if measure_from_us is None else measure_from_us,
        greedy=tuple(greedy),
        watched=tuple(watched),
        max_sequences=pen.slots,
    )


_WORKLOADS: dict[str, Callable[[str, Pen], Workload]] = {
    "flood": _flood,
    "long-prompt": _long_prompt,
    "three-long": _three_long,
    "agents": _agents,
    "on-off": _on_off,
    "shares": _shares,
    "equal": _equal,
    "nested": _nested,
    "split": _split,
    "limited": _limited,
    "unlike": _unlike,
    "classes": _classes,
    "thousand": _thousand,
    "vtc-overload": _vtc_overload,
    "vtc-on-off": _vtc_on_off,
    "vtc-lengths": _vtc_lengths,
    "vtc-ramp": _vtc_ramp,
}
