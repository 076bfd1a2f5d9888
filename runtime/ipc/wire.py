"""Structs as bytes: `[version, tag, struct]` in msgpack. Nothing in received data is executed."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import msgspec

from runtime.protocol import io_struct
from runtime.protocol.control import VERBS
from runtime.protocol.errors import WireError

WIRE_VERSION: Final = 1
MAX_BYTES: Final = 256 << 20
"""Maximum size of one message."""

WIRE_TYPES: Final[tuple[type[msgspec.Struct], ...]] = (
    io_struct.TokenizedGenerateReqInput,
    io_struct.TokenizedEmbeddingReqInput,
    io_struct.BatchTokenizedGenerateReqInput,
    io_struct.BatchTokenIDOutput,
    io_struct.BatchStrOutput,
    io_struct.BatchEmbeddingOutput,
    io_struct.GenerateReqInput,
    io_struct.EmbeddingReqInput,
    io_struct.AbortReq,
    *(verb.request for verb in VERBS.values()),
    io_struct.GroupFailed,
    io_struct.ControlOutput,
)
"""The structs that travel between tokenizers, scheduler and detokenizer."""

_ENCODER: Final = msgspec.msgpack.Encoder()
_ENVELOPE: Final = msgspec.msgpack.Decoder(tuple[int, str, msgspec.Raw])
_VERSION: Final = msgspec.msgpack.Decoder(list[msgspec.Raw])
_NUMBER: Final = msgspec.msgpack.Decoder(int)
_BROKEN: Final = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


class Wire:
    """kinds: the structs that travel; the tag of each is its class's name. max_bytes: of one message."""

    def __init__(self, kinds: Iterable[type[msgspec.Struct]], max_bytes: int = MAX_BYTES) -> None:
        self.max_bytes = max_bytes
        self._tags = {kind: kind.__name__ for kind in kinds}
        self._decoders = {tag: msgspec.msgpack.Decoder(kind) for kind, tag in self._tags.items()}
        self._known = ", ".join(self._decoders)

    def encode(self, item: msgspec.Struct) -> bytes:
        """Raises WireError for a struct that is not in the list, a value that msgpack cannot hold (text with
        lone surrogates, integers beyond 64 bits, other objects), or more than `max_bytes`."""
        tag = self._tags.get(type(item))
        if tag is None:
            raise WireError(f"{type(item).__name__} does not travel; known: {self._known}", where="tag")
        try:
            data = _ENCODER.encode((WIRE_VERSION, tag, item))
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            raise WireError(f"a {tag} cannot be written: {error}", where=tag) from error
        self._check_size(len(data), tag)
        return data

    def decode(self, data: bytes | bytearray | memoryview) -> msgspec.Struct:
        """Raises WireError if the data is too long, truncated, not msgpack, of another version, or has an
        unknown tag or fields that do not fit the struct; the message says which."""
        self._check_size(len(data), "message")
        try:
            version, tag, body = _ENVELOPE.decode(data)
        except _BROKEN as error:
            _check_version(_version_of(data))
            raise WireError(f"not a message [version, tag, struct]: {error}", where="message") from error
        _check_version(version)
        decoder = self._decoders.get(tag)
        if decoder is None:
            raise WireError(
                f"unknown tag {tag[:80]!r}; known: {self._known}",
                where="tag",
                hint="the other side belongs to another release",
            )
        try:
            return decoder.decode(body)
        except _BROKEN as error:
            raise WireError(f"not a {tag}: {error}", where=tag) from error

    def _check_size(self, size: int, what: str) -> None:
        if size > self.max_bytes:
            raise WireError(f"a message of {size} bytes; at most {self.max_bytes} are taken", where=what)


PIPELINE: Final = Wire(WIRE_TYPES)


def _version_of(data: bytes | bytearray | memoryview) -> int:
    """The version of a message that is otherwise invalid; our version if it has none."""
    try:
        parts = _VERSION.decode(data)
        return _NUMBER.decode(parts[0]) if parts else WIRE_VERSION
    except _BROKEN:
        return WIRE_VERSION


def _check_version(version: int) -> None:
    if version != WIRE_VERSION:
        raise WireError(
            f"the message has version {version}, this side speaks {WIRE_VERSION}",
            where="version",
            hint="run the same release on both sides",
        )
