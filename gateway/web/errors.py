"""From any exception to the one error shape callers see, for every path and every status.

``{"error": {"message", "type", "param", "code"}}``, where code is a string or null; below ``/admin`` it is
``application/problem+json``. Registered for the whole application, since 404 and 405 come from routing, which a
router's own handlers never see. Never a stack trace, a key, or the framework's shape.
"""

from __future__ import annotations

import re
from http import HTTPStatus
from typing import Any

import msgspec
import structlog
from litestar import Request, Response
from litestar.exceptions import HTTPException

from gateway.domain.credential import hide_credentials
from gateway.domain.principal import Principal
from gateway.errors import (
    BodyTooLarge,
    ClientGone,
    EvenhandError,
    InternalError,
    InvalidKey,
    InvalidRequest,
    LimitExceeded,
    MethodNotAllowed,
    NotFound,
)
from gateway.telemetry.metrics import GatewayMetrics
from gateway.web.limit_headers import DEGRADED_HEADER, duration

_log = structlog.get_logger()
_encoder = msgspec.json.Encoder()

MAX_ECHO = 200
"""Most characters of a caller's own input that an error message repeats."""

LIMITS_PATH = "/v1/limits"
"""Where a key reads what its limits are and what is left."""

ADMIN_PATH = "/admin"
"""Where errors have the shape of RFC 9457."""

_is_field = re.compile(r"[a-z0-9_.\[\]-]{1,60}").fullmatch
"""Whether this may be a field of ours, or a misspelled one. Of any other name that a caller made up the log says
nothing: people paste prompts and keys in the wrong places."""

_GENERAL_CODES = {400: "invalid_request", 404: "not_found", 503: "unavailable"}
"""Of errors that have no code in the shape of the OpenAI API, where it may be null."""


def error_body(error: EvenhandError) -> bytes:
    """The OpenAI shape; of a limit that is reached it also says which, and where to read about it."""
    told: dict[str, Any] = {
        "message": hide_credentials(error.message),
        "type": error.type,
        "param": None if error.param is None else hide_credentials(error.param),
        "code": error.code,
    }
    if isinstance(error, LimitExceeded):
        limit = error.limit
        told["limit"] = {
            "name": limit.name,
            "scope": limit.scope,
            "model": limit.model,
            "amount": limit.amount,
            "remaining": limit.remaining,
            "wait_ms": limit.wait_ms,
            "help": LIMITS_PATH,
        }
    return _encoder.encode({"error": told})


def problem_body(error: EvenhandError, request_id: str) -> bytes:
    """The shape of RFC 9457. Its type says nothing: programs go by the code."""
    problem = {
        "type": "about:blank",
        "title": HTTPStatus(error.status).phrase,
        "status": error.status,
        "detail": hide_credentials(error.message),
        "code": error.code or _GENERAL_CODES.get(error.status),
        "request_id": request_id,
    }
    if error.param is not None:
        problem["param"] = hide_credentials(error.param)
    return _encoder.encode(problem)


def error_headers(error: EvenhandError) -> dict[str, str]:
    headers = {}
    if error.retry_after_s is not None:
        headers["retry-after"] = str(error.retry_after_s)
        headers["retry-after-ms"] = str(error.retry_after_s * 1000)
    if isinstance(error, LimitExceeded):
        limit = error.limit
        if limit.wait_ms is not None:
            headers["retry-after-ms"] = str(limit.wait_ms)
        kind = limit.name.partition("/")[0]
        if kind in ("requests", "tokens"):
            headers[f"x-ratelimit-limit-{kind}"] = str(limit.amount)
            headers[f"x-ratelimit-remaining-{kind}"] = str(max(limit.remaining, 0))
            headers[f"x-ratelimit-reset-{kind}"] = "never" if limit.full_ms is None else duration(limit.full_ms)
        if error.is_by_share:
            name, value = DEGRADED_HEADER
            headers[name] = value
    if error.should_retry is not None:
        headers["x-should-retry"] = str(error.should_retry).lower()
    if isinstance(error, InvalidKey):
        headers["www-authenticate"] = "Bearer"
    if isinstance(error, MethodNotAllowed) and error.allow:
        headers["allow"] = error.allow
    return headers


class ErrorResponses:
    """The application's exception handler: an answer, a count and, for what is our fault, a log line."""

    def __init__(self, metrics: GatewayMetrics) -> None:
        self._metrics = metrics

    def __call__(self, request: Request[Any, Any, Any], exception: Exception) -> Response[bytes]:
        if isinstance(exception, ClientGone):
            # It has left, or its body broke off and it may still read.
            cut = InvalidRequest("The request ended before its body was complete.")
            return _response(request, cut)
        error = as_evenhand_error(exception, request)
        if not error.is_settled:
            self._tell(request, exception, error)
        return _response(request, error)

    def _tell(self, request: Request[Any, Any, Any], exception: Exception, error: EvenhandError) -> None:
        """Count and log what was refused before it ran, or was our own bug."""
        self._metrics.refused(error.status, error.code)
        is_ours = isinstance(error, InternalError)
        log = _log.error if is_ours else _log.info
        log(
            "request.refused",
            method=request.scope["method"],
            route=request.scope.get("path_template"),
            status=error.status,
            code=error.code,
            param=error.param if error.param is not None and _is_field(error.param) else None,
            exc_info=exception if is_ours else None,
            **_who(request),
            **_which(error),
        )


def _who(request: Request[Any, Any, Any]) -> dict[str, str]:
    """Whose request it is, if that was found out."""
    principal = request.scope.get("auth")
    if not isinstance(principal, Principal):
        return {}
    return {"organization": principal.organization, "team": principal.team, "key_id": principal.key_id}


def _which(error: EvenhandError) -> dict[str, str]:
    """The limit that refuses."""
    return {"limit": error.limit.name, "scope": error.limit.scope} if isinstance(error, LimitExceeded) else {}


def _response(request: Request[Any, Any, Any], error: EvenhandError) -> Response[bytes]:
    """In the shape that belongs to the path."""
    path = request.scope["path"]
    if path == ADMIN_PATH or path.startswith(f"{ADMIN_PATH}/"):
        body, media_type = problem_body(error, request.scope["state"].get("request_id", "")), "application/problem+json"
    else:
        body, media_type = error_body(error), "application/json"
    return Response(body, status_code=error.status, media_type=media_type, headers=error_headers(error))


def as_evenhand_error(exception: Exception, request: Request[Any, Any, Any]) -> EvenhandError:
    """Ours as it is, the framework's by its status, everything else as `InternalError`."""
    if isinstance(exception, EvenhandError):
        return exception
    if not isinstance(exception, HTTPException):
        return InternalError()
    method, path = request.scope["method"], request.scope["path"][:MAX_ECHO]
    match exception.status_code:
        case 404:
            return NotFound(f"Unknown request URL: {method} {path}. Please check the URL for typos.")
        case 405:
            allow = (exception.headers or {}).get("allow")
            return MethodNotAllowed(f"Not allowed to {method} on {path}.", allow=allow)
        case 413:
            return BodyTooLarge("The request body is too large.")
        case status if 400 <= status < 500:
            return InvalidRequest("The request could not be understood.")
    return InternalError()
