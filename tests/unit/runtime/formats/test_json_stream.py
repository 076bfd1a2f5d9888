"""JsonStream: the same states at the same places however the text is split; nothing shown is taken back; it
accepts what the standard library's reader accepts."""

from __future__ import annotations

import itertools
import json
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.formats.json_stream import MAX_DEPTH, JsonEvent, JsonStream, JsonStreamError
from tests.partial_json import is_prefix

strings = st.text(st.characters(codec="utf-8") | st.sampled_from('"\\\\/\n\t\x00\x1f😀é漢'))
scalars = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | strings
)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(strings, inner, max_size=4),
    max_leaves=12,
)
layouts = st.sampled_from(
    [
        {},
        {"separators": (",", ":")},
        {"ensure_ascii": False},
        {"indent": 2},
        {"indent": "\t", "ensure_ascii": False, "separators": (" \r\n,", " : ")},
    ]
)


def cut(text: str, seed: int) -> list[str]:
    """The text in pieces, some of them empty."""
    random_ = random.Random(seed)
    places = sorted(random_.choices(range(len(text) + 1), k=random_.randint(0, len(text))))
    return [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]


def states(text: str, pieces: list[str], *, strings: bool = True) -> dict[int, Any]:
    """Characters read -> the value shown then, as JSON; "" where there is none."""
    stream, at = JsonStream(strings=strings), 0
    seen: dict[int, Any] = {}
    for piece in pieces:
        stream.feed(piece)
        at += len(piece)
        seen[at] = json.dumps(stream.value) if stream.started else ""
    stream.close()
    seen[at + 1] = json.dumps(stream.value)
    return seen


@given(values, layouts, st.integers(0, 2**32), st.booleans())
def test_any_split_shows_the_same_at_the_same_places(
    value: Any, layout: dict[str, Any], seed: int, with_strings: bool
) -> None:
    text = json.dumps(value, **layout)
    every = states(text, list(text), strings=with_strings)
    some = states(text, cut(text, seed), strings=with_strings)
    assert some == {at: every.get(at, "") for at in some}
    assert json.loads(every[len(text) + 1]) == value


@given(values, layouts, st.booleans())
def test_what_was_shown_is_the_beginning_of_what_comes(
    value: Any, layout: dict[str, Any], with_strings: bool
) -> None:
    text = json.dumps(value, **layout)
    shown = [json.loads(seen) for seen in states(text, list(text), strings=with_strings).values() if seen]
    for earlier, later in itertools.pairwise(shown):
        assert is_prefix(earlier, later)
    assert all(is_prefix(one, value) for one in shown)
    if not with_strings:
        assert leaves(shown) <= leaves([value])


def leaves(value: Any) -> set[str]:
    match value:
        case dict():
            return {leaf for inner in value.values() for leaf in leaves(inner)}
        case list():
            return {leaf for inner in value for leaf in leaves(inner)}
        case _:
            return {json.dumps(value)}


@given(values, layouts, st.integers(0, 2**32))
def test_events_tell_the_whole_value(value: Any, layout: dict[str, Any], seed: int) -> None:
    """The value can be put together from the events alone, string pieces included."""
    text = json.dumps(value, **layout)
    stream = JsonStream()
    events = [event for piece in cut(text, seed) for event in stream.feed(piece)] + stream.close()
    pieces: dict[tuple[str | int, ...], str] = {}
    ended: dict[tuple[str | int, ...], Any] = {}
    for path, told, complete in events:
        assert path not in ended
        if complete:
            ended[path] = told
            if isinstance(told, str):
                assert told.startswith(pieces.get(path, ""))
        elif isinstance(told, str):
            pieces[path] = pieces.get(path, "") + told
        else:
            assert told in ({}, [])
    assert ended[()] == value
    for path, told in ended.items():
        inside = value
        for step in path:
            inside = inside[step]
        assert told == inside
    paths = [path for path, _, complete in events if complete]
    assert min(paths, key=len) == ()


mutations = st.text(st.sampled_from('{}[]",:\\u0dE8c.-+ \ntrfalsn1"'), max_size=14)


def strictly(text: str) -> Any:
    """json.loads without what RFC 8259 does not know; halves of surrogate pairs become U+FFFD."""

    def refuse(name: str) -> Any:
        raise ValueError(name)

    return _paired(json.loads(text, parse_constant=refuse))


def _paired(value: Any) -> Any:
    match value:
        case str():
            return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        case list():
            return [_paired(inner) for inner in value]
        case dict():
            return {_paired(name): _paired(inner) for name, inner in value.items()}
        case _:
            return value


