"""Text completions, outward: the stream of chunks and the whole answer.

A stream is chunks with text, for each choice one with empty text and the finish_reason, the usage if asked for, and
``[DONE]``. With `echo` a choice's text begins with its prompt.
"""

from __future__ import annotations

from collections.abc import Sequence

from gateway.domain.events import GenerationEvent, TextDelta, TokenLogprob
from gateway.domain.ids import REQUEST_PREFIX
from gateway.domain.usage import TokenUsage
from gateway.services.call import Call
from gateway.web.openai.chat_events import FINGERPRINT
from gateway.web.openai.events import ChunkStream, CollectedChoices, encode, finish_json, finite, usage_json


def _head(call: Call) -> bytes:
    """The fields before the choices; chunks and whole answers are of one kind here."""
    return encode(
        {
            "id": "cmpl-" + call.info.request_id.removeprefix(REQUEST_PREFIX),
            "object": "text_completion",
            "created": call.created,
            "model": call.requested_model,
            "system_fingerprint": FINGERPRINT,
        }
    )[:-1]


def _echoes(call: Call) -> list[str]:
    """What each choice begins with."""
    texts = call.prepared.echo_texts
    if not texts:
        return [""] * call.num_choices
    return [text for text in texts for _ in range(call.num_choices // len(texts))]


class CompletionStream(ChunkStream):
    """Chunks of a text completion."""

    def __init__(self, call: Call, *, include_usage: bool) -> None:
        super().__init__(_head(call), include_usage=include_usage)
        self._choices = [b'%b,"choices":[{"index":%d,"text":' % (self._head, i) for i in range(call.num_choices)]
        self._echoes = _echoes(call)
        self._offsets = [len(echo) for echo in self._echoes]

    def _event(self, event: GenerationEvent) -> bytes:
        index = event.choice
        echo, self._echoes[index] = self._echoes[index], ""
        if isinstance(event, TextDelta):
            logprobs = b"null"
            if event.logprobs:
                logprobs = encode(_logprobs(event.logprobs, self._offsets[index]))
                self._offsets[index] += _num_characters(event.logprobs)
            return (
                self._choices[index]
                + encode(echo + event.text)
                + b',"logprobs":'
                + logprobs
                + b',"finish_reason":null}'
                + self._tail
            )
        return (
            self._choices[index]
            + encode(echo)
            + b',"logprobs":null,'
            + finish_json(event.reason, event.cause)
            + b"}"
            + self._tail
        )


class CompletionAnswer:
    """Collects the events of one call into a whole answer."""

    def __init__(self, call: Call, *, with_logprobs: bool) -> None:
        self._call = call
        self._with_logprobs = with_logprobs
        self._echoes = _echoes(call)
        self._choices = CollectedChoices(call.num_choices)

    def add(self, events: Sequence[GenerationEvent]) -> None:
        self._choices.add(events)

    def finish(self, usage: TokenUsage) -> bytes:
        choices = [
            {
                "index": i,
                "text": self._echoes[i] + "".join(self._choices.texts[i]),
                "logprobs": _logprobs(self._choices.logprobs[i], len(self._echoes[i])) if self._with_logprobs else None,
                "finish_reason": self._choices.reasons[i],
                **({} if self._choices.causes[i] is None else {"stop_reason": self._choices.causes[i]}),
            }
            for i in range(self._call.num_choices)
        ]
        return _head(self._call) + b',"choices":' + encode(choices) + b',"usage":' + usage_json(usage) + b"}"


def _logprobs(tokens: Sequence[TokenLogprob], offset: int) -> dict[str, object]:
    """The legacy shape: parallel lists. `text_offset` counts characters from the text's beginning, echo included."""
    offsets = []
    for token in tokens:
        offsets.append(offset)
        offset += len(token.chosen.token)
    return {
        "tokens": [token.chosen.token for token in tokens],
        "token_logprobs": [finite(token.chosen.logprob) for token in tokens],
        "top_logprobs": [{chance.token: finite(chance.logprob) for chance in token.top} for token in tokens],
        "text_offset": offsets,
    }


def _num_characters(tokens: Sequence[TokenLogprob]) -> int:
    return sum(len(token.chosen.token) for token in tokens)
