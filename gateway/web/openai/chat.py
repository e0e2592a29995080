"""POST /v1/chat/completions."""

from typing import Any

from litestar import Controller, Request, post
from litestar.di import NamedDependency
from litestar.types import ASGIApp

from gateway.domain.session import SessionHints
from gateway.web.decoding import BodyDecoder
from gateway.web.inference import InferenceHttp, deadline_ms
from gateway.web.openai.chat_events import ChatAnswer, ChatStream
from gateway.web.openai.requests import chat_to_domain
from gateway.web.openai.schema import ChatRequest

_body = BodyDecoder(ChatRequest)


class ChatController(Controller):
    """Chat completions."""

    path = "/chat/completions"
    tags = ("Chat",)

    @post(status_code=200, operation_id="createChatCompletion")
    async def create(self, request: Request[Any, Any, Any], inference: NamedDependency[InferenceHttp]) -> ASGIApp:
        """Answer a conversation, streamed or whole."""
        scope = request.scope
        wire = await inference.read(scope, request.receive, _body)
        wanted = chat_to_domain(wire, deadline_ms(scope))
        hints = SessionHints(prompt_cache_key=wire.prompt_cache_key, tools=bytes(wire.tools))
        call = await inference.prepare(scope, wanted, hints, "chat", stream=bool(wire.stream))
        if wire.stream:
            return inference.stream(call, ChatStream(call, include_usage=wire.wants_usage))
        return inference.answer(call, ChatAnswer(call, with_logprobs=bool(wire.logprobs)))
