"""Admission: bounds the work that a body asks for, counted in its bytes before they are decoded.

Each value costs some microseconds of Python, a number in a list far less than a string or an object: both
have a limit. The interpreter's lock is never held for long.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from functools import lru_cache
from typing import Any, NamedTuple

import msgspec

from runtime.config.serving.server import ServerConfig
from runtime.protocol.errors import BodyTooLarge

SHORT = 16 << 10
"""Bytes of a body that the event loop itself decodes: it can only have few values."""
_SEPARATORS = (b",", b":", b"[", b"{")
_STEP = 256 << 10
"""Bytes that are scanned at a time: some milliseconds with the interpreter's lock."""
_BACKSLASH = 0x5C


class Weight(NamedTuple):
    """values: all of them, approximately; strings: those that are not numbers: strings (and names of fields),
    lists and objects."""

    values: int
    strings: int

    def plus(self, other: Weight) -> Weight:
        return Weight(self.values + other.values, self.strings + other.strings)

    def within(self, config: ServerConfig) -> bool:
        return self.values <= config.max_body_values and self.strings <= config.max_body_strings


def admit(body: bytes, config: ServerConfig, names: Collection[str] = ()) -> Weight:
    """An upper bound of what the body holds. names: of the fields it may have. Raises BodyTooLarge, which
    names the largest field."""
    bound = Weight(0, 0)
    for at in range(0, len(body), _STEP):
        bound = bound.plus(_count(body[at : at + _STEP]))
    if bound.within(config):
        return bound
    weight = Weight(0, 0)
    for one in _weights(body):
        weight = weight.plus(one)
        if not weight.within(config):
            raise _too_heavy(weight.values > config.max_body_values, body, config, names)
    return weight


def _count(piece: bytes) -> Weight:
    """As if all of it were outside of strings."""
    comma, colon, lists, objects = (piece.count(one) for one in _SEPARATORS)
    return Weight(comma + colon + lists + objects, piece.count(b'"') // 2 + lists + objects + 1)


def _weights(body: bytes) -> Iterator[Weight]:
    """Of one piece after another, without separators within strings."""
    within = 0
    for piece in _pieces(body):
        parts = piece.replace(rb"\\", b"").replace(rb"\"", b"").split(b'"')
        outside = _count(b"".join(parts[within::2]))
        yield Weight(outside.values, outside.strings - 1 + (len(parts) - 1 + within) // 2)
        within = (within + len(parts) - 1) % 2


def _pieces(body: bytes) -> Iterator[bytes]:
    """None ends within an escape."""
    at = 0
    while at < len(body):
        end = min(at + _STEP, len(body))
        while end < len(body) and body[end - 1] == _BACKSLASH:
            end += 1
        yield body[at:end]
        at = end


def _too_heavy(numbers: bool, body: bytes, config: ServerConfig, names: Collection[str]) -> BodyTooLarge:
    field = _largest(body, names)
    if numbers:
        what, hint = f"{config.max_body_values} values", "max_body_values"
    else:
        what = f"{config.max_body_strings} strings, names, lists and objects"
        hint = "max_body_strings"
    most = "" if field == "body" else f", most of them in {field}"
    return BodyTooLarge(f"the body has more than {what}{most}", where=field, hint=hint)


def _largest(body: bytes, names: Collection[str]) -> str:
    """The field that holds most; "body" if that is unknown."""
    try:
        fields = msgspec.json.decode(body, type=_unread(tuple(sorted(names))))
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return "body"
    held = zip(sorted(names), msgspec.structs.astuple(fields), strict=True)
    sizes = {name: _count(bytes(raw)).values for name, raw in held if raw}
    return max(sizes, key=sizes.__getitem__, default="body")


@lru_cache(maxsize=64)
def _unread(names: tuple[str, ...]) -> type[Any]:
    """A struct of these fields, not decoded; all others are skipped."""
    fields = [(f"f{at}", msgspec.Raw, msgspec.Raw()) for at in range(len(names))]
    return msgspec.defstruct("Unread", fields, rename={f"f{at}": name for at, name in enumerate(names)})
