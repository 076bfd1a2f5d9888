"""Passes over the IR, and properties of trees and prompts. They know no backend and run nothing.

merge_text, tidy    adjacent text is joined
sets, variables     the names that are set
role_after          checks that turns open and close in order
hoist               the common begin of prompts
plan_forks          the forks of a tree
waves               generations that do not depend on each other
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from runtime.protocol.messages import Message
from runtime.protocol.program import (
    Fork,
    Gen,
    Join,
    Node,
    RoleBegin,
    RoleEnd,
    ScopeEnd,
    Select,
    Seq,
    Source,
    Text,
)
from sglang_dsl.errors import BadProgram, warn


def merge_text(nodes: Iterable[Node]) -> Iterator[Node]:
    """The same nodes with adjacent text joined (with the first one's line) and without empty text."""
    held: list[Text] = []
    for node in nodes:
        if isinstance(node, Text):
            if node.text:
                held.append(node)
            continue
        if held:
            yield _joined(held)
            held = []
        yield node
    if held:
        yield _joined(held)


def _joined(texts: Sequence[Text]) -> Text:
    first = texts[0]
    return first if len(texts) == 1 else Text("".join(node.text for node in texts), src=first.src)


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
    """The variable that a node sets."""
    match node:
        case Gen(name=name) | Select(name=name) | ScopeEnd(name=name):
            return name
        case _:
            return None


def role_after(leaves: Iterable[Node], role: str | None) -> str | None:
    """The turn that is open after `leaves`, if `role` was open before them. Any end ends the open turn, with
    a warning if it names another role. Raises BadProgram for nested turns, an end without a begin, and nodes
    that cannot be added."""
    for leaf in leaves:
        match leaf:
            case RoleBegin(role=begun):
                if role is not None:
                    raise BadProgram(
                        f"a turn of {begun!r} cannot start inside a turn of {role!r}; end that turn first"
                    )
                role = begun
            case RoleEnd(role=ended):
                if role is None:
                    raise BadProgram(f"a turn of {ended!r} cannot end here: no turn is open")
                if role != ended:
                    warn(f"the end of a turn of {ended!r} ends the turn of {role!r} that is open")
                role = None
            case Fork() | Join():
                raise BadProgram("forks and joins are made on the state: s.fork(n), forks.join()")
            case _:
                pass
    return role


def variables(node: Node) -> tuple[str, ...]:
    """Names that a tree sets, in order of first setting."""
    return tuple(dict.fromkeys(name for child in node.walk() if (name := sets(child)) is not None))


# -- common prompts --------------------------------------------------------------------------------------


def common(items: Sequence[Sequence[object]]) -> int:
    """Length of the common prefix of all sequences (of token ids, characters)."""
    columns = zip(*items)
    return sum(
        1 for _ in itertools.takewhile(lambda column: all(one == column[0] for one in column), columns)
    )


def hoist(prompts: Sequence[Sequence[Message]]) -> tuple[Message, ...]:
    """The longest common begin of prompts: whole turns, then the common text of the next one, which is left
    open."""
    if not prompts:
        return ()
    shared: list[Message] = []
    for column in zip(*prompts):
        first = column[0]
        if all(one == first for one in column):
            shared.append(first)
            continue
        texts = [one.content for one in column if isinstance(one.content, str) and one.role == first.role]
        if len(texts) == len(column):
            text = texts[0][: common(texts)]
            shared.append(Message(role=first.role, content=text, open=True))
        break
    return tuple(shared)


# -- forks ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ForkPlan:
    """One fork. `branch`: the branch that it is in, () for the program itself. `generations`: per branch,
    including choices and inner forks. `join`: the mode of its join, None without one. `needs`: variables set
    before it whose values are in its branches' texts. `prefix`: characters of text before the fork."""

    branch: tuple[int, ...]
    branches: int
    generations: tuple[int, ...]
    join: str | None
    needs: tuple[str, ...]
    prefix: int
    src: Source | None = None


def plan_forks(body: Seq) -> tuple[ForkPlan, ...]:
    """The forks of a traced program, in order; forks in branches after the fork itself."""
    return tuple(_forks(body, (), {}, 0))


def _forks(body: Seq, branch: tuple[int, ...], known: Mapping[str, None], length: int) -> Iterator[ForkPlan]:
    known, count = dict(known), 0
    for index, node in enumerate(body.nodes):
        if (name := sets(node)) is not None:
            known[name] = None
        if isinstance(node, Text):
            length += len(node.text)
        if not isinstance(node, Fork):
            continue
        later = body.nodes[index + 1 :]
        join = next((one for one in later if isinstance(one, Join | Fork)), None)
        read = {name for one in node.branches for name in _read(one)}
        yield ForkPlan(
            branch,
            len(node.branches),
            tuple(sum(isinstance(one, Gen | Select) for one in each.walk()) for each in node.branches),
            join.mode if isinstance(join, Join) else None,
            tuple(name for name in known if name in read),
            length,
            node.src,
        )
        for number, each in enumerate(node.branches, count):
            yield from _forks(each, (*branch, number), known, length)
        count += len(node.branches)
        known.update(dict.fromkeys(variables(node)))


_NAMED = re.compile(r"\{([^{}\n]*)\}")


def _read(node: Node) -> Iterator[str]:
    """Names of placeholders in the texts below `node`."""
    for child in node.walk():
        if isinstance(child, Text):
            yield from _NAMED.findall(child.text)


# -- waves ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Step:
    """A generation or choice with its program and branch."""

    program: str
    branch: tuple[int, ...]
    node: Gen | Select


def waves(programs: Sequence[tuple[str, Seq]]) -> tuple[tuple[Step, ...], ...]:
    """Generations and choices that can be requested at the same time, wave after wave. The first program
    calls the others, in their order.

    Within a state each comes after the one before it. Different branches and programs depend on each other
    only by values in their texts, traced as "{name}". If several set the same name, the latest counts, so a
    wave may be later than necessary and never too early.
    """
    if not programs:
        return ()
    first, *others = programs
    outside = _Levels(first, {}).known
    all_levels = []
    for one in others:
        levels = _Levels(one, outside)
        outside = {n: max(levels.known.get(n, 0), outside.get(n, 0)) for n in {**outside, **levels.known}}
        all_levels.append(levels)
    all_levels.insert(0, _Levels(first, outside) if others else _Levels(first, {}))
    steps = sorted((pair for one in all_levels for pair in one.steps), key=lambda pair: pair[0])
    last = steps[-1][0] if steps else -1
    return tuple(tuple(step for level, step in steps if level == at) for at in range(last + 1))


class _Levels:
    """The wave of each step of one program. `outside`: the number of waves after which the values of other
    programs are known; `known`: the same for its own."""

    def __init__(self, program: tuple[str, Seq], outside: Mapping[str, int]) -> None:
        self.steps: list[tuple[int, Step]] = []
        self.known: dict[str, int] = {}
        self._name, self._outside = program[0], outside
        self._sequence(program[1], (), 0)

    def _sequence(self, body: Seq, branch: tuple[int, ...], level: int) -> int:
        """Number the steps of `body`, which begins after `level` waves. Returns the level of its end."""
        open_ends: list[int] = []
        count = 0
        for node in body.nodes:
            match node:
                case Text():
                    for name in _read(node):
                        level = max(level, self.known.get(name, self._outside.get(name, 0)))
                case Gen() | Select():
                    self.steps.append((level, Step(self._name, branch, node)))
                    level += 1
                case Fork(branches=branches):
                    open_ends += [
                        self._sequence(one, (*branch, number), level)
                        for number, one in enumerate(branches, count)
                    ]
                    count += len(branches)
                case Join():
                    level = max([level, *open_ends])  # whichever fork it joins
                case _:
                    pass
            if (variable := sets(node)) is not None:
                self.known[variable] = max(level, self.known.get(variable, 0))
        return level
