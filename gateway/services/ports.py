"""What the use cases need from the outside world, as protocols. The edges implement them; tests bring fakes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, Self

from gateway.domain.catalog import ModelCard
from gateway.domain.events import GenerationEvent
from gateway.domain.ids import RequestId
from gateway.domain.ledger import Opening
from gateway.domain.record import RequestInfo, RequestRecord
from gateway.domain.request import GenerationRequest
from gateway.domain.standing import LiveRequest
from gateway.domain.usage import EngineTimings, TokenUsage


class Readiness(NamedTuple):
    """Whether requests can be served right now, and if not, why, in a sentence for people."""

    is_ready: bool
    reason: str = ""


class Generation(Protocol):
    """A running request: an asynchronous iterator over what becomes known together.

    Iteration ends when every choice has finished. It raises `EvenhandError` if the request fails on the way, and
    nothing follows then. Cancelling a wait for the next events loses nothing but the wait.
    """

    def __aiter__(self) -> Self: ...

    async def __anext__(self) -> Sequence[GenerationEvent]: ...

    def abort(self) -> None:
        """Stop the engine's work at once; legal in every state and any number of times."""

    def raise_cap(self, output_cap: int) -> None:
        """Of a generation started with a `held_cap`: each answer may have so many tokens now, as far as it asked for
        them. The same cap again is the last word: answers end there, with ``length``."""

    def on_held(self, call: Callable[[], None]) -> None:
        """Have `call` called whenever an answer waits at its held cap."""

    @property
    def progress(self) -> Progress: ...

    async def wait_ended(self, timeout_s: float) -> None:
        """Wait until the engine has told the final counts, no longer than `timeout_s`; never raises for the engine."""

    @property
    def ended(self) -> bool:
        """Nothing of it runs in the engine any more, and `usage` and `timings` are final."""

    @property
    def usage(self) -> TokenUsage:
        """So far; final once `ended`. Of a prompt that was not computed to its end, only what was."""

    @property
    def timings(self) -> EngineTimings | None:
        """Known once `ended`, if the engine told."""


class Progress(NamedTuple):
    """How far the answers of a generation are.

    Attributes:
        num_open: answers that go on.
        ended_tokens: output of those that do not.
        most_tokens: output of the longest one that goes on.
    """

    num_open: int
    ended_tokens: int
    most_tokens: int


class Prepared(Protocol):
    """A request that can run: parsed, tokenized, and known to fit. Nothing has been consumed for it yet."""

    @property
    def model(self) -> str:
        """Id of the model that will answer."""

    @property
    def num_prompt_tokens(self) -> int:
        """Exact, over all prompts."""

    @property
    def prompt_lengths(self) -> Sequence[int]:
        """Tokens of each prompt."""

    @property
    def output_caps(self) -> Sequence[int]:
        """For each prompt: most output tokens of one answer, by the request and the model's window."""

    @property
    def num_parts(self) -> int:
        """Engine requests that it is handed over as (`Opening.num_parts`)."""

    @property
    def echo_texts(self) -> Sequence[str]:
        """The prompts as text, one each, if the request asked for them; else empty."""

    def start(
        self, info: RequestInfo, output_caps: Sequence[int] | None = None, held_cap: int | None = None
    ) -> Generation:
        """Hand it to the engine; called at most once. Raises `Unavailable` if the engine cannot take it.

        Args:
            output_caps: as the property, or lower.
            held_cap: answers that are longer wait there for `Generation.raise_cap`.
        """


class Backend(Protocol):
    """Where answers come from."""

    def cards(self) -> Sequence[ModelCard]:
        """The models served, in the order they are listed."""

    async def prepare(self, request: GenerationRequest) -> Prepared:
        """Raises `InvalidRequest`, `ContextLengthExceeded`, `ModelNotFound` or `EngineDown`."""

    async def standing(self, request_id: RequestId) -> LiveRequest | None:
        """Where a request stands, whichever gateway process it came through; None if no engine has it.

        Raises `EngineDown` if that cannot be told right now.
        """

    def readiness(self) -> Readiness: ...


class Clock(Protocol):
    def time(self) -> float:
        """Seconds since the epoch."""

    def monotonic(self) -> float:
        """Seconds on a clock that never goes back."""


class Running(Protocol):
    """What can be asked of a request that runs; a `Generation` can."""

    @property
    def usage(self) -> TokenUsage:
        """So far."""


class Recorder(Protocol):
    """Keeps what is known of a request: at the begin of its answer, and once it is over."""

    def opened(self, opening: Opening, running: Running) -> None:
        """Called once for every request that the engine has taken, before its answer begins. Must not block for long.

        Args:
            running: may be asked how far the request is, until `settled` is called for it.

        Raises `Unavailable` if it cannot be kept; then the request must not be answered, and `settled` is not called.
        """

    def settled(self, record: RequestRecord) -> None:
        """Called exactly once for every request that was opened, whatever its ending. Must not raise or block."""