@given(
    mutations
    | st.builds(lambda v, cut_, more: json.dumps(v)[:cut_] + more, values, st.integers(0, 9), mutations)
)
def test_it_reads_what_the_standard_librarys_reader_reads(text: str) -> None:
    try:
        wanted = strictly(text)
    except (ValueError, OverflowError):
        with pytest.raises(JsonStreamError):
            read(text)
        return
    assert read(text) == wanted


def read(text: str) -> Any:
    stream = JsonStream()
    for char in text:
        stream.feed(char)
    stream.close()
    return stream.value


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("", ""),
        ("  {", {}),
        ('{"a', {}),
        ('{"a"', {}),
        ('{"a":', {}),
        ('{"a": "', {"a": ""}),
        ('{"a": "x\\', {"a": "x"}),
        ('{"a": "x\\u00e', {"a": "x"}),
        ('{"a": "x\\ud83d', {"a": "x"}),
        ('{"a": "x\\ud83d\\ude0', {"a": "x"}),
        ('{"a": "x\\ud83d\\ude00', {"a": "x😀"}),
        ('{"a": "x\\ud83dy', {"a": "x\ufffdy"}),
        ('{"a": 12', {}),
        ('{"a": 12 ', {"a": 12}),
        ('{"a": 12}', {"a": 12}),
        ('{"a": tru', {}),
        ('{"a": true', {"a": True}),
        ('{"a": nul', {}),
        ('{"a": [1, [', {"a": [1, []]}),
        ('{"a": [1, ["b', {"a": [1, ["b"]]}),
        ('{"a": [1, {"b": 2', {"a": [1, {}]}),
        ('[{"a": 1}, {"b": 2}, ', [{"a": 1}, {"b": 2}]),
        ("12", ""),
    ],
)
def test_what_is_shown(text: str, shown: Any) -> None:
    stream = JsonStream()
    stream.feed(text)
    assert (stream.value if stream.started else "") == shown


def test_strings_may_be_kept_back() -> None:
    stream = JsonStream(strings=False)
    assert stream.feed('{"name": "Al') == [JsonEvent((), {}, False)]
    assert stream.value == {}
    assert stream.feed('an"') == [JsonEvent(("name",), "Alan", True)]
    assert stream.value == {"name": "Alan"}


def test_values_of_different_moments_are_apart() -> None:
    stream = JsonStream()
    stream.feed('{"a": [1, 2')
    first = stream.value
    stream.feed(', 3], "b": {"c": 1}}')
    assert first == {"a": [1]}
    assert stream.value == {"a": [1, 2, 3], "b": {"c": 1}}


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[1,\n 2,\n  x]", "'x' stands where a value should be at line 3, column 3 (character 10)"),
        ('{"a" 1}', "'1' stands where ':' should be at line 1, column 6"),
        ('{"a": 1,}', "'}' stands where a name should be"),
        ("[01]", "'01' is no number"),
        ("[" + "1" * 5000 + "]", "the number 11111111111111111111... cannot be held"),
        ("[1] 2", "there is text after the end"),
        ('["\n"]', "control character"),
        ('["\\x"]', "is no escape"),
        ("[nil]", "'ni' is no JSON"),
        ('{"a": "b', "the text ends inside a string"),
        ('{"a"', "the text ends where ':' should be"),
        ("[" * (MAX_DEPTH + 1), "levels"),
    ],
)
def test_errors_tell_the_place(text: str, told: str) -> None:
    with pytest.raises(JsonStreamError) as caught:
        read(text)
    assert told in str(caught.value)


def test_an_error_stays() -> None:
    stream = JsonStream()
    with pytest.raises(JsonStreamError, match="column 2"):
        stream.feed("[x")
    with pytest.raises(JsonStreamError, match="column 2"):
        stream.feed("1")
    with pytest.raises(JsonStreamError, match="column 2"):
        stream.close()


def test_the_last_of_two_members_of_one_name_wins_as_in_the_standard_library() -> None:
    text = '{"a": 1, "b": 2, "a": "three"}'
    assert read(text) == json.loads(text)


def test_a_piece_costs_no_more_late_than_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted, not timed: steps taken over a long text, each of which moves on."""
    counted = 0

    def counting(step: Any) -> Any:
        def call(text: str, at: int) -> int:
            nonlocal counted
            counted += 1
            return int(step(text, at))

        return call

    text = json.dumps([{"n": number, "s": "word" * 5} for number in range(2000)])
    stream = JsonStream()
    monkeypatch.setattr(stream, "_steps", tuple(counting(step) for step in stream._steps))
    per_piece = []
    for at in range(0, len(text), 3):
        before = counted
        stream.feed(text[at : at + 3])
        per_piece.append(counted - before)
    stream.close()
    assert max(per_piece) <= 6
