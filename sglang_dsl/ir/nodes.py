"""The IR: frozen nodes, and `+` between them. It knows no backend, no template and no running state.

    Node
    +-- Text          constant text
    +-- RoleBegin     opens a turn           +-- RoleEnd      closes it
    +-- Gen           a generation, named or not
    +-- Select        a choice among given texts
    +-- ScopeBegin    starts recording text into a variable  +-- ScopeEnd
    +-- Seq           nodes in order (what `+` makes)
    +-- Tools         tools that the model may call from here on
    +-- Calls         tools that were called
    +-- LoopBegin     from here on calls are run      +-- LoopEnd
    +-- Fork          branches over what stands before it    +-- Join     (only in traced programs)

Every node carries where it was written (`src`), which takes no part in equality. Prints as a tree; to_dict
and from_dict give plain JSON data and back.
"""

from __future__ import annotations

import dataclasses
import json
import operator
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

from sglang_dsl.errors import BadProgram
from sglang_dsl.errors.source import Source as Source
from sglang_dsl.errors.source import caller as caller
from sglang_dsl.ir.interpolation import KEPT, mark, marked, parts
from sglang_dsl.ir.mistakes import Unread, not_a_node, opens_no_block, refuse_text
from sglang_dsl.ir.typed import Typed

if TYPE_CHECKING:
    import typing_extensions  # has TypeVars with defaults before Python 3.13

    V = typing_extensions.TypeVar("V", covariant=True, default=Any)
else:
    V = TypeVar("V", covariant=True)

# Fields that may be pages long; so much of them is shown to people.
_LONG = frozenset({"json_schema", "ebnf", "structural_tag", "tools"})
_SHOWN = 80
_LINE = 320  # of a repr


def cut(text: str, most: int = _SHOWN) -> str:
    """Its first `most` characters; for people."""
    return text if len(text) <= most else f"{text[:most]}..."


@dataclass(frozen=True, slots=True, repr=False)
class Node:
    """Base of all nodes. `a + b`, with text on either side, makes a Seq."""

    KIND: ClassVar[str] = "node"

    def __add__(self, other: Node | str) -> Seq:
        return concat(self, other)

    def __radd__(self, other: str) -> Seq:
        return concat(other, self)

    def __str__(self) -> str:
        """What stands for it in a text, and becomes the node again where that text is added; to look at it,
        repr()."""
        return mark(self)

    def __format__(self, spec: str) -> str:
        if spec:
            what = f"{self!r:.80} cannot be formatted with {spec!r}"
            raise BadProgram(f"{what}: its text is not known yet, at {caller()}")
        return mark(self)

    if not TYPE_CHECKING:
        __enter__ = opens_no_block
        __exit__ = opens_no_block

    def children(self) -> tuple[Node, ...]:
        return ()

    def walk(self) -> Iterator[Node]:
        """This node and all below it, in order."""
        yield self
        for child in self.children():
            yield from child.walk()

    def label(self) -> str:
        """One line for people: what is said, without what is left at its default."""
        return f"{type(self).__name__}({', '.join(_said(self))})"

    def __repr__(self) -> str:
        """label(), long values cut."""
        return self._short(*(cut(one) for one in _said(self)))

    def _short(self, *said: str) -> str:
        return f"{type(self).__name__}({cut(', '.join(said), _LINE)})"

    def tree(self, depth: int = 0) -> str:
        lines = ["  " * depth + self.label()]
        lines += [child.tree(depth + 1) for child in self.children()]
        return "\n".join(lines)


def _said(value: Any) -> list[str]:
    """name=value of the fields that differ from their default; those of a Sampling stand among them."""
    shown: list[str] = []
    for f in dataclasses.fields(value):
        said = getattr(value, f.name)
        if isinstance(said, Sampling):
            shown += _said(said)
        elif f.repr and said != f.default:
            text = f"{said!r}"
            shown.append(f"{f.name}={cut(text) if f.name in _LONG else text}")
    return shown


