"""Nothing but what was issued is a credential, and no slip of the hand makes another one of it."""

from __future__ import annotations

import string

from hypothesis import assume, given
from hypothesis import strategies as st

from gateway.domain.credential import ADMIN_TOKEN, API_KEY, Peppers, issue, parse
from gateway.domain.tenancy import Secret

ALPHABET = string.ascii_letters + string.digits + "_"
PEPPERS = Peppers({"a": b"a" * 32})
prefixes = st.sampled_from([API_KEY, ADMIN_TOKEN])


@given(prefix=prefixes, place=st.integers(0, 64), character=st.sampled_from(ALPHABET))
def test_a_wrong_character_is_found(prefix: str, place: int, character: str) -> None:
    raw, _ = issue(prefix)
    assume(raw[place] != character)

    assert parse(raw[:place] + character + raw[place + 1 :], prefix) is None


@given(prefix=prefixes, place=st.integers(3, 63))
def test_swapped_neighbors_are_found(prefix: str, place: int) -> None:
    raw, _ = issue(prefix)
    assume(raw[place] != raw[place + 1])

    assert parse(raw[:place] + raw[place + 1] + raw[place] + raw[place + 2 :], prefix) is None


@given(prefix=prefixes, place=st.integers(0, 65), more=st.text(min_size=1, max_size=3))
def test_what_is_longer_or_shorter_is_none(prefix: str, place: int, more: str) -> None:
    raw, _ = issue(prefix)

    assert parse(raw[:place] + more + raw[place:], prefix) is None
    assert parse(raw[:place] + raw[place + 1 :], prefix) is None or place >= len(raw)


@given(raw=st.text() | st.binary(), prefix=prefixes)
def test_any_text_and_any_bytes_can_be_looked_at(raw: str | bytes, prefix: str) -> None:
    assert parse(raw, prefix) is None


@given(raw=st.text(st.characters(exclude_categories=["Cs"])), other=st.text(st.characters(exclude_categories=["Cs"])))
def test_a_digest_matches_its_own_text_only(raw: str, other: str) -> None:
    kept = Secret("x", *PEPPERS.digest(raw))

    assert PEPPERS.matches(raw, kept)
    assert PEPPERS.matches(other, kept) == (other == raw)
