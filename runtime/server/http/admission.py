"""Admission: how much work a body asks for, counted in its bytes before they are decoded.

A value costs its readers some microseconds of Python, a number in a list far less than a name or a string
with what stands around it: both have a limit. The counting takes no lock of the interpreter for long.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from functools import lru_cache
from typing import Any, NamedTuple

import msgspec

from runtime.config.serving.server import ServerConfig
from runtime.protocol.errors import BodyTooLarge

SHORT = 16 << 10
"""Bytes of a body that the event loop itself decodes and works on: its values can only be few."""
_SEPARATORS = (b",", b":", b"[", b"{")
_STEP = 256 << 10
"""Bytes that are looked through at once: some milliseconds, in which the interpreter's lock is held."""


class Weight(NamedTuple):
    """values: all of them, roughly; strings: those of them that are no numbers: strings (names of fields as
    well), lists and objects."""

    values: int
    strings: int

    def plus(self, other: Weight) -> Weight:
        return Weight(self.values + other.values, self.strings + other.strings)

    def within(self, config: ServerConfig) -> bool:
        return self.values <= config.max_body_values and self.strings <= config.max_body_strings


def admit(body: bytes, config: ServerConfig, names: Collection[str] = ()) -> Weight:
    """How much the body holds, at most. names: of the fields it may have. Raises BodyTooLarge, which names
    the largest field."""
    most = Weight(0, 0)
    for at in range(0, len(body), _STEP):
        most = most.plus(_seen(body[at : at + _STEP]))
    if most.within(config):
        return most
    found = Weight(0, 0)
    for weight in _weights(body):
        found = found.plus(weight)
        if not found.within(config):
            raise _too_heavy(found.values > config.max_body_values, body, config, names)
    return found


def _seen(piece: bytes) -> Weight:
    """As if nothing in it stood within a string."""
    comma, colon, lists, objects = (piece.count(one) for one in _SEPARATORS)
    return Weight(comma + colon + lists + objects, piece.count(b'"') // 2 + lists + objects + 1)


def _weights(body: bytes) -> Iterator[Weight]:
    """Of one piece after the other, without what only looks like a value within a string."""
    within = 0
    for piece in _pieces(body):
        parts = piece.replace(rb"\\", b"").replace(rb"\"", b"").split(b'"')
        outside = _seen(b"".join(parts[within::2]))
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


_BACKSLASH = 0x5C


def _too_heavy(numbers: bool, body: bytes, config: ServerConfig, names: Collection[str]) -> BodyTooLarge:
    where = _largest(body, names)
    if numbers:
        what, hint = f"{config.max_body_values} values", "max_body_values"
    else:
        what = f"{config.max_body_strings} strings, names, lists and objects"
        hint = "max_body_strings"
    most = "" if where == "body" else f", most of them in {where}"
    return BodyTooLarge(f"the body has more than {what}{most}", where=where, hint=hint)


def _largest(body: bytes, names: Collection[str]) -> str:
    """The field that holds most; "body" if it is not known."""
    try:
        fields = msgspec.json.decode(body, type=_unread(tuple(sorted(names))))
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return "body"
    held = zip(sorted(names), msgspec.structs.astuple(fields), strict=True)
    sizes = {name: _seen(bytes(raw)).values for name, raw in held if raw}
    return max(sizes, key=sizes.__getitem__, default="body")


@lru_cache(maxsize=64)
def _unread(names: tuple[str, ...]) -> type[Any]:
    """A struct of these fields as they stand; all others are skipped."""
    fields = [(f"f{at}", msgspec.Raw, msgspec.Raw()) for at in range(len(names))]
    return msgspec.defstruct("Unread", fields, rename={f"f{at}": name for at, name in enumerate(names)})
