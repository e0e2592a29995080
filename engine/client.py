"""The gateway's client of a pool of engines: pick one, submit, stream; nothing here knows how frames travel."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Sequence
from typing import NamedTuple

from engine.errors import EngineUnavailable, RequestRejected
from engine.link import EngineLink
from engine.messages import (
    ChargeExternal,
    FinalCounts,
    PathNode,
    Ready,
    RequestClass,
    SetWeight,
    Stats,
    Submit,
    ToEngine,
)
from engine.router import Router
from engine.sampling_params import SamplingParams
from engine.standing import Standing
from engine.stream import OutputStream

logger = logging.getLogger(__name__)


class CollectedFinals(NamedTuple):
    """Final counts of one client, from all engines.

    Attributes:
        is_complete: every engine has answered, and none will have more of this client (`engine.messages.Finals`).
    """

    counts: Sequence[FinalCounts]
    is_complete: bool


class EngineClient:
    """A pool of engines on one event loop (asyncio or uvloop).

    Args:
        links: one for each engine; the client starts and closes them.
        client_id: this gateway's name at the engines. A gateway that is to collect the final counts of its own earlier
            life must have the same name again; None draws a fresh one.
    """

    def __init__(self, links: Sequence[EngineLink], router: Router, *, client_id: str | None = None) -> None:
        self._links = {link.engine_id: link for link in links}
        assert len(self._links) == len(links), "each engine of a pool has its own engine_id"
        self._router = router
        self._client_id = client_id or secrets.token_hex(8)
        self._change = asyncio.Event()

    async def start(self) -> None:
        """Begin to connect to every engine; does not wait for any of them."""
        for link in self._links.values():
            link.start(self._client_id, self._changed)

    async def close(self) -> None:
        """End every connection; open streams raise `EngineUnavailable`, and the engines abort their requests."""
        for link in self._links.values():
            await link.close()

    # --- what is there ----------------------------------------------------------------------------------------------

    def card(self, model: str) -> Ready | None:
        """What the pool knows of a model, also while its engine is down; None before an engine has told of it."""
        serving = self._serving(model)
        return next((link.card for link in serving if link.is_up), serving[0].card if serving else None)

    def is_up(self, model: str) -> bool:
        return any(link.is_up for link in self._serving(model))

    async def wait_up(self, model: str, timeout_s: float) -> None:
        """Raises `EngineUnavailable`, which says why, if no engine serves the model within timeout_s."""
        try:
            async with asyncio.timeout(timeout_s):
                while not self.is_up(model):
                    await self._change.wait()
        except TimeoutError as e:
            raise EngineUnavailable(f"model '{model}' is not up after {timeout_s:g} s: {self._why_down()}") from e

    # --- requests ---------------------------------------------------------------------------------------------------

    def submit(
        self,
        model: str,
        *,
        request_id: str,
        token_ids: Sequence[int],
        sampling: SamplingParams,
        path: Sequence[PathNode],
        output_cap: int,
        request_class: RequestClass = "interactive",
        cache_salt: str = "",
        num_choices: int = 1,
        hold_at_cap: bool = False,
        deadline_ms: int | None = None,
    ) -> OutputStream:
        """Send a request to an engine that serves the model (`engine.messages.Submit` explains the parameters).

        Raises `EngineUnavailable` at once if none of them is up, `RequestRejected` (code ``model_not_served``) if all
        engines have said what they serve and it is not this model. What the engine itself rejects, the stream raises.
        """
        engine_id = self._router.pick(model, token_ids, self._candidates(model))
        submit = Submit(
            engine_id=engine_id,
            request_id=request_id,
            token_ids=list(token_ids),
            sampling=sampling,
            path=tuple(path),
            output_cap=output_cap,
            request_class=request_class,
            cache_salt=cache_salt,
            num_choices=num_choices,
            hold_at_cap=hold_at_cap,
            deadline_ms=deadline_ms,
        )
        return self._links[engine_id].submit(submit)

    # --- control ----------------------------------------------------------------------------------------------------

    async def stats(self, model: str) -> Stats:
        """A snapshot of the first engine that is up and serves the model; raises like `submit`."""
        return await self._links[self._candidates(model)[0].engine_id].stats()

    async def standing(self, request_id: str, other_ids: Sequence[str] = ()) -> Standing:
        """Where a request stands, whichever client submitted it; phase ``unknown`` if no engine has it.

        The engine that this client gave it to is asked, or else all of them.

        Args:
            other_ids: further ids that it, or a part of it, may be known by.

        Raises `EngineUnavailable` if none of those that answer has it and one does not answer.
        """
        known_by = (request_id, *other_ids)
        asked = [link for link in self._links.values() if any(map(link.has, known_by))] or list(self._links.values())
        answers = await asyncio.gather(
            *(link.standing(request_id, other_ids) for link in asked), return_exceptions=True
        )
        failure: BaseException | None = None
        for answer in answers:
            if isinstance(answer, BaseException):
                failure = answer
            elif answer.phase != "unknown":
                return answer
        if failure is not None:
            raise failure
        return Standing()

    def set_weight(self, node_id: str, weight: int) -> None:
        """Tell every engine that is up; one that starts later learns weights from the requests it is sent.

        Raises ValueError for a weight below 1.
        """
        if weight < 1:
            raise ValueError(f"a weight must be at least 1, not {weight}")
        for link in self._links.values():
            self._tell(link, SetWeight(link.engine_id, node_id, weight))

    def charge_external(self, engine_id: str, node_id: str, cost_us: int) -> None:
        """Tell one engine, if it is up, of work that another one did for a node."""
        self._tell(self._links[engine_id], ChargeExternal(engine_id, node_id, cost_us))

    async def collect_finals(self, acknowledge: Sequence[str] = (), *, client_id: str = "") -> CollectedFinals:
        """Final counts that engines keep for this client, or for the one that is named: a page of each that is up.

        They are the same again until `acknowledge` names them, so: settle, acknowledge, and call until it is empty.
        They may name requests whose end that client has seen.
        """
        collected: list[FinalCounts] = []
        is_complete = True
        for link in self._links.values():
            try:
                answer = await link.collect_finals(acknowledge, client_id)
            except EngineUnavailable:  # it has nothing to tell, or tells it when it is asked again
                is_complete = False
                continue
            collected.extend(answer.finals)
            is_complete = is_complete and answer.is_complete
        return CollectedFinals(collected, is_complete)

    # --- inside -----------------------------------------------------------------------------------------------------

    def _serving(self, model: str) -> list[EngineLink]:
        return [link for link in self._links.values() if link.card is not None and link.card.model == model]

    def _candidates(self, model: str) -> list[Ready]:
        candidates = [link.card for link in self._serving(model) if link.is_up and link.card is not None]
        if candidates:
            return candidates
        if not self._serving(model) and all(link.card is not None for link in self._links.values()):
            raise RequestRejected("model_not_served", f"no engine serves model '{model}'")
        raise EngineUnavailable(f"no engine that serves model '{model}' is up: {self._why_down()}")

    def _why_down(self) -> str:
        down = [f"engine '{link.engine_id}': {link.down_because}" for link in self._links.values() if not link.is_up]
        return "; ".join(down) or "the engines serve other models"

    def _tell(self, link: EngineLink, message: ToEngine) -> None:
        try:
            link.send(message)
        except EngineUnavailable as e:
            logger.info("not told to engine %s: %s", link.engine_id, e)

    def _changed(self) -> None:
        self._change.set()
        self._change = asyncio.Event()
