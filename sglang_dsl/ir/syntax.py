"""Operators of nodes in the source of a program. Importing this module adds them to the classes, which are
the runtime's (runtime.protocol.program): `+`, nodes in formatted text, and errors for operations without
effect, each with the line to write instead.

In formatted text (f"{gen('x')}", "%s" % gen("x"), "{}".format(gen("x"))) a node becomes a mark, which becomes
the node again when the text is added. A mark contains a random number of this process, so that no model and
no user can write one. It is digits and punctuation, which upper(), strip(), json.dumps() and the like keep.
"""

from __future__ import annotations

import re
import secrets
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn

from runtime.protocol.program import KINDS, Gen, Node, Select, Seq, Source, Text, leaves
from sglang_dsl.errors import BadProgram, WrongAttribute
from sglang_dsl.errors.tracebacks import Discarded, caller

MOST_KEPT = 16_384
"""Maximum number of marks; a node that is formatted again keeps its mark."""
_SECRET = f"{secrets.randbelow(10**24):024d}"
_MARK = re.compile(rf"\[\[{_SECRET}:(\d+):{_SECRET}\]\]")
KEPT: OrderedDict[int, Any] = OrderedDict()
_numbers: dict[int, int] = {}  # by the id of a node that is kept
_lock = threading.Lock()
_count = 0


def mark(node: Any) -> str:
    """The mark of `node` in a text."""
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
    """Whether a text contains a mark, or a part of one."""
    return bool(KEPT) and _SECRET in text


def parts(text: str) -> Iterator[str | Any]:
    """The texts between the marks, and their nodes, in order. Raises LookupError for a forgotten mark,
    ValueError for a part of one."""
    at = 0
    for match in _MARK.finditer(text):
        yield _whole(text[at : match.start()])
        with _lock:
            yield KEPT[int(match[1])]
        at = match.end()
    yield _whole(text[at:])


def _whole(text: str) -> str:
    if _SECRET in text:
        raise ValueError("a part of a mark")
    return text


# -- misuse -------------------------------------------------------------------------------------------------

Compare = Callable[[Any, object], bool]


def not_known(node: Any) -> str:
    """The error for using `node` as if it were its text."""
    name = getattr(node, "name", None)
    word = type(node).__name__.lower()
    shown = f"{word}({name!r})" if name else f"{word}(...)"
    read = f"s[{name!r}]" if name else "s[name]"
    what = f"{shown} is a node, whose value is not known yet, at {caller()}"
    return f"{what}: add it with s += {shown}, then use {read}"


def as_value(self: Any, *_: object) -> NoReturn:
    """An operation that only values have."""
    raise BadProgram(not_known(self))


def _no_attribute(self: Any, name: str) -> NoReturn:
    if name.startswith("_"):
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
    raise WrongAttribute(f"there is no {name!r} here: {not_known(self)}")


def refuse_values(kind: Any) -> None:
    """Make operations of values errors for nodes of this kind. Type checkers do not see them, and refuse them
    too."""
    for name in ("bool", "len", "getitem", "int", "float", "index", "lt", "le", "gt", "ge"):
        setattr(kind, f"__{name}__", as_value)
    kind.__getattr__ = _no_attribute


def refuse_text(kind: Any) -> None:
    """Make a comparison with a text or number, which would always be false, an error for this kind of
    node."""
    compare: Compare = kind.__eq__

    def __eq__(self: Any, other: object) -> bool:
        if isinstance(other, str | int | float):
            raise BadProgram(f"compared with {other!r:.40}: {not_known(self)}")
        return compare(self, other)

    kind.__eq__ = __eq__


def opens_no_block(self: Any) -> NoReturn:
    """A node in a `with`."""
    raise BadProgram(f"{self!r:.80} is a node and opens no block, at {caller()}: write with s.user(): ...")


INSIDE: list[Callable[[], bool]] = []
"""Functions that return whether this runs inside a program. Filled by execution/launch.py."""


