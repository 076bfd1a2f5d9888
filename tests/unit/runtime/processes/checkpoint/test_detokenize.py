"""Ids -> text in steps: the same text as the tokenizer's own decode, monotone, bounded."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from runtime.processes.checkpoint.tokenizer import TextTable, Tokenizer
from runtime.processes.pipeline.detokenizer import DetokenizerManager
from runtime.protocol.errors import InternalFault
from runtime.protocol.io_struct import BatchTokenIDOutput, FinishReason, TextRequest, TokenOutput
from runtime.protocol.vocabulary import Vocabulary
from tests.unit.runtime.processes.shown_text import IncrementalText

SAME = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
BYTES = TextTable(Vocabulary(tuple(bytes([value]) for value in range(256))), {256: b"<end>"})
TEXTS = st.text(
    st.one_of(st.characters(), st.sampled_from("  안녕하세요반갑습니다🦊🐕👩‍👧é—\n the dog")), max_size=12
)


@pytest.fixture(scope="session")
def tokenizers(tokenizer_files: dict[str, dict[str, Any]]) -> dict[str, Tokenizer]:
    return {name: Tokenizer(data, {}, 512) for name, data in tokenizer_files.items()}


def feed(text: IncrementalText, ids: list[int], cuts: list[int], **last: Any) -> list[str]:
    """The ids in pieces cut at `cuts`; what was shown after each."""
    places = sorted({min(cut, len(ids)) for cut in cuts} | {0, len(ids)})
    shown: list[str] = []
    for start, end in itertools.pairwise(places):
        text.feed(ids[start:end], finished=end == len(ids), **(last if end == len(ids) else {}))
        shown.append(text.text)
    return shown


@SAME
@given(text=TEXTS, cuts=st.lists(st.integers(0, 40), max_size=8))
def test_text_of_any_split_equals_decode(
    tokenizers: dict[str, Tokenizer], kind: str, text: str, cuts: list[int]
) -> None:
    tokenizer = tokenizers[kind]
    ids = tokenizer.encode(text, add_special_tokens=False)
    made = IncrementalText(tokenizer.text_table, at_start=True)
    shown = feed(made, ids, cuts)
    assert made.text == tokenizer.decode(ids)
    assert all(later.startswith(sooner) for sooner, later in itertools.pairwise(shown))


@SAME
@given(data=st.data(), skip=st.booleans(), cuts=st.lists(st.integers(0, 12), max_size=5))
def test_any_ids_of_a_byte_level_tokenizer_equal_decode(
    tokenizers: dict[str, Tokenizer], data: st.DataObject, skip: bool, cuts: list[int]
) -> None:
    tokenizer = tokenizers["byte level"]
    ids = data.draw(st.lists(st.integers(0, 511), max_size=12))
    made = IncrementalText(tokenizer.text_table, at_start=True, skip_special_tokens=skip)
    feed(made, ids, cuts)
    assert made.text == tokenizer.decode(ids, skip_special_tokens=skip)


@SAME
@given(before=TEXTS, text=TEXTS, cuts=st.lists(st.integers(0, 40), max_size=5))
def test_after_a_prompt_the_text_is_what_decode_adds_to_it(
    tokenizers: dict[str, Tokenizer], kind: str, before: str, text: str, cuts: list[int]
) -> None:
    """A word's own space stays: prompt + output is what the tokenizer would decode in one go."""
    tokenizer = tokenizers[kind]
    prompt = tokenizer.encode("a" + before, add_special_tokens=False)
    ids = tokenizer.encode_plain(text)
    made = IncrementalText(tokenizer.text_table)
    feed(made, ids, cuts)
    assert tokenizer.decode(prompt) + made.text == tokenizer.decode([*prompt, *ids])


def test_unfinished_characters_are_held_back() -> None:
    text = IncrementalText(BYTES)
    fox = list("🦊".encode())
    assert [text.feed([byte]) for byte in fox] == ["", "", "", "🦊"]
    assert text.feed(fox[:2]) == ""
    assert text.feed([], finished=True) == "\ufffd"


def test_invalid_bytes_show_once_certain_and_do_not_pile_up() -> None:
    text = IncrementalText(BYTES)
    for count in range(1, 5000):
        assert text.feed([0xFF]) == "\ufffd"
        assert len(text) == count
    assert text.feed([0xE2]) == ""
    assert text.feed([ord("a")]) == "\ufffda"


def test_byte_fallback_marks_every_broken_byte_and_keeps_whole_characters() -> None:
    table = TextTable(BYTES.vocabulary, {}, each_byte=True)
    text = IncrementalText(table)
    text.feed([*"안".encode(), 0xE2, 0x82])
    text.feed([ord("a")], finished=True)
    assert text.text == "안\ufffd\ufffda"


