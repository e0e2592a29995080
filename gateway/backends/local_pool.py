"""Opens the local pool: the client of the engine pool, and what it takes to read and write its models' text."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass

from engine.carriers.zeromq_client import ZeroMQClient
from engine.client import EngineClient
from engine.errors import EngineUnavailable
from engine.link import EngineLink
from engine.models.fetch import resolve_model
from engine.router import FirstReady
from engine.standing import TeamShare
from engine.text.assets import load_text
from gateway.backends.curve import curve_keys
from gateway.backends.local import LocalBackend
from gateway.backends.local_finals import LocalFinals
from gateway.settings import Settings
from gateway.telemetry.metrics import EngineLoad
from gateway.telemetry.team_metrics import TeamLoad

logger = logging.getLogger(__name__)

ENGINE_ID = "engine-0"
"""The one engine of today's pool; `engine.config.EngineConfig` has the same name as its default."""
COMPLAIN_EVERY_S = 10.0
LOAD_WITHIN_S = 1.0
"""How long an engine may take to tell its load."""


@dataclass(frozen=True, slots=True)
class LocalPool:
    """The pool of engines, as a backend and as what it is made of.

    Attributes:
        model: the name of the model that it serves.
    """

    backend: LocalBackend
    client: EngineClient
    model: str

    @asynccontextmanager
    async def connection(self) -> AsyncIterator[None]:
        """To be held as long as the backend is used. The engine may come later, and come back."""
        await self.client.start()
        complaining = asyncio.create_task(self._complain())
        try:
            yield
        finally:
            complaining.cancel()
            await self.client.close()

    @property
    def finals(self) -> LocalFinals:
        """The engines' final counts of gateways that were lost."""
        return LocalFinals(self.client)

    async def _complain(self) -> None:
        """Say why the engine is not there, as long as it has never been. Of later losses its link tells."""
        while True:
            try:
                await self.client.wait_up(self.model, COMPLAIN_EVERY_S)
            except EngineUnavailable as e:
                logger.warning("%s", e)
            else:
                return

    async def load(self) -> EngineLoad | None:
        """How busy the engine is; None if it is down or does not say."""
        try:
            async with asyncio.timeout(LOAD_WITHIN_S):
                stats = await self.client.stats(self.model)
        except (EngineUnavailable, TimeoutError):
            return None
        return EngineLoad(
            model=self.model,
            num_running=stats.num_running,
            num_waiting=stats.num_waiting,
            num_free_blocks=stats.num_free_blocks,
            num_used_blocks=stats.num_blocks - stats.num_free_blocks,
            teams=tuple([_team_load(share) for share in stats.teams]),
        )

    def set_weights(self, weights: Mapping[str, int]) -> None:
        """These are the weights of all fairness nodes that have one now; the engines are told what has changed."""
        self.backend.weights.read(weights)


def _team_load(share: TeamShare) -> TeamLoad:
    return TeamLoad(
        node_id=share.team_id,
        entitled_ppm=share.entitled_ppm,
        served_us=share.served_us,
        lag_us=share.lag_us,
        num_waiting=share.num_waiting,
        num_parked=share.num_parked,
        num_slots=share.num_slots,
        num_borrowed_slots=share.num_borrowed_slots,
        num_lent_slots=share.num_lent_slots,
    )


def open_local_pool(settings: Settings, client_id: str | None = None) -> LocalPool:
    """Fetches the model if it is not there: the gateway reads its tokenizer and template.

    Args:
        client_id: this gateway's name at the engines, under which they keep final counts for it; None draws one.

    Raises:
        ModelLoadError: there is no such model, or its tokenizer or template cannot be used.
        ConfigError: the endpoint or its keys cannot work.
    """
    path, name = resolve_model(settings.engine.model, settings.home)
    carrier = ZeroMQClient(settings.engine_endpoint, curve=curve_keys(settings.engine))
    client = EngineClient([EngineLink(ENGINE_ID, carrier)], FirstReady(), client_id=client_id)
    return LocalPool(LocalBackend(client, {name: load_text(path)}), client, name)
