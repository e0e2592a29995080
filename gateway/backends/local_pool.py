"""Opens the local backend: the client of the engine pool, and what it takes to read and write its models' text."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager

from engine.carriers.zeromq_client import ZeroMQClient
from engine.client import EngineClient
from engine.link import EngineLink
from engine.models.fetch import resolve_model
from engine.router import FirstReady
from engine.text.assets import load_text
from gateway.backends.local import LocalBackend
from gateway.settings import Settings

ENGINE_ID = "engine-0"
"""The one engine of today's pool; `engine.config.EngineConfig` has the same name as its default."""


def open_local_backend(
    settings: Settings,
) -> tuple[LocalBackend, Callable[[object], AbstractAsyncContextManager[None]]]:
    """The backend, and the connection to hold in the application's lifespan. The engine may come later, and come back.

    Fetches the model if it is not there: the gateway reads its tokenizer and template.

    Raises:
        ModelLoadError: there is no such model, or its tokenizer or template cannot be used.
        ConfigError: the endpoint cannot work.
    """
    path, name = resolve_model(settings.engine.model, settings.home)
    client = EngineClient([EngineLink(ENGINE_ID, ZeroMQClient(settings.engine_endpoint))], FirstReady())

    @asynccontextmanager
    async def connection(_: object) -> AsyncIterator[None]:
        await client.start()
        try:
            yield
        finally:
            await client.close()

    return LocalBackend(client, {name: load_text(path)}), connection
