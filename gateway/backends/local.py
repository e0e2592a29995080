"""Answers from our own engines: messages to tokens, tokens to the engine.

Everything that can be known of a request before it runs is found out here: whether its model is served, its exact
number of prompt tokens, whether it can ever fit. `local_generation` turns what the engine says into events.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from engine.errors import EngineUnavailable, RequestRejected, TemplateError
from engine.messages import PathNode, Ready, RequestClass
from engine.sampling_params import SamplingParams
from engine.text.assets import TextAssets
from gateway.backends import local_standing
from gateway.backends.local_generation import LocalGeneration, Stream, to_gateway_error
from gateway.backends.local_weights import EngineWeights
from gateway.domain.catalog import ModelCard
from gateway.domain.ids import RequestId
from gateway.domain.record import RequestInfo
from gateway.domain.request import Conversation, GenerationRequest, Prompt, Sampling, Text
from gateway.domain.standing import LiveRequest
from gateway.errors import ContextLengthExceeded, InvalidRequest, ModelNotFound
from gateway.services.ports import Readiness

COUNTED_CHARACTERS = 500_000
COUNTED_MESSAGES = 10_000
"""Of prompts with more of either it is first found out, without template or tokenizer, whether they can fit at all."""
MESSAGE_CHARACTERS = 20
"""What a template adds to each message, about; for the choice of a thread only."""
INLINE_CHARACTERS = 2000
"""Prompts up to this length are tokenized on the event loop (well under a millisecond); a thread's hop costs more."""


class Client(local_standing.Client, Protocol):
    """What we use of `engine.client.EngineClient`."""

    def card(self, model: str) -> Ready | None: ...

    def is_up(self, model: str) -> bool: ...

    def submit(
        self,
        model: str,
        *,
        request_id: str,
        token_ids: Sequence[int],
        sampling: SamplingParams,
        path: Sequence[PathNode],
        output_cap: int,
        request_class: RequestClass = ...,
        cache_salt: str = ...,
        num_choices: int = ...,
        hold_at_cap: bool = ...,
        deadline_ms: int | None = ...,
    ) -> Stream: ...

    def set_weight(self, node_id: str, weight: int) -> None: ...


class LocalBackend:
    """Implements `gateway.services.ports.Backend` over a pool of engines.

    Args:
        models: name → what is needed to turn its text into tokens and back.

    Attributes:
        weights: what the engines are told of them.
    """

    def __init__(
        self, client: Client, models: Mapping[str, TextAssets], *, time_s: Callable[[], float] = time.time
    ) -> None:
        self._client = client
        self._models = models
        self._standings = local_standing.LocalStandings(client)
        self._created = int(time_s())
        self.weights = EngineWeights(client.set_weight)

    def cards(self) -> Sequence[ModelCard]:
        found = ((name, self._client.card(name)) for name in self._models)
        return [
            ModelCard(id=name, created=self._created, max_model_len=_window(card))
            for name, card in found
            if card is not None
        ]

    def readiness(self) -> Readiness:
        down = [name for name in self._models if not self._client.is_up(name)]
        return Readiness(not down, f"no engine serves {', '.join(down)} right now" if down else "")

    async def standing(self, request_id: RequestId) -> LiveRequest | None:
        return await self._standings.of(request_id)

    async def prepare(self, request: GenerationRequest) -> LocalPrepared:
        assets = self._models.get(request.model)
        if assets is None:
            raise ModelNotFound(request.model)
        card = self._client.card(request.model)
        if card is None or not self._client.is_up(request.model):
            raise to_gateway_error(EngineUnavailable(f"no engine serves {request.model}"))
        if _num_characters(request.prompts) + MESSAGE_CHARACTERS * _num_messages(request.prompts) <= INLINE_CHARACTERS:
            return self._prepare(request, assets, card)
        return await asyncio.to_thread(self._prepare, request, assets, card)

    def _prepare(self, request: GenerationRequest, assets: TextAssets, card: Ready) -> LocalPrepared:
        _check_ids("logit_bias", request.sampling.logit_bias, card.vocab_size)
        _check_ids("stop_token_ids", request.sampling.stop_token_ids, card.vocab_size)
        sampling = _sampling(request.sampling)
        param = "messages" if isinstance(request.prompts[0], Conversation) else "prompt"
        least = _least_tokens(request.prompts, assets)
        if least > _window(card):
            raise ContextLengthExceeded(window=_window(card), num_prompt_tokens=least, param=param)
        try:
            sampling.validate(card.vocab_size)
            token_ids = [_tokenize(prompt, assets) for prompt in request.prompts]
        except (RequestRejected, TemplateError) as e:
            raise InvalidRequest(f"Invalid request: {e}.") from e
        for ids in token_ids:
            if not ids:
                raise InvalidRequest("Invalid 'prompt': it has no tokens.", param=param)
            _check_ids(param, ids, card.vocab_size)
            if len(ids) >= _window(card):
                raise ContextLengthExceeded(window=_window(card), num_prompt_tokens=len(ids), param=param)
        echo = [assets.tokenizer.decode(ids) for ids in token_ids] if request.echo else []
        return LocalPrepared(self._client, self.weights, request, assets, sampling, token_ids, echo, _window(card))


