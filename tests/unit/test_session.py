"""Which session a request belongs to: where its name is found, and what tells nameless conversations apart."""

from __future__ import annotations

import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.domain.ids import KeyId, SessionId
from gateway.domain.request import Conversation, Message, Prompt, Role, Text, TokenIds
from gateway.domain.session import MAX_NAME, MAX_PIECE, SOURCES, SessionHints, session_of

KEY = KeyId("key_1")
OTHER_KEY = KeyId("key_2")
BODY_FIELD = b"prompt_cache_key"


def talk(*turns: tuple[Role, str]) -> Conversation:
    return Conversation(tuple(Message(role, content) for role, content in turns))


HELLO = talk(("system", "Be brief."), ("user", "Hello"))


def session(
    prompt: Prompt = HELLO,
    *headers: tuple[bytes, bytes],
    key_id: KeyId = KEY,
    cache_key: str | None = None,
    tools: bytes = b"",
) -> SessionId:
    return session_of(key_id, headers, SessionHints(prompt_cache_key=cache_key, tools=tools), prompt)


def named(name: str, key_id: KeyId = KEY) -> SessionId:
    return session(HELLO, cache_key=name, key_id=key_id)


def from_sources(names: dict[bytes, str], prompt: Prompt = HELLO) -> SessionId:
    headers = [(source, name.encode()) for source, name in reversed(names.items()) if source != BODY_FIELD]
    return session(prompt, (b"host", b"x"), *headers, cache_key=names.get(BODY_FIELD))


NAMELESS = session(HELLO)


# --- names ------------------------------------------------------------------------------------------------------------


def test_the_order_of_the_sources_is_the_documented_one() -> None:
    assert [source.decode() for source in SOURCES] == [
        "x-claude-code-session-id",
        "session-id",
        "session_id",
        "prompt_cache_key",
        "x-session-id",
        "x-session-affinity",
        "x-opencode-session",
        "thread-id",
        "thread_id",
    ]


@pytest.mark.parametrize("first", range(len(SOURCES)))
def test_the_first_source_that_says_something_counts(first: int) -> None:
    said = {source: f"name-{rank}" for rank, source in enumerate(SOURCES)}
    blank = dict.fromkeys(SOURCES[:first], " \t")

    assert from_sources(said | blank) == named(f"name-{first}")


@pytest.mark.parametrize("blank", ["", " ", "\t \t", "\u00a0\u2003"])
def test_a_blank_name_in_every_source_is_as_if_none_were_given(blank: str) -> None:
    assert from_sources(dict.fromkeys(SOURCES, blank)) == NAMELESS
    assert session(HELLO, (b"x-session-id", b""), (b"x-session-id", b"a")) == named("a")


@pytest.mark.parametrize(
    "header",
    [
        b"x-client-request-id",
        b"x-evenhand-session",
        b"x-session",
        b"session",
        BODY_FIELD,
        b"x-claude-code-agent-id",
        b"x-claude-code-parent-agent-id",
    ],
)
def test_other_headers_name_no_session(header: bytes) -> None:
    assert session(HELLO, (header, b"some-name")) == NAMELESS


def test_sub_agents_of_claude_code_are_in_the_session_of_their_run() -> None:
    run = (b"x-claude-code-session-id", b"run-1")
    agents = [((b"x-claude-code-agent-id", b"a%d" % i), (b"x-claude-code-parent-agent-id", b"a0")) for i in range(3)]
    prompts = [talk(("system", "You search."), ("user", f"task {i}")) for i in range(3)]

    assert {session(prompt, run, *agent) for prompt, agent in zip(prompts, agents, strict=True)} == {named("run-1")}


def test_threads_of_codex_are_in_the_session_of_their_run() -> None:
    def thread(name: str) -> SessionId:
        return session(HELLO, (b"session-id", b"run-1"), (b"thread-id", name.encode()), cache_key=name)

    assert {thread("thread-1"), thread("thread-2")} == {named("run-1")}


def test_space_around_a_name_is_not_part_of_it() -> None:
    assert named(" run-1\t") == session(HELLO, (b"x-session-id", b"\trun-1 ")) == named("run-1")


def test_names_differ_by_case_and_by_anything_within() -> None:
    names = ["run-1", "Run-1", "run-2", "run 1", "run-1\x00", "r\u00fcn-1", "\ud83d", "\ufffd"]

    assert len({named(name) for name in names}) == len(names)


def test_a_name_in_a_header_and_in_the_body_is_the_same_session() -> None:
    name = "s\u00e9ance \u6f22"

    assert session(HELLO, (b"x-session-id", name.encode())) == named(name)


def test_a_name_counts_whatever_the_conversation_is() -> None:
    prompts: list[Prompt] = [HELLO, talk(("user", "other")), Text("raw"), TokenIds((1, 2))]

    assert {session(prompt, cache_key="run-1", tools=b"[1]") for prompt in prompts} == {named("run-1")}


