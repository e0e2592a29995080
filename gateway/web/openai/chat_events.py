"""Chat completions, outward: the stream of chunks and the whole answer. Its shape is the OpenAI API's.

A stream is: for each choice a chunk with the role, chunks with content, a chunk with an empty delta and the
finish_reason; then, if asked for, one chunk with no choices and the usage; then ``[DONE]``. Id, created and model are
the same in all of them.
"""

from __future__ import annotations

from collections.abc import Sequence

from gateway import __version__
from gateway.domain.events import GenerationEvent, TextDelta, TokenLogprob
from gateway.domain.ids import REQUEST_PREFIX
from gateway.domain.usage import TokenUsage
from gateway.services.call import Call
from gateway.web.openai.events import ChunkStream, CollectedChoices, encode, finish_json, logprob_entry, usage_json

FINGERPRINT = f"evenhand-{__version__}"


def chat_id(call: Call) -> str:
    return "chatcmpl-" + call.info.request_id.removeprefix(REQUEST_PREFIX)


class ChatStream(ChunkStream):
    """Chunks of a chat completion."""

    def __init__(self, call: Call, *, include_usage: bool) -> None:
        head = encode(
            {
                "id": chat_id(call),
                "object": "chat.completion.chunk",
                "created": call.created,
                "model": call.requested_model,
                "system_fingerprint": FINGERPRINT,
            }
        )
        super().__init__(head[:-1], include_usage=include_usage)
        self._choices = [b'%b,"choices":[{"index":%d,"delta":' % (self._head, i) for i in range(call.num_choices)]
        self._plain_tail = b'},"logprobs":null,"finish_reason":null}' + self._tail
        self._started = [False] * call.num_choices

    def _event(self, event: GenerationEvent) -> bytes:
        choice = self._choices[event.choice]
        role = b""
        if not self._started[event.choice]:
            self._started[event.choice] = True
            role = choice + b'{"role":"assistant","content":"","refusal":null' + self._plain_tail
        if isinstance(event, TextDelta):
            content = choice + b'{"content":' + encode(event.text)
            if not event.logprobs:
                return role + content + self._plain_tail
            return (
                role + content + b'},"logprobs":' + _logprobs(event.logprobs) + b',"finish_reason":null}' + self._tail
            )
        return role + choice + b'{},"logprobs":null,' + finish_json(event.reason, event.cause) + b"}" + self._tail


class ChatAnswer:
    """Collects the events of one call into a whole answer."""

    def __init__(self, call: Call, *, with_logprobs: bool) -> None:
        self._call = call
        self._with_logprobs = with_logprobs
        self._choices = CollectedChoices(call.num_choices)

    def add(self, events: Sequence[GenerationEvent]) -> None:
        self._choices.add(events)

    def finish(self, usage: TokenUsage) -> bytes:
        choices = b",".join([self._choice(i) for i in range(self._call.num_choices)])
        head = encode(
            {
                "id": chat_id(self._call),
                "object": "chat.completion",
                "created": self._call.created,
                "model": self._call.requested_model,
                "system_fingerprint": FINGERPRINT,
            }
        )
        return head[:-1] + b',"choices":[' + choices + b'],"usage":' + usage_json(usage) + b"}"

    def _choice(self, index: int) -> bytes:
        return (
            b'{"index":%d,"message":{"role":"assistant","content":' % index
            + encode("".join(self._choices.texts[index]))
            + b',"refusal":null},"logprobs":'
            + (_logprobs(self._choices.logprobs[index]) if self._with_logprobs else b"null")
            + b","
            + finish_json(self._choices.reasons[index], self._choices.causes[index])
            + b"}"
        )


def _logprobs(tokens: Sequence[TokenLogprob]) -> bytes:
    return encode({"content": [logprob_entry(token) for token in tokens], "refusal": None})
