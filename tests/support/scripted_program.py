"""A gateway with a scripted backend, as a process of its own: ``scripted_program.py PORT HEARTBEAT_S SETTINGS``.

SETTINGS are further ones of the server, as JSON; ``door`` among them has `networks` of its key, and how many wrong keys
an address may send (`failed_keys`), counted in the Redis at `redis_url` if there is one. Besides the API it has routes
under ``/control`` with which a test opens gates and sees what became of requests.
"""

import asyncio
import json
import signal
import sys
from typing import Any

import uvloop
from identity_kit import fixed_authenticator
from litestar import Router, get, post
from litestar.params import FromPath, FromQuery
from scripted_server import KEY

from gateway.app import build
from gateway.backends.scripted import Fail, Gate, Pause, Say, Script, ScriptedBackend
from gateway.errors import EngineDown, InvalidRequest
from gateway.http_server import serve_http
from gateway.limits.throttles import Throttles
from gateway.services.authenticate import Authenticator
from gateway.services.throttle import Guesses
from gateway.settings import ServerSettings
from gateway.shutdown import Shutdown
from gateway.telemetry.logging import configure_logging
from gateway.telemetry.shared_metrics import join_shared_metrics

LOST = EngineDown("The engine is not available right now. Please try again shortly.", retry_after_s=2)
BIG_PIECE = "many words " * 400

SCRIPTS = {
    "hello": Script.saying("Hel", "lo", ", ", "world", "!"),
    "silent": Script(steps=()),
    "emoji": Script.saying("a ", "\U0001f468", "\u200d", "\U0001f469", " \u6f22", "\u5b57", " e\u0301", "\n"),
    "eight": Script.saying(*(f"word{i} " for i in range(8)), finish="length"),
    "paced": Script(steps=tuple(step for i in range(20) for step in (Say(f"word{i} "), Pause(0.025)))),
    "two-voices": Script(steps=(Say("left", 0), Say("right", 1), Say(" end"))),
    "cached": Script(steps=(Say("x"),), num_cached_tokens=3),
    "never": Script(steps=(Gate("never"), Say("x"))),
    "gated": Script(steps=(Say("one "), Gate("go"), Say("two"))),
    "one-then-never": Script(steps=(Say("one "), Gate("never"))),
    "endless": Script(steps=(Say(BIG_PIECE),) * 100_000),
    "dies-at-once": Script(steps=(Fail(LOST),)),
    "dies-in-the-middle": Script(steps=(Say("one "), Say("two "), Fail(LOST))),
    "refuses": Script(steps=(), refuse=LOST),
    "rejects-late": Script(steps=(Fail(InvalidRequest("The engine cannot run this request.")),)),
    "breaks": Script(steps=(Say("one "), Fail(ValueError("PURPLE-ELEPHANT")), Say("two"))),
}


def control(backend: ScriptedBackend) -> Router:
    def state(model: str) -> list[dict[str, Any]]:
        return [
            {
                "request_id": generation.info.request_id,
                "num_told": generation.num_told,
                "aborted": generation.aborted,
                "ended": generation.ended,
            }
            for generation in backend.generations
            if generation.request.model == model
        ]

    @get("/generations/{model:str}")
    async def generations(model: FromPath[str]) -> list[dict[str, Any]]:
        return state(model)

    @post("/wait/{model:str}", status_code=200)
    async def wait(
        model: FromPath[str], started: FromQuery[int] = 0, aborted: FromQuery[int] = 0, told: FromQuery[int] = 0
    ) -> list[dict[str, Any]]:
        """Answer once so many requests of the model were started or aborted, or so many events were told."""
        async with asyncio.timeout(20):
            await backend.wait_until(
                lambda: (
                    len(state(model)) >= started
                    and sum(each["aborted"] for each in state(model)) >= aborted
                    and sum(each["num_told"] for each in state(model)) >= told
                )
            )
        return state(model)

    @post("/gates/{name:str}", status_code=200)
    async def open_gate(name: FromPath[str]) -> None:
        backend.gate(name).set()

    @post("/engine/{is_up:int}", status_code=200)
    async def engine(is_up: FromPath[int]) -> None:
        backend.is_up = bool(is_up)

    @post("/reset", status_code=200)
    async def reset() -> None:
        backend.reset()

    return Router("/control", route_handlers=[generations, wait, open_gate, engine, reset])


def doorkeeper(door: dict[str, Any]) -> Authenticator:
    throttles, rate = Throttles(door.get("redis_url")), door.get("failed_keys", "off")
    guesses = Guesses(*(throttles.throttle(name, rate) for name in ("failed", "unknown")))
    networks = door.get("networks")
    return fixed_authenticator(KEY, guesses=guesses, networks=None if networks is None else tuple(networks))


async def serve(port: int, heartbeat_s: float, more: dict[str, Any]) -> None:
    backend = ScriptedBackend(SCRIPTS, window=1000)
    door = more.pop("door", {})
    settings = ServerSettings(**{"port": port, "heartbeat_s": heartbeat_s, "drain_s": 0.5} | more)
    shutdown = Shutdown()
    join_shared_metrics()
    app = build(backend=backend, authenticator=doorkeeper(door), server=settings, shutdown=shutdown)
    app.register(control(backend))
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, shutdown.request)
    async with app.lifespan():
        await serve_http(app, settings, settings.host, shutdown)


if __name__ == "__main__":
    configure_logging("info")
    uvloop.run(serve(int(sys.argv[1]), float(sys.argv[2]), json.loads(sys.argv[3])))
