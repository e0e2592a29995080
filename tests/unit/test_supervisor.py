from __future__ import annotations

import asyncio
import os
import signal
import sys
import textwrap
import threading
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import psutil
import pytest

import gateway.supervisor
from gateway.supervisor import CONFIG_EXIT, ChildSpec, Supervisor

STAND_IN = textwrap.dedent(
    """
    import os, select, signal, sys

    name, behavior, log, _, lifeline = sys.argv[1:]
    signals, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.signal(signal.SIGTERM, lambda *_: None)
    signal.set_wakeup_fd(wake)

    def say(word):
        with open(log, "a") as file:
            file.write(f"{name} {word} {os.getpid()}\\n")

    if name.startswith("gateway"):
        os.set_blocking(int(lifeline), False)  # as event loops do to what they watch
    if behavior == "misconfigured":
        sys.exit(78)
    say("started")
    if behavior != "slow":
        os.write(int(lifeline), b"ready\\n")
    if behavior == "frail":
        sys.exit(3)
    while True:
        if name == "engine" and not os.get_blocking(int(lifeline)):
            say("disturbed")
        ready, _, _ = select.select([signals, int(lifeline)], [], [])
        if int(lifeline) in ready:
            say("orphaned")
            sys.exit(1)
        os.read(signals, 1)
        say("told")
        if behavior in ("obedient", "slow") or (behavior == "busy" and open(log).read().count(f"{name} told") == 2):
            say("left")
            sys.exit(0)
    """
)


class Stage:
    """A supervisor over stand-ins, and what they did, in order."""

    def __init__(self, folder: Path) -> None:
        self.script = folder / "stand_in.py"
        self.script.write_text(STAND_IN)
        self.log = folder / "log"
        self.said: list[str] = []
        self.ended: list[str] = []
        self.may_announce = threading.Event()
        self.may_announce.set()
        self.is_announcing = False
        self.is_announced = False

    def child(self, name: str, behavior: str, *, drain_s: float = 0.0, niceness: int = 0) -> ChildSpec:
        return ChildSpec(
            name=name,
            command=[sys.executable, str(self.script), name, behavior, str(self.log)],
            environment=os.environ,
            tells_ready=name.startswith("gateway"),
            drain_s=drain_s,
            niceness=niceness,
        )

    def start(self, *groups: ChildSpec | list[ChildSpec]) -> asyncio.Task[int]:
        """A child that is not in a list is a group of its own."""

        def announce() -> None:
            self.is_announcing = True
            self.may_announce.wait(20)
            self.is_announced = True

        supervisor = Supervisor(
            [group if isinstance(group, list) else [group] for group in groups],
            on_ready=announce,
            on_end=self.ended.append,
            log=self.said.append,
        )
        return asyncio.create_task(supervisor.run())

    def events(self) -> list[str]:
        """Name and what it did."""
        return [line.rpartition(" ")[0] for line in self._lines()]

    def pids(self, event: str) -> list[int]:
        return [int(line.rpartition(" ")[2]) for line in self._lines() if line.startswith(event)]

    def _lines(self) -> list[str]:
        return self.log.read_text().splitlines() if self.log.exists() else []

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(20):
            while not condition():  # noqa: ASYNC110 - it comes true in another process
                await asyncio.sleep(0.01)


@pytest.fixture
async def stage(tmp_path: Path) -> AsyncIterator[Stage]:
    stage = Stage(tmp_path)
    yield stage
    for pid in stage.pids(""):
        await stage.until(lambda pid=pid: not psutil.pid_exists(pid))  # type: ignore[misc]


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateway.supervisor, "FIRST_DELAY_S", 0.05)
    monkeypatch.setattr(gateway.supervisor, "STOP_S", 1.0)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_a_signal_stops_the_children_in_their_order(stage: Stage, number: signal.Signals) -> None:
    running = stage.start(stage.child("gateway", "obedient"), stage.child("engine", "obedient"))
    await stage.until(lambda: len(stage.events()) == 2)
    os.kill(os.getpid(), number)

    assert await running == 0
    assert stage.events()[2:] == ["gateway told", "gateway left", "engine told", "engine left"]


