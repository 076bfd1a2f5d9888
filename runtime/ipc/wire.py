"""Structs as bytes: `[version, tag, struct]` in msgpack, over a closed list of structs.

What comes in is only ever read as one of these structs, field by field; nothing in it is run. It knows no
sockets.
"""

from __future__ import annotations

from typing import Final

import msgspec

from runtime.protocol import io_struct
from runtime.protocol.errors import WireError

WIRE_VERSION: Final = 1
MAX_BYTES: Final = 256 << 20
"""Size of one message, at most."""

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
    io_struct.FlushCacheReq,
    io_struct.PauseReq,
    io_struct.ContinueReq,
    io_struct.OpenSessionReq,
    io_struct.CloseSessionReq,
    io_struct.GetStateReq,
    io_struct.SetStateReq,
    io_struct.PrecompileReq,
    io_struct.ProfileReq,
    io_struct.HealthReq,
    io_struct.GroupFailed,
    io_struct.ControlOutput,
)
"""All that may travel. A struct's tag is its class's name."""

_TAGS: Final = {kind: kind.__name__ for kind in WIRE_TYPES}
_ENCODER: Final = msgspec.msgpack.Encoder()
_ENVELOPE: Final = msgspec.msgpack.Decoder(tuple[int, str, msgspec.Raw])
_VERSION: Final = msgspec.msgpack.Decoder(list[msgspec.Raw])
_NUMBER: Final = msgspec.msgpack.Decoder(int)
_DECODERS: Final = {kind.__name__: msgspec.msgpack.Decoder(kind) for kind in WIRE_TYPES}
_BROKEN: Final = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


def encode(item: msgspec.Struct, limit: int = MAX_BYTES) -> bytes:
    """Raises WireError: a struct that does not travel, a value in it that msgpack cannot hold (text with lone
    surrogates, integers beyond 64 bits, other objects), or more than `limit` bytes."""
    tag = _TAGS.get(type(item))
    if tag is None:
        raise WireError(f"{type(item).__name__} does not travel; known: {_known()}", where="tag")
    try:
        data = _ENCODER.encode((WIRE_VERSION, tag, item))
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise WireError(f"a {tag} cannot be written: {error}", where=tag) from error
    if len(data) > limit:
        raise WireError(_too_large(len(data), limit), where=tag)
    return data


def decode(data: bytes | bytearray | memoryview, limit: int = MAX_BYTES) -> msgspec.Struct:
    """Raises WireError: too long, cut short, not msgpack, another version, an unknown tag, or fields that do
    not fit the struct; it names which."""
    if len(data) > limit:
        raise WireError(_too_large(len(data), limit), where="message")
    try:
        version, tag, body = _ENVELOPE.decode(data)
    except _BROKEN as error:
        _check_version(_version_of(data))
        raise WireError(f"not a message [version, tag, struct]: {error}", where="message") from error
    _check_version(version)
    decoder = _DECODERS.get(tag)
    if decoder is None:
        raise WireError(
            f"unknown tag {tag[:80]!r}; known: {_known()}",
            where="tag",
            hint="the other side belongs to another release",
        )
    try:
        return decoder.decode(body)
    except _BROKEN as error:
        raise WireError(f"not a {tag}: {error}", where=tag) from error


def _version_of(data: bytes | bytearray | memoryview) -> int:
    """The version of a message that is otherwise none of ours; ours where there is none."""
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


def _too_large(size: int, limit: int) -> str:
    return f"a message of {size} bytes; at most {limit} are taken"


def _known() -> str:
    return ", ".join(_DECODERS)
