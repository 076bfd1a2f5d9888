"""Nodes in formatted text: f"{gen('x')}", "%s" % gen("x"), "{}".format(gen("x")). A node becomes a mark,
which becomes the node again where the text is added. Knows no nodes.

A mark holds a number that is random in each process: no model and no user can write one. It is digits and
punctuation, so that upper(), strip(), json.dumps() and the like leave it alone.
"""

from __future__ import annotations

import re
import secrets
import threading
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

MOST_KEPT = 16_384
"""Marks that are known at a time; a node that is formatted again keeps its own."""
_SECRET = f"{secrets.randbelow(10**24):024d}"
_MARK = re.compile(rf"\[\[{_SECRET}:(\d+):{_SECRET}\]\]")
KEPT: OrderedDict[int, Any] = OrderedDict()
_numbers: dict[int, int] = {}  # by the id of a node that is kept
_lock = threading.Lock()
_count = 0


def mark(node: Any) -> str:
    """What stands for `node` in a text."""
    global _count
    with _lock:
        number = _numbers.get(id(node))
        if number is None:
            number = _numbers[id(node)] = _count
            _count += 1
        KEPT[number] = node
        KEPT.move_to_end(number)
        if len(KEPT) > MOST_KEPT:
            _, oldest = KEPT.popitem(last=False)
            del _numbers[id(oldest)]
    return f"[[{_SECRET}:{number}:{_SECRET}]]"


def marked(text: str) -> bool:
    """Whether a mark, or a part of one, stands in a text."""
    return bool(KEPT) and _SECRET in text


def parts(text: str) -> Iterator[str | Any]:
    """The texts between the marks, and their nodes, in order. Raises LookupError for a mark that is not known
    any more, ValueError for a part of one."""
    at = 0
    for found in _MARK.finditer(text):
        yield _whole(text[at : found.start()])
        with _lock:
            yield KEPT[int(found[1])]
        at = found.end()
    yield _whole(text[at:])


def _whole(text: str) -> str:
    if _SECRET in text:
        raise ValueError("a part of a mark")
    return text
