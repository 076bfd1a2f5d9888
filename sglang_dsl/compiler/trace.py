"""Tracing a program: the same `s`, without a backend. The result is a Program, a tree of nodes.

Values of generations are placeholders: text like "{answer}". If the function decides by them, only one path
is followed. Knows no executor.
"""

from __future__ import annotations

import inspect
import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from sglang_dsl.budgets import Budget
from sglang_dsl.concurrency.streams import Signal, Until
from sglang_dsl.conversation.requests import Ledger
from sglang_dsl.conversation.transcript import Generation, Transcript
from sglang_dsl.errors import BadProgram
from sglang_dsl.errors.tracebacks import public
from sglang_dsl.interpreter.core import Checkpoint, Core, SettledCore
from sglang_dsl.interpreter.evaluator import with_node
from sglang_dsl.interpreter.joins import joined_values
from sglang_dsl.ir import (
    Fork,
    Gen,
    Join,
    Media,
    Node,
    RoleBegin,
    RoleEnd,
    ScopeBegin,
    ScopeEnd,
    Select,
    Seq,
    Source,
    Text,
    Tools,
    cut,
    flatten,
    from_dict,
    to_dict,
)
from sglang_dsl.ir.passes import (
    ForkPlan,
    Step,
    merge_text,
    plan_forks,
    role_after,
    sets,
    tidy,
    variables,
    waves,
)
from sglang_dsl.ir.typed import Typed
from sglang_dsl.views.diagrams import Graph, dot, mermaid, program_graph
from sglang_dsl.views.notebook import Page
from sglang_dsl.views.snapshot import Snapshot


class Placeholder(str):
    """Represents a value that only a run would have. Reads as "{name}", counts as 0."""

    __slots__ = ()

    def __new__(cls, name: str) -> Placeholder:
        return super().__new__(cls, "{" + name + "}")

    def __getnewargs__(self) -> tuple[str]:
        return (str(self)[1:-1],)

    def __int__(self) -> int:
        return 0

    def __float__(self) -> float:
        return 0.0


