"""Stop strings: equal to a character-by-character definition, whatever the pieces; nothing leaks; state can move."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from splitserve.text.stops import StopStrings

LETTERS = st.text(alphabet="ab#é", max_size=30)
STOPS = st.lists(st.text(alphabet="ab#é", min_size=1, max_size=5), min_size=1, max_size=4)


def defined(text: str, stops: list[str], *, keep: bool) -> tuple[str, str | None]:
    """The first end position at which a stop is complete; of those the longest."""
    for end in range(1, len(text) + 1):
        done = [s for s in stops if text[:end].endswith(s)]
        if done:
            longest = max(done, key=len)
            return (text[:end] if keep else text[: end - len(longest)]), longest
    return text, None


@given(
    text=LETTERS,
    stops=STOPS,
    cuts=st.lists(st.integers(0, 30), max_size=8),
    keep=st.booleans(),
    move=st.booleans(),
)
def test_result_does_not_depend_on_the_pieces(text, stops, cuts, keep, move):
    edges = [0, *sorted(min(c, len(text)) for c in cuts), len(text)]
    state = StopStrings(stops, keep=keep)
    shown, matched = "", None
    for a, b in itertools.pairwise(edges):
        if move:
            state = StopStrings(state.stops, held=state.held, keep=keep)
        released = state.feed(text[a:b])
        shown += released.text
        # Never leaked: no stop, whole or in part, may be visible that more text could complete.
        assert defined(text, stops, keep=keep)[0].startswith(shown)
        if released.matched is not None:
            matched = released.matched
            break
    else:
        shown += state.finish()
    assert (shown, matched) == defined(text, stops, keep=keep)


@given(text=LETTERS, stops=STOPS)
def test_holds_back_no_more_than_could_begin_a_stop(text, stops):
    state = StopStrings(stops)
    for char in text:
        if state.feed(char).matched is not None:
            return
        assert any(s.startswith(state.held) for s in stops)
        assert len(state.held) < max(map(len, stops))


def test_without_stops_text_passes_at_once():
    state = StopStrings([])
    assert state.feed("abc").text == "abc"
    assert state.finish() == ""


def test_stop_across_pieces_is_not_leaked():
    state = StopStrings(["\n\nUser:"])
    assert [state.feed(p).text for p in ("Hi", "\n", "\nUs", "ual")] == ["Hi", "", "", "\n\nUsual"]
    assert state.feed("\n\nUs").text == ""
    assert state.feed("er: next").matched == "\n\nUser:"
    assert state.finish() == ""