def test_a_name_of_any_size_becomes_a_short_digest_that_does_not_show_it() -> None:
    for name in ("a", "someone@example.com", "x" * 10_000_000):
        made = named(name)
        assert len(made) == 32
        assert set(made) <= set(string.hexdigits.lower())

    assert named("x" * MAX_NAME) != named("x" * (MAX_NAME - 1))


def test_a_name_that_is_a_nameless_session_s_digest_is_another_session() -> None:
    assert named(NAMELESS) != NAMELESS


@given(st.text(), st.binary(), st.text(), st.binary())
def test_anything_at_all_has_a_session(cache_key: str, header: bytes, text: str, tools: bytes) -> None:
    made = session(
        talk(("user", text)), (b"session-id", header), (b"thread-id", b"x"), cache_key=cache_key, tools=tools
    )

    assert len(made) == 32


# --- keys -------------------------------------------------------------------------------------------------------------


def test_the_same_name_under_another_key_is_another_session() -> None:
    assert named("run-1") != named("run-1", OTHER_KEY)
    assert named("run-1") == named("run-1")


def test_the_same_conversation_under_another_key_is_another_session() -> None:
    assert session(HELLO, key_id=KEY) != session(HELLO, key_id=OTHER_KEY)


def test_key_and_name_do_not_flow_into_each_other() -> None:
    assert session(HELLO, key_id=KeyId("key_1"), cache_key="23") != session(
        HELLO, key_id=KeyId("key_12"), cache_key="3"
    )


# --- nameless conversations -------------------------------------------------------------------------------------------


def test_later_turns_of_a_conversation_are_in_its_session() -> None:
    turns: list[tuple[Role, str]] = [
        ("system", "Be brief."),
        ("user", "Hello"),
        ("assistant", "Hi."),
        ("tool", "42"),
        ("system", "A reminder that comes late."),
        ("user", "And now?"),
    ]
    tools = b'[{"type":"function"}]'

    assert len({session(talk(*turns[:n]), tools=tools) for n in range(2, len(turns) + 1)}) == 1


@pytest.mark.parametrize(
    "other",
    [
        talk(("system", "Be verbose."), ("user", "Hello")),
        talk(("system", "Be brief."), ("user", "Good evening")),
        talk(("user", "Hello")),
        talk(("user", "Be brief."), ("user", "Hello")),
        talk(("system", "Be brief.Hello"), ("user", "")),
        talk(("system", "Be "), ("system", "brief."), ("user", "Hello")),
        talk(("system", "Be brief.")),
    ],
)
def test_another_system_text_or_first_user_message_is_another_session(other: Conversation) -> None:
    assert session(other) != NAMELESS


def test_a_greeting_before_the_first_user_message_tells_nothing_apart() -> None:
    assert session(talk(("system", "Be brief."), ("assistant", "How can I help?"), ("user", "Hello"))) == NAMELESS


def test_other_tools_are_another_session_and_no_tools_are_none() -> None:
    assert len({session(HELLO, tools=tools) for tools in (b"", b'[{"a":1}]', b'[{"a":2}]')}) == 3
    assert session(HELLO, tools=b"null") == session(HELLO, tools=b"[]") == NAMELESS


@pytest.mark.parametrize("at", [0, -1])
def test_long_texts_differ_by_their_begin_and_end(at: int) -> None:
    text = ["a"] * 100_000
    same = session(talk(("system", "".join(text)), ("user", "Hello")))
    text[at] = "b"

    assert session(talk(("system", "".join(text)), ("user", "Hello"))) != same


def test_long_texts_differ_by_their_length() -> None:
    lengths = (MAX_PIECE - 1, MAX_PIECE, MAX_PIECE + 1, MAX_PIECE + 2)

    assert len({session(talk(("user", "a" * length))) for length in lengths}) == len(lengths)


def test_a_conversation_without_a_user_is_told_by_its_system_text() -> None:
    assert session(talk(("system", "a"), ("assistant", "x"))) == session(talk(("system", "a"), ("assistant", "y")))
    assert session(talk(("system", "a"))) != session(talk(("system", "b")))


# --- plain prompts ----------------------------------------------------------------------------------------------------


def test_a_text_is_told_by_its_first_1024_characters() -> None:
    text = "a" * 1023

    assert session(Text(text + "bcd")) == session(Text(text + "bxy"))
    assert session(Text(text + "b")) != session(Text(text + "c"))


def test_tokens_are_told_by_the_first_256() -> None:
    ids = tuple(range(255))

    assert session(TokenIds((*ids, 7, 8))) == session(TokenIds((*ids, 7, 9)))
    assert session(TokenIds((*ids, 7))) != session(TokenIds((*ids, 8)))
    assert session(TokenIds((1, 23))) != session(TokenIds((12, 3)))


def test_prompts_of_different_kinds_never_meet() -> None:
    prompts: list[Prompt] = [Text("hi"), talk(("user", "hi")), talk(("system", "hi")), TokenIds((1,)), Text("(1,)")]

    assert len({session(prompt) for prompt in prompts}) == len(prompts)
