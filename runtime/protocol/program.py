"""The nodes of a program, and their form as plain JSON data; sglang_dsl.ir adds the language's syntax."""

from __future__ import annotations

import dataclasses
import json
import operator
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Generic, NamedTuple, TypeVar

from runtime.protocol.typed import Typed

if TYPE_CHECKING:
    import typing_extensions  # has TypeVars with defaults before Python 3.13

    V = typing_extensions.TypeVar("V", covariant=True, default=Any)
else:
    V = TypeVar("V", covariant=True)


class Source(NamedTuple):
    """File, line and function of the user's code that made a node."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{cell_of(self.file) or self.file}:{self.line}"


def cell_of(file: str) -> str | None:
    """In IPython, the cell of a file's name, as in its tracebacks."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    named = None if shell is None else shell.compile.format_code_name(file)
    return None if named is None else " ".join(named)


# Fields that may be pages long; _SHOWN characters of them are shown.
_LONG = frozenset({"json_schema", "ebnf", "structural_tag", "tools"})
_SHOWN = 80
_LINE = 320  # of a repr


def cut(text: str, most: int = _SHOWN) -> str:
    return text if len(text) <= most else f"{text[:most]}..."


@dataclass(frozen=True, slots=True, repr=False)
class Node:
    """Base of all nodes. `a + b`, with text on either side, makes a Seq."""

    KIND: ClassVar[str] = "node"
    src: Source | None = field(default=None, compare=False, repr=False, kw_only=True)

    def __add__(self, other: Node | str) -> Seq:
        return concat(self, other)

    def __radd__(self, other: str) -> Seq:
        return concat(other, self)

    def children(self) -> tuple[Node, ...]:
        return ()

    def walk(self) -> Iterator[Node]:
        """This node and all below it, in order."""
        yield self
        for child in self.children():
            yield from child.walk()

    def label(self) -> str:
        """One line: the fields that differ from their defaults."""
        return f"{type(self).__name__}({', '.join(_fields_set(self._written()))})"

    def __repr__(self) -> str:
        """The same with its children, long values cut."""
        parts = [repr(child) for child in self.children()] or map(cut, _fields_set(self._written()))
        return f"{type(self).__name__}({cut(', '.join(parts), _LINE)})"

    def _written(self) -> Node:
        """Itself without fields that follow from others."""
        return self

    def tree(self, depth: int = 0) -> str:
        lines = ["  " * depth + self.label()]
        lines += [child.tree(depth + 1) for child in self.children()]
        return "\n".join(lines)


def _fields_set(item: Any) -> list[str]:
    """name=value of the fields that differ from their defaults, with those of a Sampling."""
    shown: list[str] = []
    for f in dataclasses.fields(item):
        value = getattr(item, f.name)
        if isinstance(value, Sampling):
            shown += _fields_set(value)
        elif f.repr and value != f.default:
            text = f"{value!r}"
            shown.append(f"{f.name}={cut(text) if f.name in _LONG else text}")
    return shown


@dataclass(frozen=True, slots=True, repr=False)
class Text(Node):
    KIND: ClassVar[str] = "text"
    text: str = ""


@dataclass(frozen=True, slots=True, repr=False)
class Media(Node):
    """A picture, a video or a sound. `part`: the part of a message that holds it, as JSON."""

    KIND: ClassVar[str] = "media"
    part: str = ""

    def label(self) -> str:
        """The data itself is not shown."""
        part = json.loads(self.part)
        url = part[part["type"]]["url"]
        return f"Media({part['type'].removesuffix('_url')}, {cut(url, 40)})"

    def __repr__(self) -> str:
        return self.label()


def media_of(part: Mapping[str, Any], src: Source | None = None) -> Media:
    return Media(json.dumps(part), src=src)


@dataclass(frozen=True, slots=True, repr=False)
class RoleBegin(Node):
    """Opens a turn of `role`. A system turn without text gets the template's default text."""

    KIND: ClassVar[str] = "role_begin"
    role: str = ""


@dataclass(frozen=True, slots=True, repr=False)
class RoleEnd(Node):
    KIND: ClassVar[str] = "role_end"
    role: str = ""


