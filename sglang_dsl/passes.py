"""Passes: IR -> IR, and questions about a tree. They know no backend and run nothing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from sglang_dsl.errors import BadProgram
from sglang_dsl.ir import Fork, Gen, Join, Node, RoleBegin, RoleEnd, ScopeEnd, Select, Seq, Text


def merge_text(nodes: Iterable[Node]) -> Iterator[Node]:
    """The same nodes with neighbouring text joined (at the first one's place) and empty text left out."""
    held: list[Text] = []

    def release() -> Iterator[Node]:
        text = "".join(node.text for node in held)
        if text:
            yield held[0] if len(held) == 1 else Text(text, src=held[0].src)
        held.clear()

    for node in nodes:
        if isinstance(node, Text):
            held.append(node)
            continue
        yield from release()
        yield node
    yield from release()


def tidy(node: Node) -> Node:
    """A whole tree with its text merged, branches included."""
    match node:
        case Seq(nodes=nodes):
            return Seq(tuple(merge_text(tidy(child) for child in nodes)))
        case Fork(branches=branches, src=src):
            return Fork(tuple(Seq(tuple(merge_text(tidy(c) for c in b.nodes))) for b in branches), src=src)
        case _:
            return node


def sets(node: Node) -> str | None:
    """The variable this one node sets."""
    match node:
        case Gen(name=name) | Select(name=name) | ScopeEnd(name=name):
            return name
        case _:
            return None


def role_after(leaves: Iterable[Node], role: str | None) -> str | None:
    """The turn that is open after `leaves`, where `role` was open before them. Raises BadProgram where turns
    nest, end without having begun, or where a leaf is no thing to add."""
    for leaf in leaves:
        match leaf:
            case RoleBegin(role=begun):
                if role is not None:
                    raise BadProgram(
                        f"a turn of {begun!r} cannot begin inside a turn of {role!r}; end that first"
                    )
                role = begun
            case RoleEnd(role=ended):
                if role != ended:
                    open_now = "no turn" if role is None else f"a turn of {role!r}"
                    raise BadProgram(f"a turn of {ended!r} cannot end here: {open_now} is open")
                role = None
            case Fork() | Join():
                raise BadProgram("forks and joins are made on the state: s.fork(n), forks.join()")
            case _:
                pass
    return role


def variables(node: Node) -> tuple[str, ...]:
    """Names that a tree sets, in order of first setting."""
    return tuple(dict.fromkeys(name for child in node.walk() if (name := sets(child)) is not None))
