"""What a request's body may be, and what is said of one that may not."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.protocol.errors import BadRequest, InvalidJson, RuntimeFault, WrongMediaType
from runtime.server.http.body import check_media_type, decode_json, to_struct
from tests.exploring import tries

DEPTH = 16


class Inner(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    temperature: float = 1.0
    stop: list[str] = []


class Outer(msgspec.Struct, forbid_unknown_fields=True):
    text: str
    sampling: Inner = Inner()
    bias: dict[int, float] = {}


plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


@given(plain, st.booleans())
@settings(max_examples=tries(150))
def test_valid_json_is_what_it_says(value: Any, ascii_only: bool) -> None:
    text = json.dumps(value, ensure_ascii=ascii_only)
    try:
        body = text.encode()
    except UnicodeEncodeError:
        return  # a lone surrogate that is not escaped is no UTF-8
    expected = json.loads(text)
    assert decode_json(body, 64) == repaired(expected)


def repaired(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if isinstance(value, list):
        return [repaired(one) for one in value]
    if isinstance(value, dict):
        return {repaired(key): repaired(one) for key, one in value.items()}
    return value


@given(
    st.binary(max_size=60) | st.text(alphabet='{}[]":,\\u0123456789eE+-. tfn', max_size=40).map(str.encode)
)
@settings(max_examples=tries(300))
def test_anything_else_is_refused_and_never_a_crash(body: bytes) -> None:
    found: RuntimeFault | None = None
    try:
        json.dumps(decode_json(body, DEPTH))
    except RuntimeFault as fault:
        found = fault
    assert found is None or (400 <= found.status < 500 and found.message)


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b'{"a": 1,}', "line 1, column "),  # 8 or 9, by the release of Python
        (b'{"a" 1}', "line 1, column 6"),
        (b'{"a": 1\n "b": 2}', "line 2, column 2"),
        (b"", "line 1, column 1"),
        (b"text=hello", "line 1, column 1"),
        (b'{"a": NaN}', "NaN"),
        (b'{"a": -Infinity}', "-Infinity"),
        (b'{"a": 1, "a": 2}', "twice"),
        (b'{"a": "\xff"}', "not UTF-8 at byte 7"),
        (b'{"a": 1} {"b": 2}', "column 10"),
        (b"[" * 17 + b"]" * 17, "nested more than 16"),
        (b"[" * 100_000, "nested more than 16"),
        (b'{"a":' * 100_000, "nested more than 16"),
        (b'{"seed": 1' + b"0" * 30 + b"}", "64 bits"),
        (b'{"seed": 1' + b"0" * 9000 + b"}", "64 bits"),
    ],
)
def test_refusals_say_where(body: bytes, says: str) -> None:
    with pytest.raises(BadRequest) as caught:
        decode_json(body, DEPTH)
    assert says in str(caught.value)


def test_brackets_and_digits_in_strings_do_not_count() -> None:
    text = "[" * 500 + '"\\' + "1" * 40
    assert decode_json(json.dumps({"text": text}).encode(), 2) == {"text": text}


def test_depth_is_exact() -> None:
    assert decode_json(b"[" * DEPTH + b"]" * DEPTH, DEPTH)
    with pytest.raises(InvalidJson):
        decode_json(b"[" * (DEPTH + 1) + b"]" * (DEPTH + 1), DEPTH)


@given(plain)
@settings(max_examples=tries(150))
def test_depth_is_that_of_the_value(value: Any) -> None:
    def depth(one: Any) -> int:
        inner = one.values() if isinstance(one, dict) else one if isinstance(one, list) else None
        return 0 if inner is None else 1 + max(map(depth, inner), default=0)

    body = json.dumps(value).encode()
    deep = depth(value)
    decode_json(body, max(1, deep))
    if deep > 1:
        with pytest.raises(InvalidJson):
            decode_json(body, deep - 1)


@pytest.mark.parametrize(
    "body",
    [b"[" + b"[]," * 1_000_000 + b"[]]",
     b'{"a":{' + b",".join(b'"%d":1' % i for i in range(300_000)) + b',"0":2}}',
     b'["' + b'\\"' * 1_000_000 + b'"]', b'["' + b'\\"' * 1_000_000],
)  # fmt: skip
@pytest.mark.timeout(600)
def test_bodies_made_to_be_slow_are_not(body: bytes) -> None:
    with contextlib.suppress(RuntimeFault):
        decode_json(body, DEPTH)


def test_a_compressed_body_is_refused() -> None:
    with pytest.raises(WrongMediaType):
        check_media_type("application/json", "gzip")
    check_media_type("application/json", "identity")


def test_a_cut_emoji_becomes_a_replacement_character() -> None:
    assert decode_json(b'{"a": "x\\ud83d y", "b": ["\\ude00"]}', DEPTH) == {"a": "x� y", "b": ["�"]}
    assert decode_json(b'"\\ud83d\\ude00"', DEPTH) == "😀"


def test_unknown_fields_name_the_near_one_and_their_path() -> None:
    with pytest.raises(BadRequest) as caught:
        to_struct({"text": "a", "sampling": {"temprature": 1}}, Outer)
    assert "temprature" in str(caught.value)
    with pytest.raises(BadRequest) as caught:
        to_struct({"text": "a", "samplin": {"n": 1}}, Outer)
    assert caught.value.where == "samplin"
    assert "'sampling'" in str(caught.value)


@pytest.mark.parametrize("nothing", [None, False])
def test_what_says_nothing_is_taken(nothing: Any) -> None:
    plain = to_struct({"text": "a", "sampling": {"stop": ["a"]}}, Outer)
    said = {"text": "a", "new": nothing, "sampling": {"stop": ["a"], "new": nothing}, "bias": nothing}
    assert to_struct(said, Outer) == plain
    for empty in ("", [], {}):
        assert to_struct(said | {"newer": empty}, Outer) == plain
    for value in (0, "x", [None], {"a": None}, True):
        with pytest.raises(BadRequest):
            to_struct(said | {"new": value}, Outer)
        with pytest.raises(BadRequest):
            to_struct(said | {"sampling": {"new": value}}, Outer)
    with pytest.raises(BadRequest):
        to_struct({"text": nothing}, Outer)  # it is needed


def test_wrong_types_name_their_path() -> None:
    with pytest.raises(BadRequest) as caught:
        to_struct({"text": "a", "sampling": {"stop": ["a", 3]}}, Outer)
    assert caught.value.where == "sampling.stop[1]"
    with pytest.raises(BadRequest) as caught:
        to_struct({"sampling": {}}, Outer)
    assert "text" in str(caught.value)
    assert to_struct({"text": "a", "bias": {"7": 1}}, Outer).bias == {7: 1.0}


@pytest.mark.parametrize(
    "header",
    ["application/json", "application/json; charset=utf-8", 'APPLICATION/JSON;charset="UTF-8"',
     "application/problem+json"],
)  # fmt: skip
def test_json_media_types(header: str) -> None:
    check_media_type(header)


@pytest.mark.parametrize(
    "header",
    [None, "", "text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x",
     "application/json; charset=latin-1", "application/jsonx"],
)  # fmt: skip
def test_other_media_types_say_what_to_send(header: str | None) -> None:
    with pytest.raises(WrongMediaType) as caught:
        check_media_type(header)
    assert caught.value.status == 415