@dataclass(frozen=True, slots=True, repr=False)
class Sampling:
    """Sampling parameters; None: not set. Defaults, program and call are merged by `over`."""

    max_tokens: int | None = None
    min_tokens: int | None = None
    n: int | None = None
    stop: tuple[str, ...] | None = None
    stop_token_ids: tuple[int, ...] | None = None
    stop_regex: tuple[str, ...] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    ignore_eos: bool | None = None
    seed: int | None = None
    return_logprob: bool | None = None
    logprob_start_len: int | None = None
    top_logprobs_num: int | None = None
    return_text_in_logprobs: bool | None = None
    whitespace: str | None = None
    schema_format: str | None = None
    require_reasoning: bool | None = None
    max_thinking_tokens: int | None = None
    skip_special_tokens: bool | None = None
    no_stop_trim: bool | None = None
    token_healing: bool | None = None
    logit_bias: tuple[tuple[int, float], ...] | None = None

    def __repr__(self) -> str:
        return f"Sampling({', '.join(_fields_set(self))})"

    def over(self, base: Sampling) -> Sampling:
        """These parameters, with those of `base` for the ones that are not set."""
        if self is base or _values(self).count(None) == len(_NAMES):
            return base
        if _values(base).count(None) == len(_NAMES):
            return self
        fields = {name: v for name, v in zip(_NAMES, _values(self), strict=True) if v is not None}
        return dataclasses.replace(base, **fields) if fields else base


_NAMES = tuple(f.name for f in dataclasses.fields(Sampling))
_values = operator.attrgetter(*_NAMES)


@dataclass(frozen=True, slots=True, repr=False)
class Gen(Node, Generic[V]):
    """A generation; Gen[int] is one whose variable is an int. At most one of dtype, regex, json_schema, ebnf,
    structural_tag, choices constrains it; with `typed`, the type of its value, one of them follows from the
    type. `retries`: how often it is repeated if its text is no such value. `reasoning`: the format of the
    model's reasoning, which is then separated from the answer (a name of runtime.formats.reasoning.marks, or
    "auto")."""

    KIND: ClassVar[str] = "gen"
    name: str | None = None
    sampling: Sampling = field(default_factory=Sampling)
    dtype: str | None = None
    regex: str | None = None
    json_schema: str | None = None
    ebnf: str | None = None
    structural_tag: str | None = None
    choices: tuple[str, ...] | None = None
    typed: Typed | None = None
    timeout: float | None = None
    retries: int | None = None
    reasoning: str | None = None

    def _written(self) -> Gen[V]:
        """Itself without the constraint that follows from its type."""
        if self.typed is None:
            return self
        return dataclasses.replace(self, dtype=None, json_schema=None, choices=None)


@dataclass(frozen=True, slots=True, repr=False)
class Select(Node):
    """A choice among `choices` by log-probability. `method`: name of the choice method. A temperature above 0
    draws from the normalised probabilities, with `seed` if set. `own`: a method without a name, which is not
    written to JSON."""

    KIND: ClassVar[str] = "select"
    name: str | None = None
    choices: tuple[str, ...] = ()
    method: str = "token_length_normalized"
    temperature: float = 0.0
    seed: int | None = None
    timeout: float | None = None
    own: Any = field(default=None, compare=False, repr=False)


@dataclass(frozen=True, slots=True, repr=False)
class ScopeBegin(Node):
    KIND: ClassVar[str] = "scope_begin"
    name: str = ""


@dataclass(frozen=True, slots=True, repr=False)
class ScopeEnd(Node):
    KIND: ClassVar[str] = "scope_end"
    name: str = ""


@dataclass(frozen=True, slots=True, repr=False)
class Tools(Node):
    """The tools that the model may call from here on, instead of earlier ones: each as in chat APIs, as JSON.
    `own`: name -> the function that runs it; not written to JSON."""

    KIND: ClassVar[str] = "tools"
    tools: tuple[str, ...] = ()
    own: Any = field(default=None, compare=False, repr=False)


@dataclass(frozen=True, slots=True, repr=False)
class Calls(Node):
    """Tool calls in the assistant's turn: id, name and arguments (JSON text) of each."""

    KIND: ClassVar[str] = "calls"
    calls: tuple[tuple[str | None, str, str], ...] = ()


@dataclass(frozen=True, slots=True, repr=False)
class LoopBegin(Node):
    """From here on tool calls are run, and the model continues with the results. `max_steps`: the most
    replies with calls; `timeout`: seconds of one call; `choice`: of the first reply, "auto", "required" or
    "=" and a tool's name. `own`: the observer of the steps; not written to JSON."""

    KIND: ClassVar[str] = "loop_begin"
    max_steps: int = 8
    on_error: str = "tell"
    timeout: float = 60.0
    choice: str = "auto"
    parallel: bool = True
    own: Any = field(default=None, compare=False, repr=False)


