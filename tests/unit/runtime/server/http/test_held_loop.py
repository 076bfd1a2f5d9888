"""How long one body holds the event loop, in processor time of this process: what other loads a machine has
does not count. The server is an application that reads bodies as the routes do."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from runtime.protocol.errors import RuntimeFault
from runtime.server.http.body import decode_json, decode_long

SIZE = 30 << 20


def body(item: bytes, count: int | None = None) -> bytes:
    return b'{"input_ids":[' + item * (SIZE // len(item) if count is None else count) + b"1]}"


BODIES: dict[str, Callable[[], bytes]] = {
    "numbers": lambda: body(b"50123,"),
    "lists": lambda: body(b"[],"),
    "objects": lambda: body(b"{},"),
    "texts": lambda: body(b'"",'),
    "as many numbers as may be": lambda: body(b"50123,", 1_000_000),
    "one text": lambda: b'{"text":"' + b"hello, world " * (SIZE // 13) + b'"}',
    "cut emojis": lambda: b'{"text":"' + rb"\ud83d" * (SIZE // 6) + b'"}',
    "names": lambda: b"{" + b",".join(b'"%d":0' % number for number in range(SIZE // 11)) + b"}",
}


@pytest.fixture(autouse=True)
def frozen() -> Iterator[None]:
    """What is there already is not looked through by the collector, as in the server's processes."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("numbers", "values"),
        ("lists", "values"),
        ("objects", "values"),
        ("texts", "values"),
        ("names", "values"),
    ],
)
def test_bodies_of_many_values_are_refused_unread(
    name: str, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: Any, **__: Any) -> Any:
        raise AssertionError("it was read")

    monkeypatch.setattr("runtime.server.http.body.json.loads", never)
    with pytest.raises(RuntimeFault, match=says):
        decode_long(BODIES[name]()[: 4 << 20], 64, 100_000)


def test_separators_within_texts_are_no_values() -> None:
    text = r"a,b:c[d{e\",f\\" * 20_000
    content = ('{"a":"' + text + '","b":[1,2]}').encode()
    assert decode_long(content, 64, 1000)["b"] == [1, 2]
    with pytest.raises(RuntimeFault, match="more than 3 values"):
        decode_long(content, 64, 3)


def many_numbers(item: str, last: str = "1]") -> str:
    return f'{{"input_ids": [{item * 200}{last}, "text": "{"7" * 300}"}}'


@pytest.mark.parametrize(
    "text",
    [
        many_numbers("5, "),
        many_numbers("-1.5e-3,\n"),
        many_numbers("0.1,"),
        many_numbers("[1,2],[3],"),
        many_numbers("5,", '{"a": [1], "b": "\\ud83d"}]'),
        many_numbers("18446744073709551615,"),
    ],
)
def test_lists_of_numbers_are_read_as_any_other(text: str) -> None:
    assert decode_long(text.encode(), 64, 10_000) == decode_json(text.encode(), 64)


@pytest.mark.parametrize(
    "text",
    [
        many_numbers("5,,"),
        many_numbers("05,"),
        many_numbers("5,", "NaN]"),
        many_numbers("5,", "1e999]"),
        many_numbers("5,", '{"a": 1, "a": 2}]'),
        many_numbers("5,").replace("text", "input_ids"),
        many_numbers("5,", "99999999999999999999]"),
        many_numbers("5,", "[" * 70 + "]" * 71),
        many_numbers("5,", "1"),
        many_numbers("5,", "1]") + "5",
    ],
)
def test_lists_of_numbers_are_refused_as_any_other(text: str) -> None:
    says = []
    for decode in (lambda: decode_long(text.encode(), 64, 10_000), lambda: decode_json(text.encode(), 64)):
        try:
            says.append(str(decode()))
        except RuntimeFault as fault:
            says.append(repr(fault))
    assert says[0] == says[1]
