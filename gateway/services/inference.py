"""One request from start to settlement: the only path there is, streamed or not, whatever the protocol.

`Inference.prepare` does all that can be refused without having consumed anything; the `Call` it returns does the rest.
What a key may use, and how much of it may wait, holds here for every protocol. Knows nothing of HTTP, tokens or
metrics.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from gateway.domain.principal import lowest
from gateway.domain.record import RequestInfo
from gateway.domain.request import Conversation, GenerationRequest, Message, Prompt, Text
from gateway.errors import ModelNotFound, NotAllowed
from gateway.services.call import Call
from gateway.services.catalog import Catalog, Resolved
from gateway.services.limiter import Limiter
from gateway.services.ports import Backend, Clock, Recorder
from gateway.services.waiting import WaitingRequests

CHECKED_CHARACTERS = 2_000
"""Longer prompts are looked at only if there is room for one token: that is cheaper than to tokenize them."""


class Inference:
    """The use case "answer a request"."""

    def __init__(self, backend: Backend, catalog: Catalog, clock: Clock, recorder: Recorder, limiter: Limiter) -> None:
        self._limiter = limiter
        self._backend = backend
        self._catalog = catalog
        self._clock = clock
        self._recorder = recorder
        self._waiting = WaitingRequests()

    async def prepare(self, request: GenerationRequest, info: RequestInfo) -> Call:
        """Raises what `Backend.prepare` raises, `NotAllowed`, `StorageDown`, `LimitExceeded` and `LimitsUnavailable`;
        nothing has been consumed then.

        Args:
            info: its class is the one asked for; that of an alias may lower it.
        """
        arrived = self._clock.monotonic()
        principal = info.principal
        if principal.endpoints is not None and info.endpoint not in principal.endpoints:
            raise NotAllowed(f"This API key may not be used for {info.endpoint}.", code="endpoint_not_allowed")
        resolved = await self._catalog.resolve(request.model, principal)
        if resolved.request_class is not None:
            info = msgspec.structs.replace(info, request_class=lowest(info.request_class, resolved.request_class))
        self._limiter.guard(principal, resolved.model, resolved.prices)
        if _num_characters(request.prompts) > CHECKED_CHARACTERS:
            await self._limiter.check(info, resolved.model, resolved.prices)
        try:
            prepared = await self._backend.prepare(_as_resolved(request, resolved, principal.deadline_ms))
        except ModelNotFound as e:
            raise ModelNotFound(request.model) from e  # by the name that was asked for
        return Call(
            prepared,
            info,
            arrived,
            self._clock,
            self._recorder,
            self._waiting,
            self._limiter,
            requested_model=request.model,
            prices=resolved.prices,
            num_prompts=len(request.prompts),
            num_choices=request.num_answers,
        )


def _as_resolved(request: GenerationRequest, resolved: Resolved, deadline_ms: int | None) -> GenerationRequest:
    """The request as the backend gets it: with the model that answers, and with what key and alias add."""
    changes: dict[str, Any] = {}
    if resolved.model != request.model:
        changes["model"] = resolved.model
    if resolved.system_default is not None:
        changes["prompts"] = tuple(_with_system(prompt, resolved.system_default) for prompt in request.prompts)
    if request.deadline_ms is None and deadline_ms is not None:
        changes["deadline_ms"] = deadline_ms
    return msgspec.structs.replace(request, **changes) if changes else request


def _num_characters(prompts: Sequence[Prompt]) -> int:
    num = 0
    for prompt in prompts:
        if isinstance(prompt, Conversation):
            num += sum(len(message.content) for message in prompt.messages)
        else:
            num += len(prompt.text if isinstance(prompt, Text) else prompt.token_ids)
    return num


def _with_system(prompt: Prompt, default: str) -> Prompt:
    if not isinstance(prompt, Conversation) or any(message.role == "system" for message in prompt.messages):
        return prompt
    return Conversation((Message("system", default), *prompt.messages))