class LocalPrepared:
    """Implements `gateway.services.ports.Prepared`."""

    def __init__(
        self,
        client: Client,
        weights: EngineWeights,
        request: GenerationRequest,
        assets: TextAssets,
        sampling: SamplingParams,
        token_ids: Sequence[Sequence[int]],
        echo_texts: Sequence[str],
        window: int,
    ) -> None:
        self.model = request.model
        self.prompt_lengths = [len(ids) for ids in token_ids]
        self.num_prompt_tokens = sum(self.prompt_lengths)
        self.output_caps = [
            room if request.max_output_tokens is None else min(request.max_output_tokens, room)
            for room in (window - length for length in self.prompt_lengths)
        ]
        self.num_parts = len(token_ids)
        self.echo_texts = echo_texts
        self._client = client
        self._weights = weights
        self._request = request
        self._assets = assets
        self._sampling = sampling
        self._token_ids = token_ids

    def start(
        self, info: RequestInfo, output_caps: Sequence[int] | None = None, held_cap: int | None = None
    ) -> LocalGeneration:
        request = self._request
        caps = self.output_caps if output_caps is None else output_caps
        path = self._weights.path(info.path)
        streams: list[Stream] = []
        try:
            for i, (ids, cap) in enumerate(zip(self._token_ids, caps, strict=True)):
                is_held = held_cap is not None and held_cap < cap
                stream = self._client.submit(
                    self.model,
                    request_id=info.request_id if len(self._token_ids) == 1 else f"{info.request_id}-{i}",
                    token_ids=ids,
                    sampling=self._sampling,
                    path=path,
                    output_cap=held_cap if is_held and held_cap is not None else cap,
                    hold_at_cap=is_held,
                    request_class=info.request_class,
                    cache_salt=info.principal.cache_salt,
                    num_choices=request.num_choices,
                    deadline_ms=request.deadline_ms,
                )
                streams.append(stream)
        except (EngineUnavailable, RequestRejected) as e:
            for stream in streams:
                stream.abort()
            raise to_gateway_error(e) from e
        return LocalGeneration(
            streams,
            tokenizer=self._assets.tokenizer,
            stops=request.stop,
            num_choices=request.num_choices,
            prompt_lengths=self.prompt_lengths,
            output_caps=caps,
        )


def _window(card: Ready) -> int:
    """Most tokens of prompt plus output that can ever run: the model's window or the whole KV pool."""
    return min(card.max_model_len, card.kv_capacity_tokens)


def _num_characters(prompts: Sequence[Prompt]) -> int:
    num = 0
    for prompt in prompts:
        if isinstance(prompt, Conversation):
            num += sum(len(message.content) for message in prompt.messages)
        elif isinstance(prompt, Text):
            num += len(prompt.text)
    return num


def _num_messages(prompts: Sequence[Prompt]) -> int:
    return sum(len(prompt.messages) for prompt in prompts if isinstance(prompt, Conversation))


def _least_tokens(prompts: Sequence[Prompt], assets: TextAssets) -> int:
    """A number of tokens that the longest prompt has at least, known without rendering or tokenizing it.

    Megabytes that can never fit must not cost seconds. Prompts of a usual size are counted exactly; for them it is 0.
    """
    least = 0
    for prompt in prompts:
        if isinstance(prompt, Conversation) and len(prompt.messages) > COUNTED_MESSAGES:
            least = max(least, len(prompt.messages))
        num_characters = _num_characters([prompt])
        if assets.tokenizer.byte_level and num_characters > COUNTED_CHARACTERS:
            least = max(least, num_characters // assets.tokenizer.max_token_bytes)
    return least


def _tokenize(prompt: Prompt, assets: TextAssets) -> list[int]:
    if isinstance(prompt, Conversation):
        messages = [{"role": message.role, "content": message.content} for message in prompt.messages]
        return assets.tokenizer.encode(assets.chat_template.render(messages, add_generation_prompt=True))
    if isinstance(prompt, Text):
        return assets.tokenizer.encode(prompt.text, add_bos=True)
    return list(prompt.token_ids)


def _check_ids(param: str, ids: Sequence[int] | Mapping[int, float], vocab_size: int) -> None:
    if ids and (min(ids) < 0 or max(ids) >= vocab_size):
        raise InvalidRequest(f"Invalid '{param}': token ids must be between 0 and {vocab_size - 1}.", param=param)


def _sampling(wanted: Sampling) -> SamplingParams:
    return SamplingParams(
        temperature=wanted.temperature,
        top_p=wanted.top_p,
        top_k=wanted.top_k,
        min_p=wanted.min_p,
        repetition_penalty=wanted.repetition_penalty,
        presence_penalty=wanted.presence_penalty,
        frequency_penalty=wanted.frequency_penalty,
        logit_bias=wanted.logit_bias,
        seed=wanted.seed,
        num_logprobs=wanted.num_logprobs,
        stop_token_ids=wanted.stop_token_ids,
        min_tokens=wanted.min_tokens,
        ignore_eos=wanted.ignore_eos,
    )