@dataclass(frozen=True, slots=True, repr=False)
class Text(Node):
    KIND: ClassVar[str] = "text"
    text: str = ""
    src: Source | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True, slots=True, repr=False)
class Media(Node):
    """A picture, a video or a sound. `part`: what messages carry for it (frontend/media.py), as JSON."""

    KIND: ClassVar[str] = "media"
    part: str = ""
    src: Source | None = field(default=None, compare=False, repr=False)

    def label(self) -> str:
        """The data itself is not shown."""
        part = json.loads(self.part)
        url = part[part["type"]]["url"]
        return f"Media({part['type'].removesuffix('_url')}, {cut(url, 40)})"

    def __repr__(self) -> str:
        return self.label()


def media_of(part: Mapping[str, Any], src: Source | None = None) -> Media:
    """The node of a message's part."""
    return Media(json.dumps(part), src=src)


@dataclass(frozen=True, slots=True, repr=False)
class RoleBegin(Node):
    """Opens a turn of `role`. A system turn may be opened without text: then the template's default stands
    in."""

    KIND: ClassVar[str] = "role_begin"
    role: str = ""
    src: Source | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True, slots=True, repr=False)
class RoleEnd(Node):
    KIND: ClassVar[str] = "role_end"
    role: str = ""
    src: Source | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True, slots=True, repr=False)
class Sampling:
    """Sampling words as written; None means "not said", so that defaults < program < call merge once, in
    lower.py."""

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
        return f"Sampling({', '.join(_said(self))})"

    def over(self, base: Sampling) -> Sampling:
        """These words where said, `base`'s elsewhere."""
        if self is base or _words(self).count(None) == len(_WORDS):
            return base
        if _words(base).count(None) == len(_WORDS):
            return self
        said = {name: v for name, v in zip(_WORDS, _words(self), strict=True) if v is not None}
        return dataclasses.replace(base, **said) if said else base


_WORDS = tuple(f.name for f in dataclasses.fields(Sampling))
_words = operator.attrgetter(*_WORDS)


@dataclass(frozen=True, slots=True, repr=False)
class Gen(Unread, Node, Generic[V]):
    """A generation; Gen[int] is one whose variable is an int. At most one of dtype, regex, json_schema, ebnf,
    structural_tag, choices says what it must match; `typed` as what type the text is read, and one of the
    others then follows from it. `retries`: how often it is asked for again where its text is no such value.
    `reasoning`: how the model marks its thoughts, where they are to be kept
    apart from the answer (a name of runtime.formats.reasoning.types, or "auto")."""

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
    src: Source | None = field(default=None, compare=False, repr=False)

    def label(self) -> str:
        return f"Gen({', '.join(_said(self._written()))})"

    def __repr__(self) -> str:
        return self._short(*(cut(one) for one in _said(self._written())))

    def _written(self) -> Gen[V]:
        """What follows from a type is not shown beside it."""
        if self.typed is None:
            return self
        return dataclasses.replace(self, dtype=None, json_schema=None, choices=None)


@dataclass(frozen=True, slots=True, repr=False)
class Select(Unread, Node):
    """A choice among `choices` by log-probability; `method` is a name in choices.METHODS. A temperature above
    0 draws from the normalised probabilities, with `seed` where given. `own`: a method that the program
    brought, which the table does not have; it is not written down."""

    KIND: ClassVar[str] = "select"
    name: str | None = None
    choices: tuple[str, ...] = ()
    method: str = "token_length_normalized"
    temperature: float = 0.0
    seed: int | None = None
    timeout: float | None = None
    own: Any = field(default=None, compare=False, repr=False)
    src: Source | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True, slots=True, repr=False)
class ScopeBegin(Node):
    KIND: ClassVar[str] = "scope_begin"
    name: str = ""
    src: Source | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True, slots=True, repr=False)
class ScopeEnd(Node):
    KIND: ClassVar[str] = "scope_end"
    name: str = ""
    src: Source | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True, slots=True, repr=False)
