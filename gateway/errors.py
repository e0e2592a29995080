"""The gateway's errors: what a caller may be told, with its status and code.

    EvenhandError
    ├── InvalidRequest                 400
    │   └── ContextLengthExceeded      400  context_length_exceeded
    ├── InvalidKey                     401  invalid_api_key
    ├── NotAllowed                     403  (why: team_disabled, network_not_allowed, endpoint_not_allowed, …)
    ├── NotFound                       404
    │   ├── ModelNotFound              404  model_not_found
    │   └── RequestNotFound            404  request_not_found
    ├── MethodNotAllowed               405  method_not_allowed
    ├── DeadlineExceeded               408  deadline_exceeded
    ├── SlowRequest                    408  request_timeout
    ├── Conflict                       409  conflict
    ├── BodyTooLarge                   413  request_too_large
    ├── QueueFull                      429  queue_full (with retry-after)
    ├── LimitExceeded                  429  rate_limit_exceeded (with the limit, and retry-after if waiting helps)
    │   ├── ConcurrencyExceeded        429  concurrency_limit_exceeded
    │   └── QuotaExceeded              429  insufficient_quota
    ├── TooManyAttempts                429  too_many_attempts (with retry-after)
    ├── TooManyChanges                 429  too_many_changes (with retry-after)
    ├── HeadersTooLarge                431  headers_too_large
    ├── InternalError                  500  internal_error
    └── Unavailable                    503  (with retry-after)
        ├── EngineDown                 503  engine_unavailable
        └── StorageDown                503  storage_unavailable

`ClientGone` stands outside: nobody is left to be told. Raised near the cause, mapped to a wire shape once, in
``web/errors.py``. Knows nothing of HTTP beyond the status number.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar


class EvenhandError(Exception):
    """Base of everything a caller may be told; the message is for the caller and holds no secret and no prompt text.

    Attributes:
        code: a stable word for programs, or None.
        status: HTTP status.
        type: the family of the error, as the OpenAI API names it.
        retry_after_s: when trying again makes sense, at least 1, or None.
        should_retry: overrides what clients conclude from the status; None leaves it to them.
        param: the request field that is at fault, if it is about one.
        is_settled: the request had run; its end is on record already.
    """

    code: ClassVar[str | None] = None
    status: ClassVar[int] = 500
    type: ClassVar[str] = "server_error"
    should_retry: ClassVar[bool | None] = None

    def __init__(self, message: str, *, param: str | None = None, retry_after_s: int | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s
        self.is_settled = False


class InvalidRequest(EvenhandError):
    """The request cannot be understood or asks for something that does not exist."""

    status = 400
    type = "invalid_request_error"


class ContextLengthExceeded(InvalidRequest):
    """The prompt does not fit the model's window.

    Agents compact their history on exactly this code and phrase, so both are part of the contract.
    """

    code = "context_length_exceeded"

    def __init__(self, *, window: int, num_prompt_tokens: int, param: str = "messages") -> None:
        super().__init__(
            f"This model's maximum context length is {window} tokens. However, your messages resulted in "
            f"{num_prompt_tokens} tokens. Please reduce the length of the messages.",
            param=param,
        )


class InvalidKey(EvenhandError):
    """No API key, or one that is not known."""

    code = "invalid_api_key"
    status = 401
    type = "invalid_request_error"


class NotAllowed(EvenhandError):
    """The key or token is known, but not for this.

    Args:
        code: why, as a word for programs.
    """

    status = 403
    type = "permission_error"

    def __init__(self, message: str, *, code: str) -> None:
        super().__init__(message)
        self.code = code  # type: ignore[misc]  # one kind of refusal, for several reasons


class NotFound(EvenhandError):
    """There is nothing at this address."""

    status = 404
    type = "invalid_request_error"


class ModelNotFound(NotFound):
    """A model that is not served here."""

    code = "model_not_found"

    def __init__(self, model: str) -> None:
        super().__init__(f"The model '{model[:200]}' does not exist or you do not have access to it.", param="model")


class RequestNotFound(NotFound):
    """No request of the caller's team has this id; whether another team's has is not told."""

    code = "request_not_found"

    def __init__(self, request_id: str) -> None:
        super().__init__(
            f"The request '{request_id[:200]}' does not exist or is not one of your team.", param="request_id"
        )


class MethodNotAllowed(EvenhandError):
    """The address exists but does not take this method."""

    code = "method_not_allowed"
    status = 405
    type = "invalid_request_error"

    def __init__(self, message: str, *, allow: str | None = None) -> None:
        super().__init__(message)
        self.allow = allow


class DeadlineExceeded(EvenhandError):
    """The request's own deadline passed; the same request would pass it again, so clients are told not to retry."""

    code = "deadline_exceeded"
    status = 408
    type = "timeout_error"
    should_retry = False