@dataclass(frozen=True, slots=True, repr=False)
class LoopEnd(Node):
    KIND: ClassVar[str] = "loop_end"


@dataclass(frozen=True, slots=True, repr=False)
class Seq(Node):
    KIND: ClassVar[str] = "seq"
    nodes: tuple[Node, ...] = ()

    def children(self) -> tuple[Node, ...]:
        return self.nodes

    def label(self) -> str:
        return f"Seq[{len(self.nodes)}]"


@dataclass(frozen=True, slots=True, repr=False)
class Fork(Node):
    """Branches that continue the same text."""

    KIND: ClassVar[str] = "fork"
    branches: tuple[Seq, ...] = ()

    def children(self) -> tuple[Node, ...]:
        return self.branches

    def label(self) -> str:
        return f"Fork[{len(self.branches)}]"


@dataclass(frozen=True, slots=True, repr=False)
class Join(Node):
    """The branches' end; `mode`: how the parent joins them."""

    KIND: ClassVar[str] = "join"
    mode: str = "gather_variable"


def as_node(value: object) -> Node:
    """A node as it is, a str as Text. Raises TypeError for anything else."""
    if isinstance(value, str):
        return Text(value)
    if isinstance(value, Node):
        return value
    raise TypeError(f"expected text or a node, got {type(value).__name__}")


def concat(*parts: Node | str) -> Seq:
    """Nodes in order, flattened."""
    flat: list[Node] = []
    for part in parts:
        flat.extend(leaves(as_node(part)))
    return Seq(tuple(flat))


def leaves(node: Node) -> tuple[Node, ...]:
    """What a Seq holds, or the node itself."""
    return node.nodes if isinstance(node, Seq) else (node,)


def flatten(node: Node) -> tuple[Node, ...]:
    """The leaves of a tree, in order."""
    nodes = leaves(node)
    if _BRANCHING.isdisjoint(map(type, nodes)):
        return nodes
    return tuple(n for n in node.walk() if not isinstance(n, Seq))


_BRANCHING = frozenset({Seq, Fork})

KINDS: dict[str, type[Node]] = {
    kind.KIND: kind
    for kind in (
        Text, Media, RoleBegin, RoleEnd, Gen, Select, ScopeBegin, ScopeEnd, Tools, Calls, LoopBegin, LoopEnd,
        Seq, Fork, Join,
    )
}  # fmt: skip


def to_dict(node: Node) -> dict[str, Any]:
    """Plain JSON data; from_dict gives an equal node back."""
    data: dict[str, Any] = {"kind": node.KIND}
    for f in dataclasses.fields(node):
        if f.name == "own":
            continue
        value = getattr(node, f.name)
        if f.name in ("nodes", "branches"):
            value = [to_dict(child) for child in node.children()]
        elif isinstance(value, Sampling):
            fields = {k: v for k, v in dataclasses.asdict(value).items() if v is not None}
            value = {k: list(v) if isinstance(v, tuple) else v for k, v in fields.items()}
        elif isinstance(value, Typed):
            value = {"name": value.name, "kind": value.kind}
        elif isinstance(value, tuple):
            value = list(value)
        if value is not None:
            data[f.name] = value
    return data


def _frozen(value: Any) -> Any:
    """Lists as tuples, at every depth."""
    return tuple(map(_frozen, value)) if isinstance(value, list | tuple) else value


def from_dict(data: dict[str, Any]) -> Node:
    """The node that to_dict described. Raises ValueError for an unknown kind."""
    kind = KINDS.get(str(data.get("kind")))
    if kind is None:
        raise ValueError(f"unknown node kind {data.get('kind')!r}; known: {', '.join(KINDS)}")
    fields: dict[str, Any] = {name: _frozen(value) for name, value in data.items() if name != "kind"}
    for below in ("nodes", "branches"):
        if below in fields:
            fields[below] = tuple(map(from_dict, fields[below]))
    if "sampling" in fields:
        values: dict[str, Any] = fields["sampling"]
        fields["sampling"] = Sampling(**{name: _frozen(value) for name, value in values.items()})
    if "typed" in fields:
        fields["typed"] = Typed(**fields["typed"])
    if "src" in fields:
        fields["src"] = Source(*fields["src"])
    return kind(**fields)