@given(
    text=st.text(st.sampled_from("abc é"), max_size=20),
    stops=st.lists(st.text(st.sampled_from("abc é"), min_size=1, max_size=4), min_size=1, max_size=3),
    cuts=st.lists(st.integers(0, 30), max_size=8),
    trim=st.booleans(),
)
def test_stop_strings_are_cut_and_never_shown_in_part(
    text: str, stops: list[str], cuts: list[int], trim: bool
) -> None:
    ids = list(text.encode())
    ends = [(text.encode().find(stop.encode()) + len(stop.encode()), stop) for stop in stops if stop in text]
    matched: str | None = None
    if ends:  # what a scheduler reports: the stop that is complete first, when it is
        end, matched = min(ends, key=lambda pair: (pair[0], -len(pair[1].encode())))
        ids = ids[:end]
    made = IncrementalText(BYTES, stop=stops, no_stop_trim=not trim)
    shown = feed(made, ids, cuts, matched=matched)
    produced = bytes(ids).decode(errors="replace")
    if not ids:
        return
    expected = produced[: produced.find(matched)] if matched is not None and trim else produced
    assert made.text == expected
    assert all(expected.startswith(part) for part in shown)


@pytest.mark.parametrize("cuts", [[], [1], [2], [1, 2, 3], [3]])
def test_a_stop_string_is_cut_where_it_ended_the_text(cuts: list[int]) -> None:
    """Control tokens' names are no text to whoever looks for stop strings, so one in such a name, shown or
    not, is none."""
    made = IncrementalText(BYTES, stop=["n"], skip_special_tokens=False)
    ids = [ord("a"), 256, ord("b"), ord("n")]
    shown = feed(made, ids, cuts, matched="n")
    assert made.text == "a<end>b"
    assert all(later.startswith(sooner) for sooner, later in itertools.pairwise(shown))


def test_a_matched_id_is_left_out_of_the_text_but_not_of_the_ids() -> None:
    for trim, expected in ((True, "a"), (False, "a<end>")):
        text = IncrementalText(BYTES, skip_special_tokens=False, no_stop_trim=not trim)
        text.feed([ord("a"), 256], finished=True, matched=256)
        assert text.text == expected
        assert text.ids == [ord("a"), 256]


def test_replaced_ids_change_no_text() -> None:
    table = TextTable(Vocabulary((b"a", b"b", b"ab", b"abc")), {})
    text = IncrementalText(table)
    text.feed([0, 1])
    assert text.feed([3], replaced=2) == "c"
    assert text.ids == [3]
    with pytest.raises(InternalFault):
        text.feed([0], replaced=1)
    with pytest.raises(InternalFault):
        IncrementalText(table).feed([0], replaced=1)


def news(rid: str, text: str, finish: FinishReason | None = None, **fields: Any) -> TokenOutput:
    return TokenOutput(rid=rid, new_ids=list(text.encode()), finish=finish, **fields)


def batch(*outputs: TokenOutput, begun: tuple[TextRequest, ...] = ()) -> BatchTokenIDOutput:
    return BatchTokenIDOutput(
        rids=[output.rid for output in outputs], outputs=list(outputs), begun=list(begun)
    )


def test_manager_gives_each_delta_its_text() -> None:
    manager = DetokenizerManager(BYTES)
    made = manager.handle(
        [batch(news("s", "ab"), news("w", "xy"), begun=(TextRequest("s"), TextRequest("w")))]
    )
    assert made is not None
    assert [(o.rid, o.text) for o in made.outputs] == [("s", "ab"), ("w", "xy")]
    done = FinishReason(type="length")
    made = manager.handle([batch(news("s", "c")), batch(news("s", "d", done), news("w", "z", done))])
    assert made is not None
    assert [(o.rid, o.text, bytes(o.new_ids)) for o in made.outputs] == [
        ("s", "c", b"c"), ("s", "d", b"d"), ("w", "z", b"z"),
    ]  # fmt: skip
    assert len(manager) == 0
    assert manager.handle([batch(news("s", "late"))]) is None


def test_manager_is_bounded_and_says_so() -> None:
    manager = DetokenizerManager(BYTES, max_states=2)
    made = manager.handle([batch(begun=tuple(TextRequest(rid=f"r{number}") for number in range(3)))])
    assert made is not None
    assert len(manager) == 2
    (failed,) = made.outputs
    assert failed.rid == "r0"
    assert failed.finish is not None
    assert failed.finish.error is not None
    assert "at most 2" in failed.finish.error["message"]


def test_manager_fails_only_the_request_with_impossible_news() -> None:
    manager = DetokenizerManager(BYTES)
    begun = (TextRequest(rid="bad"), TextRequest(rid="good"))
    end = FinishReason(type="length")
    wrong = TokenOutput(rid="bad", new_ids=[1], replaced=3)
    made = manager.handle([batch(wrong, news("good", "ok", end), begun=begun)])
    assert made is not None
    kinds = {output.rid: output.finish.type for output in made.outputs if output.finish is not None}
    assert kinds == {"bad": "abort", "good": "length"}
    assert len(manager) == 0