class SlowRequest(EvenhandError):
    """The request's body did not come in the time that the server waits for it."""

    code = "request_timeout"
    status = 408
    type = "timeout_error"


class Conflict(EvenhandError):
    """What is to be made exists already, or has changed meanwhile."""

    code = "conflict"
    status = 409
    type = "invalid_request_error"


class HeadersTooLarge(EvenhandError):
    """More headers, or longer ones, than the server takes."""

    code = "headers_too_large"
    status = 431
    type = "invalid_request_error"


class QueueFull(EvenhandError):
    """As many requests of the key wait as may wait."""

    code = "queue_full"
    status = 429
    type = "rate_limit_error"

    def __init__(self, limit: int) -> None:
        super().__init__(
            f"This key may have {limit} waiting requests, and has them. Please try again when some have been answered.",
            retry_after_s=1,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ReachedLimit:
    """The limit that refuses a request, as its caller may know it.

    Attributes:
        name: as administrators set it, for example ``tokens/minute``.
        scope: ``organization``, ``team`` or ``key``.
        model: that it holds for; None is all.
        amount: of the limit, in its units, top-ups included.
        remaining: in its units; below 0 in debt.
        wait_ms: after which the same request would be taken, were it alone; None if that cannot be told.
        full_ms: of a rate: after which all of it is there again.
    """

    name: str
    scope: str
    model: str | None
    amount: int
    remaining: int
    wait_ms: int | None
    full_ms: int | None = None


class LimitExceeded(EvenhandError):
    """A rate has too little left for the request. Nothing has been consumed.

    Attributes:
        is_by_share: only this process's share of the limit was looked at, since what all share did not answer.
    """

    code = "rate_limit_exceeded"
    status = 429
    type = "rate_limit_error"

    def __init__(self, message: str, limit: ReachedLimit, *, is_never: bool = False) -> None:
        wait_ms = limit.wait_ms
        super().__init__(message, retry_after_s=None if wait_ms is None else -(-wait_ms // 1000))
        self.limit = limit
        self.is_by_share = False
        self.retry_after_ms = wait_ms
        if is_never:
            self.should_retry = False  # type: ignore[misc]  # the same request can never be taken


class ConcurrencyExceeded(LimitExceeded):
    """As many requests run at a time as may."""

    code = "concurrency_limit_exceeded"


class QuotaExceeded(LimitExceeded):
    """The period's contract is used up; trying again helps when it ends, or when somebody tops it up."""

    code = "insufficient_quota"
    type = "insufficient_quota"
    should_retry = False


class TooManyAttempts(EvenhandError):
    """Too many wrong keys or tokens came from the caller's network address."""

    code = "too_many_attempts"
    status = 429
    type = "rate_limit_error"

    def __init__(self, retry_after_s: int) -> None:
        super().__init__(
            "Too many wrong keys or tokens came from your network address, so this one was not accepted: it is wrong, "
            f"or was not used here lately. Please try again in {retry_after_s} seconds.",
            retry_after_s=retry_after_s,
        )


class TooManyChanges(EvenhandError):
    """An admin token asks for more changes than one may in a time."""

    code = "too_many_changes"
    status = 429
    type = "rate_limit_error"

    def __init__(self, retry_after_s: int) -> None:
        super().__init__(
            f"This token has asked for too many changes. Please try again in {retry_after_s} seconds.",
            retry_after_s=retry_after_s,
        )


class BodyTooLarge(EvenhandError):
    """The request body is larger than the server takes."""

    code = "request_too_large"
    status = 413
    type = "invalid_request_error"


class InternalError(EvenhandError):
    """A bug of ours; the caller learns no more than that."""

    code = "internal_error"

    def __init__(self) -> None:
        super().__init__("The server had an error while processing your request.")


class Unavailable(EvenhandError):
    """Nothing is wrong with the request, but it cannot be taken now."""

    status = 503

    def __init__(self, message: str, *, retry_after_s: int = 1) -> None:
        super().__init__(message, retry_after_s=min(max(retry_after_s, 1), 30))


class EngineDown(Unavailable):
    """The engine is starting, restarting, or vanished while the request ran."""

    code = "engine_unavailable"


class StorageDown(Unavailable):
    """The database does not answer, so nobody can be told apart from anybody."""

    code = "storage_unavailable"

    def __init__(self) -> None:
        super().__init__("The database does not answer right now. Please try again shortly.", retry_after_s=2)


class LimitsUnavailable(Unavailable):
    """Where limits are kept does not answer, or has lost what it knew, so it cannot be told what is left."""

    code = "limits_unavailable"

    def __init__(self, message: str = "Limits cannot be checked right now. Please try again shortly.") -> None:
        super().__init__(message, retry_after_s=1)


class ClientGone(Exception):
    """The client left before its answer was complete."""
