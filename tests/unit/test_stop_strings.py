"""Stop strings: where the text ends does not depend on how it was cut, and nothing is held back without need."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.text.stop_strings import StopMatcher

# Two letters, so that stop strings overlap, nest and repeat all the time.
STOPS = st.lists(st.text("ab", min_size=1, max_size=5), max_size=4)
PIECES = st.lists(st.text("ab", max_size=6), max_size=12)


def expected(text: str, stops: list[str], *, include: bool) -> tuple[str, str | None]:
    """By the definition: the first position where a stop string is complete, and the longest of those."""
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            stop = max(complete, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


def run(pieces: list[str], stops: list[str], *, include: bool) -> tuple[str, str | None]:
    matcher = StopMatcher(stops, include=include)
    released = [matcher.push(piece) for piece in pieces]
    return "".join([*released, matcher.flush()]), matcher.stopped


@given(PIECES, STOPS, st.booleans())
def test_any_cut_gives_the_text_up_to_the_first_complete_stop_string(
    pieces: list[str], stops: list[str], include: bool
) -> None:
    assert expected("".join(pieces), stops, include=include) == run(pieces, stops, include=include)


@given(PIECES, STOPS)
def test_only_a_possible_beginning_is_held_back(pieces: list[str], stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    pushed = released = ""
    for piece in pieces:
        pushed += piece
        released += matcher.push(piece)
        if matcher.stopped is not None:
            return
        beginnings = [n for stop in stops for n in range(1, len(stop)) if pushed.endswith(stop[:n])]

        assert pushed[: len(pushed) - max(beginnings, default=0)] == released


def test_without_stop_strings_everything_passes_at_once() -> None:
    matcher = StopMatcher([])

    assert matcher.push("anything\n") == "anything\n"
    assert matcher.flush() == ""
    assert matcher.stopped is None


def test_text_after_the_stop_string_is_dropped() -> None:
    matcher = StopMatcher(["END"])

    assert matcher.push("one END two") == "one "
    assert matcher.push("END three") == ""
    assert matcher.flush() == ""
    assert matcher.stopped == "END"


def test_a_stop_string_over_several_pushes_is_found_and_its_beginning_never_shown() -> None:
    matcher = StopMatcher(["\n\nUser:"])

    assert [matcher.push(piece) for piece in ("Hi\n", "\n", "Us", "er", ":", "x")] == ["Hi", "", "", "", "", ""]
    assert matcher.stopped == "\n\nUser:"


def test_a_beginning_that_comes_to_nothing_is_released() -> None:
    matcher = StopMatcher(["<end>"])

    assert [matcher.push(piece) for piece in ("a<", "en", "!")] == ["a", "", "<en!"]
    assert matcher.stopped is None


def test_a_beginning_at_the_end_of_the_text_is_released_by_flush() -> None:
    matcher = StopMatcher(["<end>"])

    assert matcher.push("a<en") == "a"
    assert matcher.flush() == "<en"


def test_a_stop_string_that_begins_inside_a_failed_one_is_found() -> None:
    matcher = StopMatcher(["aabc", "abd"])

    assert matcher.push("xaabd") == "xa"
    assert matcher.stopped == "abd"


def test_of_two_nested_stop_strings_the_one_complete_first_ends_the_text() -> None:
    matcher = StopMatcher(["abcd", "bc"])

    assert matcher.push("abcd") == "a"
    assert matcher.stopped == "bc"


def test_characters_beyond_the_basic_plane_can_stop() -> None:
    matcher = StopMatcher(["👩‍🚀"])

    assert matcher.push("go 👩‍") == "go "
    assert matcher.push("🚀 now") == ""
    assert matcher.stopped == "👩‍🚀"


def test_include_releases_the_stop_string_and_nothing_behind_it() -> None:
    matcher = StopMatcher(["END"], include=True)

    assert [matcher.push(piece) for piece in ("one E", "ND two")] == ["one ", "END"]


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(ValueError, match="must not be empty"):
        StopMatcher(["x", ""])
