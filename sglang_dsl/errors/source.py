"""Finds the user's code: file, line and function outside this package. Knows nothing else of it."""

from __future__ import annotations

import opcode
import os
import sys
from types import CodeType, FrameType

from runtime.protocol.program import Source as Source
from runtime.protocol.program import cell_of as cell_of

_HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_DEMO = os.path.join(_HERE, "tools", "demo.py")  # holds programs like a user's


class Discarded(Source):
    """A call that is a statement: what it returns is not kept."""

    __slots__ = ()


def _is_discarded(code: CodeType, at: int) -> bool:
    """Whether the instruction behind the call at `at` drops its result."""
    following, at = code.co_code, at + 2
    while at < len(following) and following[at] == opcode.opmap["CACHE"]:
        at += 2
    return at < len(following) and following[at] == opcode.opmap["POP_TOP"]


# Programs run the same lines again and again: of each code object, by its address, the places in it that were
# asked for, by instruction; None for this package's own code. The object is kept, so that nothing else gets
# its address.
_CODES: dict[int, tuple[CodeType, dict[int, Source] | None]] = {}
_MOST_CODES = 4096


def _look(code: CodeType) -> tuple[CodeType, dict[int, Source] | None]:
    """The entry of code that is not known."""
    file = code.co_filename
    if len(_CODES) >= _MOST_CODES:
        _CODES.clear()
    made = _CODES[id(code)] = (code, None if file.startswith(_HERE) and file != _DEMO else {})
    return made


def caller() -> Source | None:
    """The user's current line: the innermost frame outside this package. To be called by functions of this
    package."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        code = frame.f_code
        known = _CODES.get(id(code))
        if known is None:
            known = _look(code)
        places = known[1]
        if places is not None:
            found = places.get(frame.f_lasti)
            if found is None:
                kind = Discarded if _is_discarded(code, frame.f_lasti) else Source
                found = kind(code.co_filename, frame.f_lineno, code.co_qualname)
                places[frame.f_lasti] = found
            return found
        frame = frame.f_back
    return None
