"""Which engine of the pool runs a request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from engine.messages import Ready


class Router(Protocol):
    """Called once for each request, on the event loop: must be quick."""

    def pick(self, model: str, prompt_token_ids: Sequence[int], candidates: Sequence[Ready]) -> str:
        """The engine_id of one of the candidates: engines that are up and serve the model, at least one."""
        ...


class FirstReady:
    """`Router` that takes the first engine that is up, in the order of configuration."""

    def pick(self, model: str, prompt_token_ids: Sequence[int], candidates: Sequence[Ready]) -> str:  # noqa: ARG002
        return candidates[0].engine_id
