"""Stop conditions, alone."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from runtime.protocol.io_struct import FinishReason
from runtime.protocol.sampling import SamplingParams
from runtime.protocol.vocabulary import Vocabulary
from runtime.scheduler.stop import LENGTH, STOP, StopRule

VOCABULARY = Vocabulary((b"<e>", b"a", b"b"), frozenset({0}), frozenset({0}))


def rule(**params: object) -> StopRule:
    return StopRule.of(SamplingParams(**params), VOCABULARY)  # type: ignore[arg-type]


def test_the_order() -> None:
    one = rule(max_new_tokens=3, stop_token_ids=(2,))
    assert one.finish(2, "x", 3, True) == FinishReason(type="stop", matched=2)
    assert one.finish(0, "x", 3, True) == FinishReason(type="stop", matched=0)
    assert one.finish(1, "x", 3, True) == FinishReason(type="stop", matched="x")
    assert one.finish(1, None, 3, True) == LENGTH
    assert one.finish(1, None, 2, True) == STOP
    assert one.finish(1, None, 2, False) is None


def test_ignore_eos_ignores_ids_and_not_strings() -> None:
    one = rule(ignore_eos=True, stop_token_ids=(2,), stop=("ab",))
    assert one.finish(0, None, 1, False) is None
    assert one.finish(2, None, 1, False) is None
    assert one.finish(2, "ab", 1, False) == FinishReason(type="stop", matched="ab")


def test_masked_until_min_new_tokens() -> None:
    one = rule(min_new_tokens=2, stop_token_ids=(2,))
    assert [one.masked_ids(produced) for produced in range(3)] == [{0, 2}, {0, 2}, frozenset()]
    assert rule(min_new_tokens=2, ignore_eos=True).masked_ids(0) == frozenset()


TEXT = st.text("abé", max_size=14)


@given(
    pieces=st.lists(TEXT.map(str.encode), max_size=8),
    stops=st.lists(TEXT.filter(bool), min_size=1, max_size=4),
)
def test_found_as_soon_as_complete_however_it_is_cut(pieces: list[bytes], stops: list[str]) -> None:
    one = rule(stop=tuple(stops))
    whole, tail = b"", b""
    for piece in pieces:
        found, tail = one.match_text(tail, piece)
        ends = []
        for stop in stops:
            at = (whole + piece).find(stop.encode())
            if at >= 0:
                ends.append((at + len(stop.encode()), -len(stop.encode()), stop))
        assert found == (min(ends)[2] if ends else None)
        if found:
            return
        whole += piece
        assert len(tail) < max(len(stop.encode()) for stop in stops)


@given(text=TEXT, stops=st.lists(TEXT.filter(bool), min_size=1, max_size=4))
def test_the_same_string_for_any_tokens(text: str, stops: list[str]) -> None:
    one = rule(stop=tuple(stops))
    tail, found = b"", None
    for byte in text.encode():
        found, tail = one.match_text(tail, bytes([byte]))
        if found:
            break
    assert one.match_text(b"", text.encode())[0] == found
