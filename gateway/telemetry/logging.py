"""Logs: one JSON object a line on stderr, for our events and for those of the libraries below us.

Never prompt text, never a key: events carry fields chosen one by one, secrets are redacted by name and by shape, and
of an exception only its type and the places it came through are written, since its message may quote what a caller
sent. Knows nothing of which events there are.
"""

from __future__ import annotations

import logging
import re
import sys
import traceback
from types import TracebackType
from typing import Any, TextIO

import msgspec
import structlog
from structlog.typing import EventDict, Processor, WrappedLogger

_SECRET_NAMES = frozenset({"authorization", "x-api-key", "api_key", "key", "token", "password", "secret", "cookie"})
_SECRET_SHAPE = re.compile(r"(?:eha?|sk)[_-][A-Za-z0-9_-]{8,}|[Bb]earer\s+[^\s\"]+")
_SECRET_MARKS = ("eh_", "eha_", "eh-", "sk_", "sk-", "earer ")
_REDACTED = "[redacted]"

ExcInfo = tuple[type[BaseException], BaseException, TracebackType | None] | tuple[None, None, None]


def configure_logging(level: str, stream: TextIO | None = None) -> None:
    """Set up structlog and the standard library's root logger for this process.

    Args:
        level: the least severe level that is written: debug, info, warning or error.
        stream: where to; None is stderr.
    """
    threshold = logging.getLevelNamesMapping()[level.upper()]
    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        place_exception,
        redact_names,
    ]
    renderer = structlog.processors.JSONRenderer(serializer=_to_json)
    structlog.configure(
        processors=[*shared, renderer],
        wrapper_class=structlog.make_filtering_bound_logger(threshold),
        logger_factory=structlog.WriteLoggerFactory(stream or sys.stderr),
        cache_logger_on_first_use=True,
    )
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[*shared[:3], structlog.stdlib.add_logger_name],
            processors=[
                structlog.stdlib.ProcessorFormatter.remove_processors_meta,
                place_exception,
                redact_names,
                renderer,
            ],
        )
    )
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(max(threshold, logging.WARNING))  # the libraries' own news is of no use to an operator
    for package in ("engine", "gateway", "kernels"):
        logging.getLogger(package).setLevel(threshold)


def place_exception(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
    """Replace ``exc_info`` by the exception's type and the places it came through, innermost last."""
    given = event.pop("exc_info", None)
    if not given:
        return event
    error = given[1] if isinstance(given, tuple) else given if isinstance(given, BaseException) else sys.exc_info()[1]
    if error is None:
        return event
    event["error_type"] = f"{type(error).__module__}.{type(error).__qualname__}"
    frames = traceback.extract_tb(error.__traceback__)
    event["error_at"] = [f"{frame.filename}:{frame.lineno} {frame.name}" for frame in frames]
    return event


def redact_names(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
    """Blank fields whose name says that they are secret."""
    for name in _SECRET_NAMES & event.keys():
        event[name] = _REDACTED
    return event


def _to_json(event: Any, **_: Any) -> str:
    """One line, without anything that looks like a key."""
    line = msgspec.json.encode(event, enc_hook=repr).decode()
    if any(mark in line for mark in _SECRET_MARKS):
        line = _SECRET_SHAPE.sub(_REDACTED, line)
    return line