@public
@dataclass(frozen=True, slots=True)
class Program:
    """A program as a tree, returned by program.trace(). Prints as a tree.

    arguments  names without a value; they appear in the text as "{name}"
    called     the programs that its function called, in order; each has its own text
    function   the traced function; None if the Program was read from JSON
    """

    name: str
    body: Seq
    arguments: tuple[str, ...] = ()
    called: tuple[Program, ...] = ()
    function: Any = field(default=None, compare=False, repr=False)

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """The function's run(...). Raises BadProgram if there is no function."""
        return self._runnable().run(*args, **kwargs)

    def run_batch(self, *args: Any, **kwargs: Any) -> Any:
        """The function's run_batch(...). Raises BadProgram if there is no function."""
        return self._runnable().run_batch(*args, **kwargs)

    def _runnable(self) -> Any:
        if self.function is None:
            raise BadProgram(f"{self.name} was read from JSON, which contains no function to run")
        return self.function

    @property
    def last_node(self) -> Program:
        """The Program itself. Programs written for sglang use trace().last_node.print_graph_dfs()."""
        return self

    def print_graph_dfs(self) -> str:
        """tree(), under its name in sglang."""
        return self.tree()

    def print_graph(self) -> None:
        """Print tree()."""
        print(self.tree())

    @property
    def variables(self) -> tuple[str, ...]:
        """The names that its nodes set, in order."""
        return variables(self.body)

    @property
    def nodes(self) -> tuple[Node, ...]:
        """All leaves and forks, in order, without the sequences."""
        return tuple(node for node in self.body.walk() if not isinstance(node, Seq))

    def tree(self) -> str:
        """One line per node, with file and line; branches are indented."""
        lines = [f"{self.name}({', '.join(self.arguments)})"]
        for node in self.body.nodes:
            lines += _tree(node, 1)
        for program in self.called:
            lines += [f"  calls {program.name}", *(f"    {line}" for line in program.tree().splitlines()[1:])]
        return "\n".join(lines)

    def forks(self) -> tuple[ForkPlan, ...]:
        """Its forks: the number of branches, what they need, and where they join."""
        return plan_forks(self.body)

    def waves(self) -> tuple[tuple[Step, ...], ...]:
        """Its generations and choices, and those of the programs it calls, in waves. Those of one wave do not
        depend on each other and can be requested at the same time."""
        return waves([(self.name, self.body), *_called(self)])

    def __str__(self) -> str:
        return self.tree()

    def __repr__(self) -> str:
        """One line. print() shows the tree."""
        sets = f", sets {', '.join(self.variables)}" if self.variables else ""
        return (
            cut(f"Program({self.name}({', '.join(self.arguments)}): {len(self.nodes)} nodes{sets}", 300) + ")"
        )

    def _graph(self) -> Graph:
        return program_graph(self.name, self.body, _called(self))

    def mermaid(self) -> str:
        """A flowchart in Mermaid's notation, for notebooks and Markdown."""
        return mermaid(self._graph())

    def dot(self) -> str:
        """A digraph in Graphviz's notation."""
        return dot(self._graph())

    def _page(self) -> Page:
        from sglang_dsl.views import listing  # for notebooks alone

        title = f"{self.name}({', '.join(self.arguments)})"
        return Page(listing.program(title, self.body, _called(self)), self._graph())

    def _repr_html_(self) -> str:
        return self._page().html

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        return self._page().bundle()

    def to_dict(self) -> dict[str, Any]:
        """The program as plain JSON data, for from_dict()."""
        data = {"program": self.name, "arguments": list(self.arguments), "body": to_dict(self.body)}
        return data | ({"called": [one.to_dict() for one in self.called]} if self.called else {})

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Program:
        """The program that to_dict() returned. Raises ValueError for any other data."""
        body = from_dict(data["body"])
        if not isinstance(body, Seq):
            raise ValueError(f"a program's body is a seq, got {body.KIND}")
        called = tuple(cls.from_dict(one) for one in data.get("called", ()))
        return cls(data["program"], body, tuple(data["arguments"]), called)

    def to_json(self, indent: int | None = None) -> str:
        """to_dict() as JSON text."""
        return json.dumps(self.to_dict(), ensure_ascii=False, indent=indent)

    @classmethod
    def from_json(cls, text: str) -> Program:
        """The program that to_json() wrote. Raises ValueError for any other text."""
        return cls.from_dict(json.loads(text))


def page_of(title: str, function: Callable[..., Any], traced: Program | None) -> Page:
    """The page of a program, with its tree if it was traced: showing it does not follow it, which would run
    it."""
    from sglang_dsl.views import listing  # for notebooks alone

    try:
        source = inspect.getsource(function)
    except (OSError, TypeError):  # no source is kept
        source = ""
    doc, body, graph = inspect.getdoc(function) or "", None, None
    if traced is not None:
        body, graph = listing.traced(traced.body, _called(traced)), traced._graph()
    return Page(listing.function(title, doc, source, body), graph)


def _called(program: Program) -> Iterator[tuple[str, Seq]]:
    """All programs that it calls, in the order in which they end."""
    for one in program.called:
        yield from _called(one)
        yield one.name, one.body


def _tree(node: Node, depth: int) -> list[str]:
    src: Source | None = getattr(node, "src", None)
    line = f"  # {os.path.basename(src.file)}:{src.line}" if src is not None else ""
    pad = "  " * depth
    match node:
        case Fork(branches=branches):
            lines = [f"{pad}{node.label()}{line}"]
            for index, branch in enumerate(branches):
                lines.append(f"{pad}  branch {index}")
                for child in branch.nodes:
                    lines += _tree(child, depth + 2)
            return lines
        case _:
            return [f"{pad}{node.label()}{line}"]


