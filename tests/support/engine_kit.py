"""Engines with a scripted core in threads and processes, and a client of the bare protocol.

Run as a program it is an engine process: `engine_kit.py ENDPOINT [--supervisor-fd N]`.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Generic, Self, TypeVar

import zmq
from scripted_core import PATIENCE_S, ScriptedCore

from engine.carriers.curve import CurveKeys
from engine.carriers.port import ServerCarrier
from engine.carriers.zeromq_server import ZeroMQServer
from engine.messages import (
    CollectFinals,
    FinalCounts,
    Finals,
    FromEngine,
    Hello,
    Output,
    Outputs,
    PathNode,
    Ping,
    Pong,
    Ready,
    Submit,
    ToEngine,
    decode_from_engine,
    encode,
)
from engine.process import new_incarnation, obey, serve
from engine.sampling_params import SamplingParams
from engine.server import Core, EngineServer

ENGINE_ID = "engine-0"
FOREVER = 1 << 40
MODEL = "scripted"
PATH = (PathNode("org"), PathNode("team", 3), PathNode("key"))

M = TypeVar("M", bound=FromEngine)


def collect(client: RawClient, *acknowledge: str) -> dict[str, FinalCounts]:
    """Final counts that the engine keeps for this client; outputs that come in between are skipped."""
    client.send(CollectFinals(ENGINE_ID, acknowledge))
    while True:
        message = client.receive()
        if isinstance(message, Finals):
            return {final.request_id: final for final in message.finals}


def card(engine_id: str = ENGINE_ID, model: str = MODEL) -> Ready:
    return Ready(
        engine_id=engine_id,
        model=model,
        max_model_len=8192,
        vocab_size=50_000,
        eos_token_ids=(2,),
        kv_capacity_tokens=100_000,
        max_sequences=64,
        incarnation=new_incarnation(),
    )


def submit(request_id: str, *, output_cap: int = 4, salt: str = "", **other: object) -> Submit:
    return Submit(
        engine_id=ENGINE_ID,
        request_id=request_id,
        token_ids=[5, 6, 7],
        sampling=SamplingParams(temperature=0.0),
        path=PATH,
        output_cap=output_cap,
        cache_salt=salt,
        **other,  # type: ignore[arg-type]
    )


def until(condition: Callable[[], bool], what: str) -> None:
    """Wait for a condition that another thread or process brings about."""
    deadline = time.monotonic() + PATIENCE_S
    pause = threading.Event()
    while not condition():
        assert time.monotonic() < deadline, f"never came true: {what}"
        pause.wait(0.002)


C = TypeVar("C", bound=Core)


class EngineThread(Generic[C]):
    """A real server in a thread of this process. `ended` is what its loop returned, None while it runs."""

    def __init__(self, core: C, carrier: ServerCarrier, ready: Ready, **options: float) -> None:
        self.core = core
        self.server = EngineServer(core, carrier, ready, linger_s=0.5, **options)  # type: ignore[arg-type]
        self.ended: bool | None = None
        self._thread = threading.Thread(target=self._run, name="engine")

    def _run(self) -> None:
        self.ended = self.server.run()

    @property
    def num_unread_ends(self) -> int:
        """Ends of requests that the engine sent, and does not know yet to have been read."""
        return sum(len(list(session.unread())) for session in self.server._outbox._sessions.values())

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        if isinstance(self.core, ScriptedCore):
            self.core.unblock.set()
        self.server.stop()
        self.join()

    def join(self) -> None:
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive(), "the engine's loop did not end"


class RawClient:
    """A client that speaks messages, and frames that are none, over a real ZeroMQ socket."""

    def __init__(self, endpoint: str, *, curve: CurveKeys | None = None, receive_bound: int | None = None) -> None:
        self._context = zmq.Context()
        self.socket = self._context.socket(zmq.DEALER)
        self.socket.linger = 0
        if receive_bound is not None:
            self.socket.rcvhwm = receive_bound
            self.socket.rcvbuf = 4096
        if curve is not None:
            self.socket.curve_publickey = curve.public_key
            self.socket.curve_secretkey = curve.secret_key
            self.socket.curve_serverkey = next(iter(curve.peer_keys))
        self.socket.connect(endpoint)
        self.num_received = 0

    def close(self) -> None:
        self._context.destroy(linger=0)

    def send(self, message: ToEngine) -> None:
        self.socket.send(encode(message))

    def receive(self, timeout_s: float = PATIENCE_S) -> FromEngine:
        assert self.socket.poll(int(timeout_s * 1000)), "no message came"
        self.num_received += 1
        return decode_from_engine(self.socket.recv())

    def expect(self, kind: type[M]) -> M:
        """The next message, which must be of this kind; signs of life that nobody asked for are skipped."""
        message = self.receive()
        while isinstance(message, Pong) and kind is not Pong:
            message = self.receive()
        assert isinstance(message, kind), f"{kind.__name__} expected: {message}"
        return message

    def hello(self, client_id: str = "raw") -> Ready:
        self.send(Hello(ENGINE_ID, client_id))
        return self.expect(Ready)

    def outputs(self) -> Iterator[Output]:
        """Outputs as they come; every message must be `Outputs`."""
        while True:
            yield from self.expect(Outputs).outputs

    def until_finish(self, request_id: str, num_choices: int = 1) -> list[Output]:
        """All outputs of one request up to its last finish, leaving out those of others."""
        mine: list[Output] = []
        for output in self.outputs():
            if output.request_id == request_id:
                mine.append(output)
                if sum(o.finish is not None for o in mine) == num_choices:
                    break
        return mine

    def ends(self, num: int) -> list[Output]:
        """The next outputs with a finish, whatever their requests."""
        return list(itertools.islice((output for output in self.outputs() if output.finish is not None), num))

    def ping(self) -> None:
        """Wait until the engine has taken in everything sent before."""
        self.send(Ping(ENGINE_ID, self.num_received))
        self.expect(Pong)


class EngineProcess:
    """This file as a process of its own."""

    def __init__(self, endpoint: str, *, supervised: bool = False) -> None:
        root = Path(__file__).parents[2]
        command = [sys.executable, __file__, endpoint]
        pipe = os.pipe() if supervised else None
        if pipe is not None:
            command += ["--supervisor-fd", str(pipe[0])]
        self.process = subprocess.Popen(
            command,
            env={**os.environ, "PYTHONPATH": str(root)},
            stderr=subprocess.PIPE,
            pass_fds=pipe[:1] if pipe is not None else (),
        )
        self._supervisor_end = None
        if pipe is not None:
            os.close(pipe[0])
            self._supervisor_end = pipe[1]

    def lose_supervisor(self) -> None:
        assert self._supervisor_end is not None, "not supervised"
        os.close(self._supervisor_end)
        self._supervisor_end = None

    def kill(self) -> None:
        self.process.kill()

    def wait(self) -> int:
        """The exit code."""
        self.stderr = self.process.communicate(timeout=PATIENCE_S)[1].decode()
        return self.process.returncode

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.wait()
        if self._supervisor_end is not None:
            self.lose_supervisor()


@contextlib.contextmanager
def raw_client(endpoint: str, **options: object) -> Iterator[RawClient]:
    client = RawClient(endpoint, **options)  # type: ignore[arg-type]
    try:
        yield client
    finally:
        client.close()


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("endpoint")
    parser.add_argument("--supervisor-fd", type=int)
    arguments = parser.parse_args()
    obey(arguments.supervisor_fd)
    return serve(ScriptedCore(), ZeroMQServer(arguments.endpoint), card())


if __name__ == "__main__":
    sys.exit(main())
