"""Stop strings in a text that arrives in pieces."""

from hypothesis import given, settings
from hypothesis import strategies as st

from router.text.stop_strings import Stopped, StopStrings


def run(stops: list[str], pieces: list[str], include: bool = False) -> tuple[str, str]:
    """The text sent, and the stop string that ended it; empty if none did."""
    stop_strings = StopStrings(stops, include)
    sent = ""
    for piece in pieces:
        released = stop_strings.push(piece, may_stop=True)
        if isinstance(released, Stopped):
            return sent + released.text, released.stop_string
        sent += released
    return sent + stop_strings.flush(), ""


def test_the_text_before_a_stop_string_is_sent() -> None:
    assert run(["END"], ["one two END three"]) == ("one two ", "END")


def test_a_stop_string_split_over_pieces_is_found() -> None:
    assert run(["END"], ["one E", "N", "D three"]) == ("one ", "END")


def test_a_stop_string_that_is_the_whole_text_leaves_nothing() -> None:
    assert run(["END"], ["E", "ND"]) == ("", "END")


def test_the_stop_string_is_kept_if_asked_for() -> None:
    assert run(["END"], ["one E", "ND three"], include=True) == ("one END", "END")


def test_text_that_only_looked_like_a_stop_string_is_sent_in_the_end() -> None:
    assert run(["END"], ["EN", "EN", "x"]) == ("ENENx", "")
    assert run(["END"], ["the EN"]) == ("the EN", "")


def test_only_what_could_become_a_stop_string_is_held_back() -> None:
    stop_strings = StopStrings(["END", "</a>"], include=False)
    assert stop_strings.push("text E", may_stop=True) == "text "
    assert stop_strings.push("N", may_stop=True) == ""
    assert stop_strings.push("O <", may_stop=True) == "ENO "
    assert stop_strings.flush() == "<"


def test_the_stop_string_that_is_complete_first_wins() -> None:
    assert run(["abc", "b"], ["abc"]) == ("a", "b")


def test_of_two_that_end_together_the_longer_wins() -> None:
    assert run(["bc", "abc"], ["xabc"]) == ("x", "abc")


def test_a_stop_string_before_the_allowed_point_is_only_text() -> None:
    stop_strings = StopStrings(["END"], include=False)
    assert stop_strings.push("END", may_stop=False) == "END"
    assert stop_strings.push(" more END", may_stop=True) == Stopped(" more ", "END")


def test_a_match_that_was_let_pass_is_not_found_later() -> None:
    stop_strings = StopStrings(["ab", "abcd"], include=False)
    assert stop_strings.push("ab", may_stop=False) == ""
    assert stop_strings.push("x", may_stop=True) == "abx"


@settings(max_examples=500, deadline=None)
@given(
    st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3),
    st.text("abc", max_size=24),
    st.lists(st.integers(1, 4), min_size=24, max_size=24),
)
def test_the_result_does_not_depend_on_how_the_text_was_cut(stops: list[str], text: str, sizes: list[int]) -> None:
    pieces, position = [], 0
    for size in sizes:
        pieces.append(text[position : position + size])
        position += size
    assert run(stops, pieces) == run(stops, list(text))


@settings(max_examples=500, deadline=None)
@given(st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3), st.text("abc", max_size=24))
def test_it_stops_exactly_if_the_text_holds_a_stop_string(stops: list[str], text: str) -> None:
    sent, stop_string = run(stops, list(text))
    ends = [(text.find(stop) + len(stop), -len(stop), stop) for stop in stops if stop in text]
    if ends:
        end, _, expected = min(ends)
        assert (sent, stop_string) == (text[: end - len(expected)], expected)
    else:
        assert (sent, stop_string) == (text, "")
