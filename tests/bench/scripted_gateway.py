"""The gateway as it ships, database, ledger, logs and metrics included, but with answers from a script.

    python tests/bench/scripted_gateway.py

Its settings come from the environment, like those of ``evenhand gateway``. A model is called for the number of words it
says, one chunk each: ``words-8``, ``words-72``.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager

import uvloop

from engine.garbage import collect_less_often
from gateway.app import create_app
from gateway.backends.scripted import Script, ScriptedBackend
from gateway.http_server import serve_http
from gateway.services.recovery import FinalsPage
from gateway.settings import Settings
from gateway.settings_sources import load_settings
from gateway.shutdown import Shutdown

WORDS = (8, 72)


class ScriptedPool:
    """Implements `gateway.app.Pool` without an engine."""

    model = f"words-{WORDS[0]}"

    def __init__(self, _settings: Settings, _writer_id: str) -> None:
        scripts = {f"words-{n}": Script.saying(*(f"word{i} " for i in range(n)), finish="length") for n in WORDS}
        self.backend = ScriptedBackend(scripts, window=1000, num_kept=0)

    @property
    def finals(self) -> ScriptedPool:
        return self

    async def collect(self, writer_id: str, acknowledge: Sequence[str] = ()) -> FinalsPage:
        del writer_id, acknowledge
        return FinalsPage([], is_complete=True)

    @asynccontextmanager
    async def connection(self) -> AsyncIterator[None]:
        yield

    async def load(self) -> None:
        return None

    def set_weights(self, weights: Mapping[str, int]) -> None:
        del weights


async def serve(settings: Settings) -> None:
    shutdown = Shutdown()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, shutdown.request)
    app = create_app(settings, shutdown=shutdown, open_pool=ScriptedPool)
    collect_less_often()
    async with app.lifespan():
        await serve_http(app, settings.server, settings.server.host, shutdown)


if __name__ == "__main__":
    uvloop.run(serve(load_settings().settings))
