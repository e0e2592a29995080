"""Tables of a TOML file as structs, and every mistake in them with its place, not only the first one.

Knows nothing of what the tables are for.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Callable, Sequence
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import msgspec
from msgspec import UNSET, UnsetType

from gateway.errors import EvenhandError
from gateway.services.admin_apply import mistake_at
from gateway.services.wanted import Mistake

T = TypeVar("T")
S = TypeVar("S", bound=msgspec.Struct)

MAX_ECHO = 60
"""Most characters of a name that a message repeats."""

_BARE = re.compile(r"[A-Za-z0-9_-]+")
_UNKNOWN = re.compile(r"contains unknown field `(.*)`$", re.DOTALL)
_MISSING = re.compile(r"missing required field `(.*?)`$")
_PATH = re.compile(r" - at `\$\.(\w+)([^`]*)`$")
_WORDS = {int: "a whole number", str: "text", bool: "true or false", float: "a number"}


class Table(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Base of all tables. What is not in the file is UNSET, or empty."""


class Reading:
    """A file while it is read.

    Attributes:
        mistakes: those found so far.
    """

    def __init__(self) -> None:
        self.mistakes: list[Mistake] = []

    def wrong(self, place: str, message: str) -> None:
        self.mistakes.append(Mistake(place, message))

    def table(self, kind: type[S], value: Any, place: str, *, also: Sequence[str] = ()) -> S | None:
        """The table without what is wrong in it; None if that cannot be done without.

        Args:
            also: further names that people may have meant by one that is not known.
        """
        if not isinstance(value, dict):
            self.wrong(place, "must be a table")
            return None
        table, wrong = dict(value), set[str]()
        while True:
            try:
                return msgspec.convert(table, kind)
            except msgspec.ValidationError as e:
                message = str(e)
            if unknown := _UNKNOWN.search(message):
                self._unknown(kind, unknown[1], place, also)
                del table[unknown[1]]
            elif missing := _MISSING.search(message):
                if not wrong:
                    self.wrong(part(place, missing[1]), "is missing")
                return None
            else:
                at = _PATH.search(message)
                assert at is not None, "a field has another kind of value than it may have"
                annotation = get_type_hints(kind)[at[1]]
                self.wrong(part(place, at[1]) + at[2], f"must be {_described(_within(annotation, at[2]))}")
                wrong.add(at[1])
                del table[at[1]]

    def check(self, place: str, check: Callable[[], T]) -> T | UnsetType:
        """What the check returns; UNSET if it finds a mistake in something at this place."""
        try:
            return check()
        except EvenhandError as e:
            self.mistakes.append(mistake_at(place, e))
            return UNSET

    def _unknown(self, kind: type[msgspec.Struct], name: str, place: str, also: Sequence[str]) -> None:
        known = [*(field.encode_name for field in msgspec.structs.fields(kind)), *also]
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(known)}"
        self.wrong(part(place, name), f"is not known here; {hint}")


def part(place: str, name: str) -> str:
    """The place of something with this name in the table at a place, as one would write it in TOML."""
    name = name if len(name) <= MAX_ECHO else f"{name[:MAX_ECHO]}…"
    quoted = name if _BARE.fullmatch(name) else json.dumps(name, ensure_ascii=not name.isprintable())
    return f"{place}.{quoted}" if place else quoted


def _within(annotation: Any, path: str) -> Any:
    """Of a list's element, if the path leads there."""
    if not path:
        return annotation
    lists = [each for each in _parts(annotation) if get_origin(each) in (list, tuple)]
    return get_args(lists[0])[0] if lists else annotation


def _described(annotation: Any) -> str:
    words = []
    for each in _parts(annotation):
        if get_origin(each) is Literal:
            words += [f'"{choice}"' for choice in get_args(each)]
        elif get_origin(each) in (list, tuple):
            words.append("a list")
        elif get_origin(each) is dict:
            words.append("a table")
        else:
            words.append(_WORDS[each])
    *most, last = words
    return f"{', '.join(most)} or {last}" if most else last


def _parts(annotation: Any) -> list[Any]:
    """Of a union what may stand in a file."""
    parts = get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)
    return [each for each in parts if each not in (NoneType, UnsetType)]
