"""Which session a request belongs to: the leaf below its key in the fairness tree.

A session grants nothing. Sessions of a key share what the key has, and neither weights nor cached KV depend on them, so
a client may say of it what it likes. What it says becomes a short digest together with the key's id: two keys never
meet in a session, and a name is not told on. That hides a name from readers, not from who can guess it.

Knows header names, not HTTP; knows nothing of the engine's tree.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from hashlib import blake2b
from typing import AnyStr

import msgspec

from gateway.domain.ids import KeyId, SessionId
from gateway.domain.request import Conversation, Message, Prompt, Text

PROMPT_CACHE_KEY = b"prompt_cache_key"
"""The one source that is a field of the body."""

SOURCES = (
    b"x-claude-code-session-id",  # Claude Code; its sub-agents differ in `x-claude-code-agent-id`
    b"session-id",  # Codex: the run, with the threads of its sub-agents
    b"session_id",  # older Codex
    PROMPT_CACHE_KEY,
    b"x-session-id",  # opencode and others
    b"x-session-affinity",
    b"x-opencode-session",  # older opencode
    b"thread-id",  # Codex: one thread of a run
    b"thread_id",
)
"""Where a session's name is looked for; the first that is not blank counts.

An agent's header for its whole run comes before the cache key, which may be a thread's: sub-agents share the session of
their run.
"""

MAX_NAME = 1024
"""Characters of a name that count."""
MAX_PIECE = 4096
"""Characters of a text that count; of a longer one half of them at either end, and its length."""
MAX_OPENING_MESSAGES = 16
"""Of a conversation, searched for its first user message."""
TEXT_CHARACTERS = 1024
"""Of a prompt that is a plain text; what follows changes from turn to turn."""
NUM_TOKENS = 256
"""Of a prompt in tokens, likewise."""

_DIGEST_BYTES = 16
_HALF = MAX_PIECE // 2
_RANKS = {name: rank for rank, name in enumerate(SOURCES) if name != PROMPT_CACHE_KEY}
_CACHE_KEY_RANK = SOURCES.index(PROMPT_CACHE_KEY)
_NO_TOOLS = frozenset({b"", b"null", b"[]"})


class SessionHints(msgspec.Struct, frozen=True, kw_only=True):
    """What a request's body says of its session.

    Attributes:
        prompt_cache_key: None or blank says nothing.
        tools: the JSON as the client wrote it.
    """

    prompt_cache_key: str | None = None
    tools: bytes = b""


def session_of(key_id: KeyId, headers: Iterable[tuple[bytes, bytes]], hints: SessionHints, prompt: Prompt) -> SessionId:
    """The session by the name that the client gives it, else by how its conversation begins.

    The beginning is the system messages before the first user message, the tools and that message, which later turns
    repeat; of a plain prompt its first part.

    Args:
        headers: name and value pairs, names in lower case.
        prompt: the request's first one.
    """
    name = _name(headers, hints.prompt_cache_key)
    pieces = ((b"name", name),) if name else _beginning(prompt, hints.tools)
    hasher = blake2b(digest_size=_DIGEST_BYTES)
    for kind, piece in ((b"key", key_id), *pieces):
        hasher.update(_bounded(kind, piece))
    return SessionId(hasher.hexdigest())


def _name(headers: Iterable[tuple[bytes, bytes]], prompt_cache_key: str | None) -> str:
    """Empty if there is none. The same name in the body and in a header is the same session."""
    best = len(SOURCES)
    name = ""
    if prompt_cache_key is not None and (given := prompt_cache_key[:MAX_NAME].strip()):
        best, name = _CACHE_KEY_RANK, given
    for header, value in headers:
        rank = _RANKS.get(header)
        if rank is not None and rank < best:
            given = value.decode("utf-8", "surrogateescape")[:MAX_NAME].strip()
            if given:
                best, name = rank, given
    return name


def _beginning(prompt: Prompt, tools: bytes) -> Iterator[tuple[bytes, str | bytes]]:
    if isinstance(prompt, Conversation):
        if tools not in _NO_TOOLS:
            yield b"tools", tools
        yield from _opening(prompt.messages)
    elif isinstance(prompt, Text):
        yield b"text", prompt.text[:TEXT_CHARACTERS]
    else:
        yield b"tokens", repr(prompt.token_ids[:NUM_TOKENS])


def _opening(messages: Sequence[Message]) -> Iterator[tuple[bytes, str]]:
    for message in messages[:MAX_OPENING_MESSAGES]:
        if message.role == "system":
            yield b"system", message.content
        elif message.role == "user":
            yield b"user", message.content
            return


def _bounded(kind: bytes, piece: str | bytes) -> bytes:
    """A piece with its kind and lengths before it, so that different pieces in a row never look alike."""
    # Any string has a session, one with half a surrogate pair included.
    data = _ends(piece) if isinstance(piece, bytes) else _ends(piece).encode("utf-8", "surrogatepass")
    return b"%b %d %d:%b" % (kind, len(piece), len(data), data)


def _ends(piece: AnyStr) -> AnyStr:
    return piece if len(piece) <= MAX_PIECE else piece[:_HALF] + piece[-_HALF:]
