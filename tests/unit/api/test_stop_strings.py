"""Stop strings: nothing of one leaks, and the result does not depend on how the text is cut."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from server.api.stop_strings import StopStrings

LETTERS = st.text("abc", max_size=24)
STOPS = st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=4)


def expected(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """The definition, character by character: what is shown and which string ended it."""
    for end in range(1, len(text) + 1):
        if found := [stop for stop in stops if text[:end].endswith(stop)]:
            longest = max(found, key=len)
            return text[: end if include else end - len(longest)], longest
    return text, None


def cut(text: str, places: list[int]) -> list[str]:
    bounds = [0, *sorted(place % (len(text) + 1) for place in places), len(text)]
    return [text[begin:end] for begin, end in itertools.pairwise(bounds)]


@given(LETTERS, STOPS, st.booleans(), st.lists(st.integers(0, 24), max_size=10))
def test_result_is_that_of_the_definition_however_the_text_is_cut(
    text: str, stops: list[str], include: bool, places: list[int]
) -> None:
    watcher = StopStrings(tuple(stops), include)
    wanted, which = expected(text, stops, include)
    shown = ""
    for piece in cut(text, places):
        shown += watcher.push(piece)
        assert wanted.startswith(shown), "a part of a stop string leaked"
        if watcher.matched is not None:
            break
    else:
        shown += watcher.flush()
    assert (shown, watcher.matched) == (wanted, which)


@given(LETTERS, LETTERS, STOPS, st.booleans())
def test_a_string_may_begin_but_not_end_within_min_tokens(
    early: str, late: str, stops: list[str], include: bool
) -> None:
    watcher = StopStrings(tuple(stops), include)
    shown = "".join(watcher.push(character, check=False) for character in early)
    for character in late:
        shown += watcher.push(character)
        if watcher.matched is not None:
            break
    else:
        shown += watcher.flush()
    text = early + late
    ends = [
        (end, stop)
        for end in range(len(early) + 1, len(text) + 1)
        for stop in sorted(stops, key=len, reverse=True)
        if text[:end].endswith(stop)
    ]
    if not ends:
        assert (shown, watcher.matched) == (text, None)
        return
    end, stop = ends[0]
    assert watcher.matched == stop
    assert shown == text[: end if include else end - len(stop)]


def test_text_that_cannot_be_a_stop_string_is_not_delayed() -> None:
    watcher = StopStrings(("###", "\n\n"), False)
    assert watcher.push("hello") == "hello"
    assert watcher.push(" #") == " "
    assert watcher.push("#1") == "##1"
    assert watcher.push("\n") == ""
    assert watcher.push("x") == "\nx"


def test_include_keeps_the_string_and_cuts_behind_it() -> None:
    watcher = StopStrings(("END",), True)
    assert watcher.push("a E") == "a E"
    assert watcher.push("ND of it") == "ND"
    assert watcher.matched == "END"
