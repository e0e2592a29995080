"""Keeps the processes of one machine alive, and takes them down in order.

Each child inherits one end of a socket whose other end only the supervisor has: its end of file tells the child that
the supervisor is gone, however it died, so nothing is orphaned. By a line on it the child tells that it is ready for
work; nothing else would do for children that share a port. Children share the supervisor's system session:
with a session each, the scheduler would give the gateway half of a core that the engine's threads are waiting on.
Knows processes, signals and exit codes; nothing of engines, HTTP or settings.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

CONFIG_EXIT = 78
"""sysexits' EX_CONFIG: the child cannot work as it is set up, so starting it again is of no use."""
FIRST_DELAY_S = 1.0
LAST_DELAY_S = 30.0
HEALTHY_S = 60.0
"""A child that lived this long has its next restart without a delay doubled by earlier ones."""
READY_LINE = b"ready\n"
"""What a child writes to the supervisor when it is ready."""
STOP_S = 10.0
"""How long after its orders a child may take to leave before it is killed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildSpec:
    """How to start a process.

    Attributes:
        name: for messages.
        command: without the option that names the socket; ``--supervisor-fd N`` is added.
        environment: all of it.
        tells_ready: it writes `READY_LINE`, and the whole is not ready before it has.
        niceness: added to the supervisor's own.
        drain_s: how long it may take to finish its work after SIGTERM, beside `STOP_S`. A second SIGTERM cuts it short.
    """

    name: str
    command: Sequence[str]
    environment: Mapping[str, str]
    tells_ready: bool = False
    niceness: int = 0
    drain_s: float = 0.0


class _Child:
    """A child and where it stands.

    Attributes:
        process: while it runs.
        ready: it has told that it was, in this life or an earlier one.
        gone: it has left and will not be started again.
    """

    def __init__(self, spec: ChildSpec) -> None:
        self.spec = spec
        self.process: subprocess.Popen[bytes] | None = None
        self.ready = asyncio.Event()
        self.gone = asyncio.Event()

    async def run(self) -> int:
        """Run it once; the exit code, negative for the signal that ended it."""
        lifeline, inherited = socket.socketpair()
        lifeline.setblocking(False)
        with lifeline:
            with inherited:
                self.process = self._start(inherited.fileno())
            hearing = asyncio.create_task(self._hear(lifeline))
            try:
                return await asyncio.to_thread(self.process.wait)
            finally:
                self.process = None
                hearing.cancel()
                await asyncio.wait((hearing,))

    async def _hear(self, lifeline: socket.socket) -> None:
        heard = b""
        # The other end is closed when the child leaves, with an error if it had not read everything.
        with suppress(OSError):
            while READY_LINE not in heard:
                part = await asyncio.get_running_loop().sock_recv(lifeline, len(READY_LINE))
                if not part:
                    return
                heard = heard[-len(READY_LINE) :] + part
            self.ready.set()

    def _start(self, lifeline: int) -> subprocess.Popen[bytes]:
        command = [*self.spec.command, "--supervisor-fd", str(lifeline)]
        # A key press sends SIGINT to the whole group. The mask is inherited, so that a child is deaf to it from its
        # first instruction on, and a SIGINT to us in these milliseconds is only late.
        previous = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            process = subprocess.Popen(  # noqa: S603 - the command is ours
                command, env=dict(self.spec.environment), stdin=subprocess.DEVNULL, pass_fds=(lifeline,)
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, previous)
        if self.spec.niceness:
            os.setpriority(os.PRIO_PROCESS, process.pid, os.getpriority(os.PRIO_PROCESS, 0) + self.spec.niceness)
        return process

    def signal(self, number: signal.Signals) -> None:
        if self.process is not None:
            self.process.send_signal(number)


class Supervisor:
    """Runs children until a signal, and restarts those that die.

    Args:
        groups: the children. They are stopped group by group, all of one at once, and those of the next only after the
            last one of it has left.
        on_ready: called once, in a thread, when every child that tells it has been ready; a signal does not cut it
            short.
        on_end: called with a child's name each time that it has ended.
        log: takes one line for people.
    """

    def __init__(
        self,
        groups: Sequence[Sequence[ChildSpec]],
        *,
        on_ready: Callable[[], None],
        log: Callable[[str], None],
        on_end: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._groups = [[_Child(spec) for spec in group] for group in groups]
        self._on_ready = on_ready
        self._on_end = on_end
        self._log = log
        self._stopping = asyncio.Event()
        self._hurry = asyncio.Event()
        self._is_ready = False
        self._exit_code = 0

    async def run(self) -> int:
        """Start everything, return the exit code when everything is gone: 0, or `CONFIG_EXIT`."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._on_signal)
        try:
            async with asyncio.TaskGroup() as group:
                announcing = group.create_task(self._announce())
                for children in self._groups:
                    for child in children:
                        group.create_task(self._keep(child))
                await self._stopping.wait()
                announcing.cancel()
                for children in self._groups:
                    await asyncio.gather(*(self._stop(child) for child in children))
        finally:
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.remove_signal_handler(number)
        return self._exit_code

    def _on_signal(self) -> None:
        if self._stopping.is_set():
            self._log("stopping now")
            self._hurry.set()
        else:
            self._log("stopping; running requests may finish, another signal cuts them short")
        self._stopping.set()

    async def _announce(self) -> None:
        for children in self._groups:
            for child in children:
                if child.spec.tells_ready:
                    await child.ready.wait()
        self._is_ready = True
        await asyncio.to_thread(self._on_ready)

    async def _keep(self, child: _Child) -> None:
        delay_s = FIRST_DELAY_S
        try:
            while not self._stopping.is_set():
                started = time.monotonic()
                code = await child.run()
                self._on_end(child.spec.name)
                if self._stopping.is_set():
                    return
                if code == CONFIG_EXIT and not self._is_ready:
                    self._exit_code = CONFIG_EXIT
                    self._stopping.set()
                    return
                if time.monotonic() - started > HEALTHY_S:
                    delay_s = FIRST_DELAY_S
                self._log(f"{child.spec.name} {_how(code)}; starting it again in {delay_s:.0f} s")
                await self._first(self._stopping, within_s=delay_s)
                delay_s = min(2 * delay_s, LAST_DELAY_S)
        finally:
            child.gone.set()

    async def _stop(self, child: _Child) -> None:
        child.signal(signal.SIGTERM)
        if not self._hurry.is_set():
            await self._first(child.gone, self._hurry, within_s=child.spec.drain_s + STOP_S)
        if self._hurry.is_set() and not child.gone.is_set():
            child.signal(signal.SIGTERM)
            await self._first(child.gone, within_s=STOP_S)
        if not child.gone.is_set():
            child.signal(signal.SIGKILL)
            self._log(f"{child.spec.name} did not stop in time and was killed")
            await child.gone.wait()

    @staticmethod
    async def _first(*events: asyncio.Event, within_s: float) -> None:
        """Return when one of the events is set, or the time is over."""
        waits = [asyncio.create_task(event.wait()) for event in events]
        await asyncio.wait(waits, timeout=within_s, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()


def _how(code: int) -> str:
    return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"left with exit code {code}"