def added(src: Source | None, word: str) -> None:
    """Raises BadProgram if a node is created by `word` in a program as a statement: it would be lost."""
    if type(src) is Discarded and any(inside() for inside in INSIDE):
        raise BadProgram(f"this {word}(...) is added to no state, at {src}: write s += {word}(...)")


_EXPECTED = "expected text or a node (gen, select, user(...), ...)"


def not_a_node(value: object) -> Exception:
    """The error for a value that cannot be added to a state."""
    if value is None:
        return ValueError(f"{_EXPECTED}, got None: does a function lack its return?")
    kind = type(value).__name__
    if kind.endswith(("ProgramState", "StateGroup")):
        hint = "write s += ..., not s = ... + s; of another state, add its text: s += other.text()"
    elif isinstance(value, list | tuple):
        hint = "join its parts with +, as in s += a + b, or add them one by one"
    elif isinstance(value, Mapping):
        hint = 'write a message as a turn: s += user("..."), s += assistant("...")'
    elif isinstance(value, bytes | bytearray):
        hint = "decode it: value.decode()"
    elif callable(value):
        hint = f"call it: s += {getattr(value, '__name__', 'it')}(...)"
    else:
        hint = "s += str(value) adds it as text"
    shown = kind if kind.endswith("ProgramState") else f"{kind}: {value!r:.80}"
    return TypeError(f"{_EXPECTED}, got {shown}; {hint}")


# -- nodes in order ------------------------------------------------------------------------------------------


def as_node(value: object, src: Source | None = None) -> Node:
    """A node from text, which may contain formatted nodes, or from a node. Raises TypeError for other values,
    ValueError for None (often a missing return)."""
    if isinstance(value, str):
        return interpolated(value, src) if KEPT and marked(value) else Text(value, src=src)
    if isinstance(value, Node):
        return value
    raise not_a_node(value)


def interpolated(text: str, src: Source | None = None) -> Seq:
    """The nodes of a text with formatted nodes. Raises BadProgram."""
    flat: list[Node] = []
    try:
        for part in parts(text):
            if isinstance(part, Node):
                flat.extend(leaves(part))
            elif part:
                flat.append(Text(part, src=src))
    except LookupError as error:
        raise BadProgram(
            f"a text contains a gen or another node that was formatted too long ago, at {src or caller()}; "
            "add the text soon after it is made, or join the parts with +"
        ) from error
    except ValueError as error:
        raise BadProgram(
            "a formatted text that contains a gen or another node was cut or changed, at "
            f"{src or caller()}; change the text before formatting, or join the parts with +"
        ) from error
    return Seq(tuple(flat))


def concat(*values: Node | str) -> Seq:
    """Nodes in order, flattened."""
    flat: list[Node] = []
    for part in values:
        flat.extend(leaves(as_node(part)))
    return Seq(tuple(flat))


# -- the syntax ----------------------------------------------------------------------------------------------


def _add(self: Node, other: Node | str) -> Seq:
    return concat(self, other)


def _radd(self: Node, other: str) -> Seq:
    return concat(other, self)


def _str(self: Node) -> str:
    """The mark of a node in a text, which becomes the node again when the text is added to a state."""
    return mark(self)


def _format(self: Node, spec: str) -> str:
    if spec:
        what = f"{self!r:.80} cannot be formatted with {spec!r}"
        raise BadProgram(f"{what}: its text is not known yet, at {caller()}")
    return mark(self)


_SYNTAX: dict[str, Any] = {
    "__add__": _add, "__radd__": _radd, "__str__": _str, "__format__": _format,
    "__enter__": opens_no_block, "__exit__": opens_no_block,
}  # fmt: skip
for _name, _method in _SYNTAX.items():
    setattr(Node, _name, _method)
for _kind in KINDS.values():
    refuse_text(_kind)
for _generated in (Gen, Select):
    refuse_values(_generated)
