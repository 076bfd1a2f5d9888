"""Ways to use a node wrongly that would do nothing, or fail with a riddle: each is an error that says the
line to write. Knows no kinds of nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NoReturn

from sglang_dsl.errors import BadProgram, WrongAttribute
from sglang_dsl.errors.source import Discarded, Source, caller

Compare = Callable[[Any, object], bool]


def not_known(node: Any) -> str:
    """What to do instead of using `node` as if it were its text."""
    name = getattr(node, "name", None)
    word = type(node).__name__.lower()
    shown = f"{word}({name!r})" if name else f"{word}(...)"
    read = f"s[{name!r}]" if name else "s[name]"
    what = f"{shown} is a node, whose value is not known yet, at {caller()}"
    return f"{what}: add it with s += {shown}, then use {read}"


def as_value(self: Any, *_: object) -> NoReturn:
    """An operation that only a value has."""
    raise BadProgram(not_known(self))


class Unread:
    """Base of nodes that generate a value: what is done to one instead of to its value is refused. Type
    checkers are not told, so that they refuse it too."""

    __slots__ = ()

    if not TYPE_CHECKING:
        __bool__ = __len__ = __getitem__ = __int__ = __float__ = __index__ = as_value
        __lt__ = __le__ = __gt__ = __ge__ = as_value

        def __getattr__(self, name: str) -> NoReturn:
            if name.startswith("_"):
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
            raise WrongAttribute(f"there is no {name!r} here: {not_known(self)}")


def refuse_text(kind: Any) -> None:
    """Make a comparison of a node of this kind with a text or a number an error: it would always be false."""
    own: Compare = kind.__eq__

    def __eq__(self: Any, other: object) -> bool:
        if isinstance(other, str | int | float):
            raise BadProgram(f"compared with {other!r:.40}: {not_known(self)}")
        return own(self, other)

    kind.__eq__ = __eq__


def opens_no_block(self: Any) -> NoReturn:
    """A node in a `with`."""
    raise BadProgram(f"{self!r:.80} is a node and opens no block, at {caller()}: write with s.user(): ...")


INSIDE: list[Callable[[], bool]] = []
"""Tell whether the function of a program is what runs here. Filled by what runs programs."""


def added(src: Source | None, word: str) -> None:
    """Raises BadProgram where a node is made by `word` in a program, as a statement: it would be lost."""
    if type(src) is Discarded and any(inside() for inside in INSIDE):
        raise BadProgram(f"this {word}(...) is added to no state, at {src}: write s += {word}(...)")


_EXPECTED = "expected text or a node (gen, select, user(...), ...)"


def not_a_node(value: object) -> Exception:
    """The error of what cannot be added to a state."""
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
