"""POST /v1/completions."""

from typing import Any

from litestar import Controller, Request, post
from litestar.di import NamedDependency
from litestar.types import ASGIApp

from gateway.domain.session import SessionHints
from gateway.web.decoding import BodyDecoder
from gateway.web.inference import InferenceHttp, deadline_ms
from gateway.web.openai.completion_events import CompletionAnswer, CompletionStream
from gateway.web.openai.requests import completion_to_domain
from gateway.web.openai.schema import CompletionRequest

_body = BodyDecoder(CompletionRequest)


class CompletionsController(Controller):
    """Text completions."""

    path = "/completions"
    tags = ("Completions",)

    @post(status_code=200, operation_id="createCompletion")
    async def create(self, request: Request[Any, Any, Any], inference: NamedDependency[InferenceHttp]) -> ASGIApp:
        """Continue one or more texts, streamed or whole."""
        scope = request.scope
        wire = await inference.read(scope, request.receive, _body)
        wanted = completion_to_domain(wire, deadline_ms(scope))
        hints = SessionHints(prompt_cache_key=wire.prompt_cache_key)
        call = await inference.prepare(scope, wanted, hints, "completions", stream=bool(wire.stream))
        if wire.stream:
            return inference.stream(call, CompletionStream(call, include_usage=wire.wants_usage))
        return inference.answer(call, CompletionAnswer(call, with_logprobs=wire.logprobs is not None))