async def test_readiness_is_announced_once_every_gateway_has_told_it(stage: Stage) -> None:
    gateways = [stage.child("gateway-1", "obedient"), stage.child("gateway-2", "slow")]
    running = stage.start(gateways, stage.child("engine", "obedient"))
    await stage.until(lambda: len(stage.events()) == 3)
    os.kill(stage.pids("gateway-1 started")[0], signal.SIGKILL)
    await stage.until(lambda: len(stage.pids("gateway-1 started")) == 2)
    assert not stage.is_announced, "one that is ready twice is not two that are ready"
    os.kill(os.getpid(), signal.SIGTERM)

    assert await running == 0
    running = stage.start([gateways[0], stage.child("gateway-2", "obedient")])
    await stage.until(lambda: stage.is_announced)
    os.kill(os.getpid(), signal.SIGTERM)

    assert await running == 0


async def test_what_is_done_when_all_is_ready_is_done_to_its_end(stage: Stage) -> None:
    stage.may_announce.clear()
    running = stage.start(stage.child("gateway", "obedient"))
    await stage.until(lambda: stage.is_announcing)
    os.kill(os.getpid(), signal.SIGTERM)

    assert await running == 0
    assert not stage.is_announced
    stage.may_announce.set()
    await stage.until(lambda: stage.is_announced)


async def test_all_workers_drain_at_once_and_the_engine_outlives_them(stage: Stage) -> None:
    gateways = [stage.child(f"gateway-{i}", "busy", drain_s=1000) for i in (1, 2, 3)]
    running = stage.start(gateways, stage.child("engine", "obedient"))
    await stage.until(lambda: len(stage.events()) == 4)
    os.kill(os.getpid(), signal.SIGTERM)
    await stage.until(lambda: len(stage.events()) == 7)
    assert sorted(stage.events()[4:]) == ["gateway-1 told", "gateway-2 told", "gateway-3 told"]
    for pid in stage.pids("gateway-1 started") + stage.pids("gateway-3 started"):
        os.kill(pid, signal.SIGTERM)
    await stage.until(lambda: len(stage.ended) == 2)
    assert not any(event.startswith("engine told") for event in stage.events())
    os.kill(stage.pids("gateway-2 started")[0], signal.SIGTERM)

    assert await running == 0
    assert stage.ended[2:] == ["gateway-2", "engine"]
    assert stage.events()[-2:] == ["engine told", "engine left"]


async def test_a_worker_that_dies_is_started_again_beside_the_others(stage: Stage) -> None:
    running = stage.start([stage.child(f"gateway-{i}", "obedient") for i in (1, 2)])
    await stage.until(lambda: len(stage.events()) == 2)
    os.kill(stage.pids("gateway-2 started")[0], signal.SIGKILL)
    await stage.until(lambda: len(stage.pids("gateway-2 started")) == 2)
    assert stage.ended == ["gateway-2"]
    os.kill(os.getpid(), signal.SIGTERM)

    assert await running == 0
    assert len(stage.pids("gateway-1 started")) == 1


async def test_a_second_signal_cuts_a_drain_short(stage: Stage) -> None:
    running = stage.start(stage.child("gateway", "busy", drain_s=1000), stage.child("engine", "obedient"))
    await stage.until(lambda: len(stage.events()) == 2)
    os.kill(os.getpid(), signal.SIGTERM)
    await stage.until(lambda: stage.events()[2:] == ["gateway told"])
    os.kill(os.getpid(), signal.SIGTERM)

    assert await running == 0
    assert stage.events()[2:] == ["gateway told", "gateway told", "gateway left", "engine told", "engine left"]


async def test_a_child_that_does_not_obey_is_killed(stage: Stage) -> None:
    running = stage.start(stage.child("gateway", "deaf"), stage.child("engine", "obedient"))
    await stage.until(lambda: len(stage.events()) == 2)
    os.kill(os.getpid(), signal.SIGTERM)

    assert await running == 0
    assert stage.events()[2:] == ["gateway told", "engine told", "engine left"]
    assert "gateway did not stop in time and was killed" in stage.said