class _Branching:
    """A fork among the nodes while its branches are still being traced."""

    def __init__(self, branches: list[Tracer], src: Source | None) -> None:
        self.branches, self.src = branches, src


class Tracer(SettledCore):
    """A Core that collects nodes."""

    def __init__(self, program: str, *, parent: Tracer | None = None) -> None:
        transcript = parent._transcript if parent else Transcript.EMPTY
        super().__init__(program, transcript, dict(parent._variables) if parent else {})
        self._nodes: list[Node | _Branching] = []
        self._inherited = dict(self._variables)
        self._role: str | None = parent._role if parent else None
        self._scopes: dict[str, list[Transcript]] = {}

    def fault(self) -> BaseException | None:
        return None

    def body(self) -> Seq:
        """The nodes so far, forks with all their branches."""
        nodes = [
            node if isinstance(node, Node) else Fork(tuple(b.body() for b in node.branches), src=node.src)
            for node in self._nodes
        ]
        done = tidy(Seq(tuple(nodes)))
        assert isinstance(done, Seq)
        return done

    def submit(self, node: Node, src: Source | None = None) -> None:
        leaves = tuple(merge_text(flatten(node)))
        self._role = role_after(leaves, self._role)
        self._nodes.extend(leaves)
        for leaf in leaves:
            self._say(leaf)
            if (name := sets(leaf)) is not None and not isinstance(leaf, ScopeEnd):
                self.set(name, Placeholder(name))
                self._variables[name].typed = Typed("placeholder", "text")

    def _say(self, leaf: Node) -> None:
        match leaf:
            case Gen(name=name) | Select(name=name):
                shown = Placeholder(name or "...")
                self._transcript = self._transcript.say(shown, chosen=name or "", generation=Generation(leaf))
            case Text() | Media() | RoleBegin() | RoleEnd() | Tools():
                self._transcript = with_node(self._transcript, leaf)
            case ScopeBegin(name=name):
                self._scopes.setdefault(name, []).append(self._transcript)
            case ScopeEnd(name=name):
                begun = self._scopes.get(name)
                self.set(name, self._transcript.text(begun.pop() if begun else Transcript.EMPTY))
            case _:
                pass

    def open_role(self) -> str | None:
        return self._role

    def fork(self, size: int, src: Source | None, budget: Budget | None = None) -> Sequence[Core]:
        branches = [Tracer(self.program, parent=self) for _ in range(size)]
        self._nodes.append(_Branching(branches, src))
        return branches

    async def join(self, branches: Sequence[Core], mode: str, src: Source | None, until: Until) -> None:
        self._nodes.append(Join(mode, src=src))
        values = [branch._set_here() for branch in branches if isinstance(branch, Tracer)]
        for name, value in joined_values(mode, values, self._variables).items():
            self.set(name, value)

    def _set_here(self) -> dict[str, Any]:
        held = self._variables.items()
        return {name: variable.value for name, variable in held if self._inherited.get(name) is not variable}

    async def adopt(self, branch: Core, src: Source | None, until: Until) -> None:
        """As if the first branch won: its variables are set."""
        assert isinstance(branch, Tracer)
        for name, value in branch._set_here().items():
            self.set(name, value)

    def checkpoint(self) -> Checkpoint:
        return Checkpoint(self, self.watch(Signal()), dict(self._variables), self._role)

    def rollback(self, checkpoint: Checkpoint) -> None:
        """The nodes stay in the tree: a run makes their calls all the same."""
        self._transcript = checkpoint.mark.transcript
        self._variables, self._role = dict(checkpoint.variables), checkpoint.role

    def snapshot(self, timeout_s: float | None = 0) -> Snapshot:
        variables = {name: variable.snapshot() for name, variable in self._variables.items()}
        return Snapshot(self.program, self._transcript, variables=variables)

    async def usage(self, until: Until) -> dict[str, int]:
        return Ledger().total()