class Tools(Node):
    """What the model may call from here on, in place of what was offered before: each tool as chat APIs take
    it, as JSON. `own`: name -> what runs it (tool_use.definitions.Runner); it is not written down."""

    KIND: ClassVar[str] = "tools"
    tools: tuple[str, ...] = ()
    own: Any = field(default=None, compare=False, repr=False)
    src: Source | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True, slots=True, repr=False)
class Calls(Node):
    """Calls of tools as part of the assistant's turn: of each its id, name and arguments (JSON text)."""

    KIND: ClassVar[str] = "calls"
    calls: tuple[tuple[str | None, str, str], ...] = ()
    src: Source | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True, slots=True, repr=False)
class LoopBegin(Node):
    """Calls that generations make from here on are run, and the model goes on with the results. `max_steps`:
    replies with calls, at most; `timeout`: seconds of one call; `choice`: of the first reply, "auto",
    "required" or a tool's name with "=" before it. `own`: where the steps are told (state.tool_loop)."""

    KIND: ClassVar[str] = "loop_begin"
    max_steps: int = 8
    on_error: str = "tell"
    timeout: float = 60.0
    choice: str = "auto"
    parallel: bool = True
    own: Any = field(default=None, compare=False, repr=False)
    src: Source | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True, slots=True, repr=False)
class LoopEnd(Node):
    KIND: ClassVar[str] = "loop_end"
    src: Source | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True, slots=True, repr=False)
class Seq(Node):
    KIND: ClassVar[str] = "seq"
    nodes: tuple[Node, ...] = ()

    def children(self) -> tuple[Node, ...]:
        return self.nodes

    def label(self) -> str:
        return f"Seq[{len(self.nodes)}]"

    def __repr__(self) -> str:
        return self._short(*map(repr, self.nodes))


@dataclass(frozen=True, slots=True, repr=False)
class Fork(Node):
    """Branches that go on from the same text, each on its own."""

    KIND: ClassVar[str] = "fork"
    branches: tuple[Seq, ...] = ()
    src: Source | None = field(default=None, compare=False, repr=False)

    def children(self) -> tuple[Node, ...]:
        return self.branches

    def label(self) -> str:
        return f"Fork[{len(self.branches)}]"

    def __repr__(self) -> str:
        return self._short(*map(repr, self.branches))


@dataclass(frozen=True, slots=True, repr=False)
class Join(Node):
    """The branches' end; `mode` says what the parent takes from them."""

    KIND: ClassVar[str] = "join"
    mode: str = "gather_variable"
    src: Source | None = field(default=None, compare=False, repr=False)


def as_node(value: object, src: Source | None = None) -> Node:
    """A node from what a user may add: text, in which nodes may have been formatted, or a node. Anything else
    is a TypeError that says so, None (often what a function forgot to return) a ValueError."""
    if isinstance(value, str):
        return interpolated(value, src) if KEPT and marked(value) else Text(value, src=src)
    if isinstance(value, Node):
        return value
    raise not_a_node(value)


def interpolated(text: str, src: Source | None = None) -> Seq:
    """The nodes of a text that was made with nodes in it. Raises BadProgram."""
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


def concat(*given: Node | str) -> Seq:
    """Nodes in order, flattened."""
    flat: list[Node] = []
    for part in given:
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
for _kind in KINDS.values():
    refuse_text(_kind)


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
            said = {k: v for k, v in dataclasses.asdict(value).items() if v is not None}
            value = {k: list(v) if isinstance(v, tuple) else v for k, v in said.items()}
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
    fields: dict[str, Any] = {k: v for k, v in data.items() if k != "kind"}
    for below in ("nodes", "branches"):
        if below in fields:
            fields[below] = tuple(from_dict(child) for child in fields[below])
    if "sampling" in fields:
        said: dict[str, Any] = fields["sampling"]
        fields["sampling"] = Sampling(**{word: _frozen(value) for word, value in said.items()})
    if "typed" in fields:
        fields["typed"] = Typed(**fields["typed"])
    for listed in ("choices", "tools", "calls"):
        if listed in fields:
            fields[listed] = _frozen(fields[listed])
    if "src" in fields:
        fields["src"] = Source(*fields["src"])
    return kind(**fields)
