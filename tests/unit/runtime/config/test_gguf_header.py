"""The header of a GGUF file is read, or refused as a ModelLoadError: whatever stands in the file."""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.config.gguf.header import read_header
from runtime.protocol.errors import ModelLoadError

U32, STRING, ARRAY = 4, 8, 9


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def array(kind: int, items: list[bytes], count: int | None = None) -> bytes:
    return struct.pack("<IQ", kind, len(items) if count is None else count) + b"".join(items)


def whole(values: list[tuple[bytes, int, bytes]], tensors: Sequence[bytes] = (), **counts: int) -> bytes:
    """A file of these values (name, type, bytes) and tensors. counts: said in place of the right ones."""
    head = counts.get("tensor_count", len(tensors)), counts.get("value_count", len(values))
    body = [text(name) + struct.pack("<I", kind) + data for name, kind, data in values]
    return b"".join((b"GGUF", struct.pack("<IQQ", 3, *head), *body, *tensors, b"\0" * 64))


def nested(depth: int) -> bytes:
    made = array(U32, [struct.pack("<I", 7)])
    for _ in range(depth - 1):
        made = array(ARRAY, [made])
    return made


def tensor(name: bytes) -> bytes:
    return text(name) + struct.pack("<IQIQ", 1, 0, 0, 0)


@pytest.fixture
def read(tmp_path: Path) -> Callable[[bytes], Any]:
    def read(data: bytes) -> Any:
        path = tmp_path / "x.gguf"
        path.write_bytes(data)
        return read_header(path)

    return read


def test_arrays_in_arrays_are_read(read: Callable[[bytes], Any]) -> None:
    header = read(whole([(b"a", ARRAY, nested(2)), (b"b", ARRAY, array(STRING, [text(b"x"), text(b"")]))]))
    assert header.values == {"a": [[7]], "b": ["x", ""]}


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (whole([(b"a", ARRAY, nested(5))]), "nested more than 4 deep"),
        (whole([(b"a", ARRAY, nested(100_000))]), "nested more than 4 deep"),
        (whole([(b"a", ARRAY, array(STRING, [], 1 << 62))]), "items of an array end after the end"),
        (whole([(b"a", ARRAY, array(U32, [], 1 << 62))]), "items of an array end after the end"),
        (whole([(b"a", ARRAY, array(ARRAY, [], 1 << 62))]), "items of an array end after the end"),
        (whole([(b"a", ARRAY, array(99, [b"x"]))]), "unknown type 99"),
        (whole([(b"a", STRING, struct.pack("<Q", 1 << 63))]), "bytes of a string end after the end"),
        (whole([], value_count=1 << 60), "values end after the end"),
        (whole([], tensor_count=1 << 60), "tensors end after the end"),
        (whole([(b"a", U32, b"\0" * 4)] * 2), "'a' occurs twice"),
        (whole([], [tensor(b"t")] * 2), "two tensors have the same name"),
        (whole([(b"general.alignment", U32, b"\0" * 4)], [tensor(b"t")]), "alignment"),
    ],
    ids=range(12),
)
def test_what_cannot_be_is_refused(data: bytes, says: str, read: Callable[[bytes], Any]) -> None:
    with pytest.raises(ModelLoadError, match=says):
        read(data)


GOOD = whole(
    [(b"general.alignment", U32, struct.pack("<I", 8)), (b"a", ARRAY, nested(2)), (b"b", STRING, text(b"x"))],
    [tensor(b"t")],
)


@settings(deadline=None)
@given(
    cut=st.integers(0, len(GOOD)),
    changes=st.lists(st.tuples(st.integers(0, len(GOOD) - 1), st.integers(0, 255)), max_size=4),
    more=st.binary(max_size=64),
)
def test_any_bytes_are_read_or_refused(
    cut: int, changes: list[tuple[int, int]], more: bytes, tmp_path_factory: pytest.TempPathFactory
) -> None:
    data = bytearray(GOOD)
    for at, byte in changes:
        data[at] = byte
    path = tmp_path_factory.getbasetemp() / "drawn.gguf"
    path.write_bytes(bytes(data[:cut]) + more)
    with contextlib.suppress(ModelLoadError):
        read_header(path)
