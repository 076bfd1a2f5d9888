"""The header of a GGUF file (version 2 and 3, github.com/ggml-org/ggml/blob/master/docs/gguf.md). The
package `gguf` takes about 7 s of CPU time for a vocabulary of 128,000 tokens, in every process that opens
the file."""

from __future__ import annotations

import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from runtime.config.fields import Fields
from runtime.protocol.errors import ModelLoadError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_LEAST_BYTES = {_STRING: 8, _ARRAY: 12}
"""Minimum size of a value of this type: its length field, or its items' type and count."""
_VALUE_BYTES, _TENSOR_BYTES = 13, 24
"""Minimum size of a value or a tensor, with an empty name."""
_DIMENSIONS_AT_MOST = 4
_NESTED_AT_MOST = 4
"""Arrays within arrays. The format allows any depth; no known key has more than two."""


class Kind(NamedTuple):
    """How numbers are stored: `numbers` of them in a block of `bytes` bytes."""

    name: str
    numbers: int
    bytes: int


KINDS: Mapping[int, Kind] = {
    0: Kind("F32", 1, 4),
    1: Kind("F16", 1, 2),
    2: Kind("Q4_0", 32, 18),
    3: Kind("Q4_1", 32, 20),
    6: Kind("Q5_0", 32, 22),
    7: Kind("Q5_1", 32, 24),
    8: Kind("Q8_0", 32, 34),
    12: Kind("Q4_K", 256, 144),
    13: Kind("Q5_K", 256, 176),
    14: Kind("Q6_K", 256, 210),
    30: Kind("BF16", 1, 2),
}
"""By ggml's type number."""


class TensorInfo(NamedTuple):
    """The position of a tensor in its file. shape: outermost dimension first, as in torch."""

    shape: tuple[int, ...]
    kind: Kind
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Header:
    """A file's metadata. values: name -> int, float, bool, str or a list of them."""

    path: Path
    values: Mapping[str, Any]
    tensors: Mapping[str, TensorInfo]

    @property
    def fields(self) -> Fields:
        return Fields(self.values, str(self.path))


class _Cursor:
    """Reads values in sequence. Raises struct.error at the end of the file, if there are more items than the
    rest of the file can hold, or if arrays are nested too deep."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data, self.at = data, 0

    def take(self, form: str) -> Any:
        [value] = struct.unpack_from(f"<{form}", self.data, self.at)
        self.at += struct.calcsize(f"<{form}")
        return value

    def count(self, what: str, each: int) -> int:
        """The number of items that follow, each of at least `each` bytes."""
        count: int = self.take("Q")
        if count * each > len(self.data) - self.at:
            raise struct.error(f"{count} {what} end after the end of the file")
        return count

    def text(self) -> str:
        end = self.count("bytes of a string", 1) + self.at
        text = self.data[self.at : end].decode("utf-8", "surrogateescape")
        self.at = end
        return text

    def value(self, kind: int, depth: int = 0) -> Any:
        if kind == _STRING:
            return self.text()
        if kind == _ARRAY:
            return self.array(depth + 1)
        if kind not in _SCALARS:
            raise struct.error(f"a value of the unknown type {kind}")
        return self.take(_SCALARS[kind])

    def array(self, depth: int) -> list[Any]:
        if depth > _NESTED_AT_MOST:
            raise struct.error(f"arrays are nested more than {_NESTED_AT_MOST} deep")
        kind = self.take("I")
        if kind in _SCALARS:
            size = struct.calcsize(f"<{_SCALARS[kind]}")
            form = f"<{self.count('items of an array', size)}{_SCALARS[kind]}"
            values = list(struct.unpack_from(form, self.data, self.at))
            self.at += struct.calcsize(form)
            return values
        count = self.count("items of an array", _LEAST_BYTES.get(kind, 1))
        return [self.value(kind, depth) for _ in range(count)]


def read_header(path: Path) -> Header:
    """Raises ModelLoadError if it is not a GGUF file, has another version, is truncated, or has tensors of
    unknown types."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _read(path, data)
    except (OSError, ValueError) as error:  # mmap raises ValueError for an empty file
        raise ModelLoadError(f"cannot be read: {error}", where=str(path)) from error
    except struct.error as error:
        raise ModelLoadError(
            f"is not a whole GGUF file: {error}", where=str(path), hint="truncated download? fetch it again"
        ) from error


def _read(path: Path, data: mmap.mmap) -> Header:
    cursor = _Cursor(data)
    if data[:4] != MAGIC:
        raise ModelLoadError("is not a GGUF file: it does not begin with GGUF", where=str(path))
    cursor.at = 4
    version = cursor.take("I")
    if version not in VERSIONS:
        raise ModelLoadError(
            f"has format version {version}, or another byte order; known versions: "
            f"{', '.join(map(str, VERSIONS))}",
            where=str(path),
        )
    tensor_count, value_count = cursor.count("tensors", _TENSOR_BYTES), cursor.count("values", _VALUE_BYTES)
    values: dict[str, Any] = {}
    for _ in range(value_count):
        name = cursor.text()
        if name in values:
            raise struct.error(f"the key {name[:80]!r} occurs twice")
        values[name] = cursor.value(cursor.take("I"))
    entries = [(cursor.text(), *_shape_kind_offset(cursor)) for _ in range(tensor_count)]
    alignment = Fields(values, str(path)).integer("general.alignment", 32)
    start = -(-cursor.at // alignment) * alignment
    tensors = {
        name: _info(path, name, shape, kind, start + offset, len(data))
        for name, shape, kind, offset in entries
    }
    if len(tensors) < len(entries):
        raise struct.error("two tensors have the same name")
    return Header(path, values, tensors)


def _shape_kind_offset(cursor: _Cursor) -> tuple[tuple[int, ...], int, int]:
    count = cursor.take("I")
    if count > _DIMENSIONS_AT_MOST:
        raise struct.error(f"a tensor of {count} dimensions")
    sizes = [cursor.take("Q") for _ in range(count)]  # innermost dimension first
    return tuple(reversed(sizes)), cursor.take("I"), cursor.take("Q")


def _info(path: Path, name: str, shape: tuple[int, ...], number: int, offset: int, size: int) -> TensorInfo:
    kind = KINDS.get(number)
    if kind is None:
        known = ", ".join(one.name for one in KINDS.values())
        raise ModelLoadError(
            f"{name!r} is stored in ggml's type {number}, which is not supported; known: {known}",
            where=str(path),
            hint="take a file in one of these, such as Q4_K_M, Q5_K_M, Q6_K or Q8_0",
        )
    numbers = 1
    for side in shape:
        numbers *= side
    if not shape or shape[-1] % kind.numbers:
        raise ModelLoadError(
            f"{name!r} of shape {list(shape)} does not fill blocks of {kind.numbers}", where=str(path)
        )
    nbytes = numbers // kind.numbers * kind.bytes
    if offset + nbytes > size:
        raise ModelLoadError(
            f"is cut off within {name!r}", where=str(path), hint="truncated download? fetch it again"
        )
    return TensorInfo(shape, kind, offset, nbytes)
