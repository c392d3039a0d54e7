"""Stop strings: the result does not depend on how the text is cut."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from wavecore.frontend.text.stop_strings import StopStrings


def run(parts: list[str], stops: list[str], include: bool = False) -> tuple[list[str], str | None]:
    matcher = StopStrings(stops, include)
    shown = []
    for part in parts:
        shown.append(matcher.feed(part))
        if matcher.found is not None:
            return shown, matcher.found
    return [*shown, matcher.flush()], None


def test_nothing_of_a_stop_text_is_sent() -> None:
    shown, found = run(["DEF", "G", "HI", "J"], ["DEFGHIJ"])
    assert shown == ["", "", "", ""]
    assert found == "DEFGHIJ"


def test_held_back_tail_is_flushed() -> None:
    assert run(["abc", "Z", "Z"], ["ZZZ"]) == (["abc", "", "", "ZZ"], None)
    assert run(["Z", "ZaZ"], ["ZZZ"]) == (["", "ZZa", "Z"], None)


def test_stop_string_is_kept_on_demand() -> None:
    assert run(["ab", "cSTO", "Pxyz"], ["STOP"], include=True) == (["ab", "c", "STOP"], "STOP")
    assert run(["ab", "cSTO", "Pxyz"], ["STOP"]) == (["ab", "c", ""], "STOP")


def test_only_text_that_may_begin_a_stop_is_held() -> None:
    matcher = StopStrings(["</answer>"], False)
    assert matcher.feed("a < b and ") == "a < b and "
    assert matcher.feed("a <") == "a "
    assert matcher.feed(" b") == "< b"


def naive(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """The first stop that is complete as characters come in, the longest of those that end there."""
    for end in range(len(text) + 1):
        ends = [s for s in stops if text[:end].endswith(s)]
        if ends:
            stop = max(ends, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


@given(
    text=st.text("abc", max_size=30),
    stops=st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=4),
    cuts=st.lists(st.integers(1, 5), max_size=30),
    include=st.booleans(),
)
def test_any_cut_gives_the_same(text: str, stops: list[str], cuts: list[int], include: bool) -> None:
    parts, at = [], 0
    for size in cuts:
        parts.append(text[at : at + size])
        at += size
    parts.append(text[at:])
    shown, found = run(parts, stops, include)
    assert ("".join(shown), found) == naive(text, stops, include)


def test_what_was_shown_or_dropped_is_not_shown_again() -> None:
    matcher = StopStrings(["ZZZ"], False)
    assert [matcher.feed("aZ"), matcher.flush(), matcher.flush(), matcher.feed("Zb")] == ["a", "Z", "", "Zb"]
    matcher = StopStrings(["ZZZ"], False)
    assert [matcher.feed("aZ"), matcher.feed("ZZZ"), matcher.flush()] == ["a", "", ""]


def test_a_stop_string_that_is_complete_too_early_is_text_and_one_that_completes_later_ends_it() -> None:
    begun = StopStrings(["hCapt"], include=False)
    assert begun.feed(" Ranch", may_end=False) == " Ranc"
    assert (begun.feed("Capt"), begun.found) == ("", "hCapt")
    early = StopStrings(["b"], include=False)
    assert (early.feed("ab", may_end=False), early.found) == ("ab", None)
    assert (early.feed("cb"), early.found) == ("c", "b")


def test_a_stop_string_inside_what_was_held_too_early_does_not_end_the_text_later() -> None:
    stops = StopStrings(["ab", "xabyy"], include=False)
    assert stops.feed("xab", may_end=False) == ""
    assert (stops.feed("c"), stops.found) == ("xabc", None)
    again = StopStrings(["ab", "xabyy"], include=True)
    assert again.feed("xab", may_end=False) == ""
    assert (again.feed("yyz"), again.found) == ("xabyy", "xabyy")