async def test_a_child_that_dies_is_started_again_and_the_others_stay(stage: Stage) -> None:
    running = stage.start(stage.child("gateway", "obedient"), stage.child("engine", "obedient"))
    await stage.until(lambda: len(stage.events()) == 2)
    os.kill(stage.pids("engine started")[0], signal.SIGKILL)
    await stage.until(lambda: len(stage.pids("engine started")) == 2)
    os.kill(os.getpid(), signal.SIGTERM)

    assert await running == 0
    assert len(stage.pids("gateway started")) == 1
    assert stage.said[0] == "engine was ended by SIGKILL; starting it again in 0 s"


async def test_the_wait_before_a_restart_doubles_up_to_a_bound(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateway.supervisor, "LAST_DELAY_S", 0.2)
    started = time.monotonic()
    running = stage.start(stage.child("engine", "frail"))
    await stage.until(lambda: len(stage.pids("engine started")) == 5)
    assert time.monotonic() - started > 0.05 + 0.1 + 0.2 + 0.2
    os.kill(os.getpid(), signal.SIGTERM)

    assert await running == 0
    assert stage.said[0] == "engine left with exit code 3; starting it again in 0 s"


async def test_a_signal_does_not_wait_for_a_restart(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateway.supervisor, "FIRST_DELAY_S", 1000.0)
    running = stage.start(stage.child("engine", "frail"))
    await stage.until(lambda: bool(stage.said))
    os.kill(os.getpid(), signal.SIGTERM)

    assert await running == 0


async def test_a_child_that_cannot_work_as_it_is_set_up_ends_everything(stage: Stage) -> None:
    running = stage.start(stage.child("gateway", "slow"), stage.child("engine", "misconfigured"))

    assert await running == CONFIG_EXIT
    assert not stage.is_announced


async def test_children_are_deaf_to_the_interrupt_key(stage: Stage) -> None:
    running = stage.start(stage.child("gateway", "obedient"), stage.child("engine", "obedient"))
    await stage.until(lambda: len(stage.events()) == 2)
    for pid in stage.pids(""):
        os.kill(pid, signal.SIGINT)
    os.kill(os.getpid(), signal.SIGINT)

    assert await running == 0
    assert stage.events()[2:] == ["gateway told", "gateway left", "engine told", "engine left"]


async def test_children_share_the_session_and_keep_their_niceness(stage: Stage) -> None:
    running = stage.start(stage.child("gateway", "obedient", niceness=5), stage.child("engine", "obedient"))
    await stage.until(lambda: len(stage.events()) == 2)
    pids = stage.pids("gateway"), stage.pids("engine")
    own = os.getpriority(os.PRIO_PROCESS, 0)
    niceness = [os.getpriority(os.PRIO_PROCESS, pid) - own for (pid,) in pids]
    sessions = {os.getsid(pid) for (pid,) in pids}
    os.kill(os.getpid(), signal.SIGTERM)

    assert await running == 0
    assert niceness == [5, 0]
    assert sessions == {os.getsid(0)}


async def test_a_killed_supervisor_leaves_nobody_behind(stage: Stage) -> None:
    children = [(name, stage.child(name, "deaf").command) for name in ("gateway", "engine")]
    script = f"""
import asyncio, os
from gateway.supervisor import ChildSpec, Supervisor
children = [ChildSpec(name=name, command=command, environment=os.environ) for name, command in {children}]
asyncio.run(Supervisor([children], on_ready=lambda: None, log=print).run())
"""
    supervisor = await asyncio.create_subprocess_exec(sys.executable, "-c", script)
    await stage.until(lambda: len(stage.events()) == 2)
    supervisor.kill()
    await supervisor.wait()

    await stage.until(lambda: sorted(stage.events()[2:]) == ["engine orphaned", "gateway orphaned"])
