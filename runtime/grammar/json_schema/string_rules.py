"""What the strings of a lowered schema may hold, where one rule says it: a length, a pattern or a list.

It knows lowered schemas and automata over characters, and no engine.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from typing import Any, NamedTuple

from runtime.grammar.automaton import Limits
from runtime.grammar.dfa import ByteDfa, compile_node
from runtime.grammar.json_schema.formats import FORMATS
from runtime.grammar.json_schema.in_string import counted_set, is_known, takes
from runtime.grammar.json_schema.residual import Duty
from runtime.grammar.json_schema.text_nodes import found_by
from runtime.grammar.plain_tokens import PlainAutomaton, PlainTokens
from runtime.grammar.token_bits import Bits
from runtime.protocol.errors import BadConstraint

OTHER = "\ue000"
"""A character that no name and no listed value holds: where it may follow, any may."""

MOST_NAMES = 256
_KEPT, _MOST = 256, 64
_TOGETHER, _PLACES = 8, 4_000
_JOINS = {"$ref", "allOf", "anyOf", "oneOf", "$defs", "x-guidance"}
_HAS_SOME = {
    "type", "properties", "additionalProperties", "items", "prefixItems", "maxItems", "maxLength",
    "maxProperties",
}  # fmt: skip
_PATTERNS = frozenset({"patternProperties"})
_TOLD = {"minLength", "maxLength", "pattern", "format", "enum", "const"}
_LIMITS = Limits(positions=1_000, states=400, table_bytes=1 << 20, work=10_000, seconds=60.0)
_WELL_KNOWN = Limits()
_FORMATS = frozenset(f"^(?:{FORMATS[name]})$" for name in ("email", "uri"))
_PREPARED, _WELL_PREPARED, _AUTOMATA = 3, 16, 256


@lru_cache(maxsize=256)
def _compiled(pattern: str, limits: Limits) -> ByteDfa | None:
    """The texts in which `pattern`, in the syntax of lowered schemas, is found; None: too large."""
    try:
        dfa = compile_node(found_by(pattern), limits, unrolled=None)
    except (BadConstraint, RecursionError):
        return None
    assert isinstance(dfa, ByteDfa), "it has no counters"
    return dfa


class Spec(NamedTuple):
    """At least `low` and at most `high` characters (None: any number), found by `pattern` ("": any), or one
    of `words`. free: besides, perhaps, any string."""

    low: int = 0
    high: int | None = None
    pattern: str = ""
    words: tuple[str, ...] | None = None
    free: bool = False


class Rule(NamedTuple):
    """A Spec that can be followed. `automaton`: over the characters of the whole value; states: whether it
    says more than which characters there may be. words: of which the engine may take some, or all."""

    low: int
    high: int | None
    automaton: PlainAutomaton | None = None
    states: bool = False
    words: tuple[str, ...] | None = None
    free: bool = False

    def state(self, value: str) -> int | str:
        """What decides, of `value`, about what may follow it; -1: nothing does."""
        if self.words is not None:
            return value
        return 0 if self.automaton is None else self.automaton.dfa.walk(0, value.encode())

    def plain(self, tokens: PlainTokens, value: str, first: int | None = None) -> Bits:
        """The plain tokens that may come after `value`. `first`: those that begin with this character, which
        is no part of the value."""
        state = 0 if self.automaton is None else self.automaton.dfa.walk(0, value.encode())
        if state < 0:
            return tokens.none
        if self.states and self.automaton is not None:
            return self.automaton.after(state, first)
        least = 0 if first is None else 1
        bits = tokens.all if self.high is None else tokens.within(self.high - len(value) + least)
        if self.automaton is not None:
            return bits & self.automaton.after(state, first)
        return bits if first is None else bits & tokens.beginning(first)


class Rules:
    """Makes rules for one vocabulary; automata are kept by what they hold. Thread-safe."""

    def __init__(self, tokens: PlainTokens) -> None:
        self.tokens = tokens
        self._automata: OrderedDict[str, PlainAutomaton | None] = OrderedDict()
        self._lock = threading.Lock()
        for pattern in _FORMATS:
            self._automaton(pattern)

    def rule(self, spec: Spec) -> Rule | None:
        """None where the automaton would be too large."""
        if not spec.pattern and spec.words is None:
            return Rule(spec.low, spec.high)
        counted = counted_set(spec.pattern) if spec.words is None else None
        if counted is not None:
            automaton = self._automaton(f"^{counted.of}*$")
            return None if automaton is None else Rule(counted.low, counted.high, automaton)
        if spec.words is not None:
            if len(spec.words) > MOST_NAMES or any(OTHER in word for word in spec.words):
                return None
            return Rule(0, None, states=True, words=spec.words, free=spec.free)
        automaton = self._automaton(spec.pattern)
        return None if automaton is None else Rule(0, None, automaton, states=True)

    def member(self, node: Node, name: str) -> list[Any] | None:
        """The schemas that `node` has for a property; None: not known."""
        found = [node["properties"][name]] if name in node.get("properties", ()) else []
        for pattern, schema in node.get("patternProperties", {}).items():
            automaton = self._automaton(pattern)
            if automaton is None:
                return None
            try:
                state = automaton.dfa.walk(0, name.encode())
            except UnicodeEncodeError:
                return None
            if state >= 0 and automaton.dfa.accepts(state):
                found.append(schema)
        return found or [node.get("additionalProperties", True)]

    def _automaton(self, pattern: str) -> PlainAutomaton | None:
        with self._lock:
            if pattern in self._automata:
                self._automata.move_to_end(pattern)
                return self._automata[pattern]
        dfa = _compiled(pattern, _WELL_KNOWN if pattern in _FORMATS else _LIMITS)
        found = None if dfa is None else PlainAutomaton(dfa, self.tokens)
        if found is not None and not found.prepare(_WELL_PREPARED if pattern in _FORMATS else _PREPARED):
            found = None  # its masks would take longer than the engine's
        with self._lock:
            self._automata[pattern] = found
            if len(self._automata) > _AUTOMATA:
                self._automata.popitem(last=False)
        return found


Node = Mapping[str, Any]
Alternatives = tuple[tuple[Node, ...], ...]
"""The schemas of one place: all nodes of one of the tuples hold."""


class Texts(Duty):
    """What is known of one place of a document: the `rule` of a string there, the `names` that an object
    has of its own accord; None: not known. Takes a duty's part in the tracker, and owes nothing."""

    places, impossible, unique, minds_names = (), False, False, False

    def __init__(self, found: Alternatives | None, definitions: Mapping[str, Any], rules: Rules) -> None:
        self._found, self._definitions, self._rules = found, definitions, rules
        self._inner: dict[str | int, Texts] = {}
        spec = None if found is None else spec_of(found)
        self.rule = rules.rule(spec) if spec is not None else None
        self.names = None if found is None else _names_of(found)

    @classmethod
    def starting(cls, schema: Any, rules: Rules) -> tuple[Texts, bool] | None:
        """Those of the lowered `schema`, and whether each string in it surely has a rule; None where of the
        whole document nothing is known."""
        definitions = schema.get("$defs", {}) if isinstance(schema, Mapping) else {}
        found = alternatives(schema, definitions, frozenset())
        if found is None:
            return None
        return cls(found, definitions, rules), _all_known(schema, definitions, rules)

    def member(self, name: str) -> Texts:
        return self._at(name, "object", lambda node: self._rules.member(node, name))

    def item(self, index: int) -> Texts:
        return self._at(index, "array", lambda node: _item(node, index))

    def _at(self, step: str | int, kind: str, chosen: Callable[[Node], list[Any] | None]) -> Texts:
        known = self._inner.get(step)
        if known is None:
            known = Texts(self._after(kind, chosen), self._definitions, self._rules)
            if len(self._inner) < _KEPT:
                self._inner[step] = known
        return known

    def _after(self, kind: str, chosen: Callable[[Node], list[Any] | None]) -> Alternatives | None:
        found: list[tuple[Node, ...]] = []
        for nodes in self._found if self._found is not None else ():
            if not all(takes(node, kind) for node in nodes):
                continue
            if any(node.keys() & {"enum", "const"} for node in nodes):
                return None
            schemas = [chosen(node) for node in nodes]
            if any(some is None for some in schemas):
                return None
            all_of = {"allOf": [schema for some in schemas for schema in some or ()]}
            after = alternatives(all_of, self._definitions, frozenset())
            if after is None:
                return None
            found += after
        return None if self._found is None or len(found) > _MOST else tuple(found)

    def name_fault(self, name: str) -> str | None:
        return None


def _item(node: Node, index: int) -> list[Any]:
    first = node.get("prefixItems", ())
    return [first[index] if index < len(first) else node.get("items", True)]


def alternatives(schema: Any, definitions: Mapping[str, Any], met: frozenset[str]) -> Alternatives | None:
    """Of a lowered schema; None where there is more to it, or there are too many."""
    if isinstance(schema, bool):
        return ((),) if schema else ()
    if not isinstance(schema, Mapping):
        return None
    own = {key: value for key, value in schema.items() if key not in _JOINS}
    if not is_known(own, _PATTERNS):
        return None
    factors: list[Alternatives | None] = [((own,),)] if own else []
    if "$ref" in schema:
        name = str(schema["$ref"]).removeprefix("#/$defs/")
        if name in met or name not in definitions:
            return None
        factors.append(alternatives(definitions[name], definitions, met | {name}))
    factors += [alternatives(part, definitions, met) for part in schema.get("allOf", ())]
    for word in ("anyOf", "oneOf"):
        if word in schema:
            options = [alternatives(part, definitions, met) for part in schema[word]]
            if any(option is None for option in options):
                return None
            factors.append(tuple(one for option in options for one in option or ()))
    found: Alternatives = ((),)
    for factor in factors:
        if factor is None or len(found) * len(factor) > _MOST:
            return None
        found = tuple((*one, *other) for one in found for other in factor if _together(one, other))
    return found


def _together(one: tuple[Node, ...], other: tuple[Node, ...]) -> bool:
    """Whether their types leave something."""
    kinds: set[str] | None = None
    for node in (*one, *other):
        named = node.get("type")
        if named is not None:
            some = set(named if isinstance(named, list) else [named])
            kinds = some if kinds is None else kinds & some
    return kinds is None or bool(kinds)


def _names_of(found: Alternatives) -> tuple[str, ...] | None:
    """The names that objects have of their own accord, where all others may be had or none of them."""
    names: dict[str, None] = {}
    for nodes in found:
        if not all(takes(node, "object") for node in nodes):
            continue
        if any("patternProperties" in node for node in nodes) and not _spare_none(nodes):
            return None
        for node in nodes:
            if "enum" in node or "const" in node:
                return None
            names.update(dict.fromkeys((*node.get("properties", ()), *node.get("required", ()))))
    return None if len(names) > MOST_NAMES or any(OTHER in name for name in names) else tuple(names)


def _spare_none(nodes: tuple[Node, ...]) -> bool:
    """Whether their patterns forbid no names: one pattern, of values that there are."""
    schemas = list(nodes[0].get("patternProperties", {}).values())
    open_ = nodes[0].get("additionalProperties", True) is not False
    return len(nodes) == 1 and open_ and len(schemas) == 1 and _has_some(schemas[0])


def _has_some(schema: Any) -> bool:
    """Whether some value surely matches: an empty one does."""
    return schema is True or (isinstance(schema, Mapping) and schema.keys() <= _HAS_SOME)


def spec_of(found: Alternatives) -> Spec | None:
    """What strings are by all of `found` that take any; None where they differ, or no rule says it."""
    specs = {_spec(nodes) for nodes in found if all(takes(node, "string") for node in nodes)}
    if len(specs) == 1:
        return specs.pop()
    words: set[str] = set()
    free: list[int] = []
    for spec in specs:
        if spec is None or spec.pattern or spec.high is not None:
            return None
        words.update(spec.words or ())
        free += [spec.low] * (spec.words is None)
    if not words:
        return Spec(max(free)) if free else None
    return Spec(words=tuple(sorted(words)), free=bool(free))


def _spec(nodes: tuple[Node, ...]) -> Spec | None:
    told = [node for node in nodes if node.keys() & _TOLD]
    if len(told) > 1:
        return None
    node = told[0] if told else {}
    bounds = node.keys() & {"minLength", "maxLength"}
    if node.keys() & {"enum", "const"}:
        if bounds or "pattern" in node:
            return None
        values = [node["const"]] if "const" in node else node["enum"]
        return Spec(words=tuple(sorted({value for value in values if isinstance(value, str)})))
    if "format" in node or ("pattern" in node and bounds):
        return None
    return Spec(int(node.get("minLength", 0)), node.get("maxLength"), node.get("pattern", ""))


def _all_known(schema: Any, definitions: Mapping[str, Any], rules: Rules) -> bool:
    """Whether each string that can come up under `schema` has one rule, whatever came before it."""
    waiting: list[tuple[Any, ...]] = [(schema,)]  # the schemas that hold at one place
    met: set[tuple[int, ...]] = set()
    while waiting:
        schemas = waiting.pop()
        key = tuple(map(id, schemas))
        if key in met:
            continue
        met.add(key)
        if len(schemas) > _TOGETHER or len(met) > _PLACES:
            return False
        found = alternatives({"allOf": schemas}, definitions, frozenset())
        if found is None or _names_of(found) is None:
            return False
        if any("patternProperties" in node or _holds_more(node) for nodes in found for node in nodes):
            return False
        if any(all(takes(node, "string") for node in nodes) for nodes in found):
            spec = spec_of(found)
            if spec is None or rules.rule(spec) is None:
                return False
        for kind, inner in (("object", _members), ("array", _items)):
            taking = [nodes for nodes in found if all(takes(node, kind) for node in nodes)]
            if len(taking) > 1:
                return False
            waiting += [
                tuple({id(one): one for one in some}.values()) for nodes in taking for some in inner(nodes)
            ]
    return True


def _members(nodes: tuple[Node, ...]) -> Iterator[list[Any]]:
    """What holds for each property that `nodes` name, and for others."""
    names = {name: None for node in nodes for name in node.get("properties", ())}
    others = [node.get("additionalProperties", True) for node in nodes]
    yield others
    for name in names:
        yield [node.get("properties", {}).get(name, other) for node, other in zip(nodes, others)]


def _items(nodes: tuple[Node, ...]) -> Iterator[list[Any]]:
    """What holds for each item."""
    most = max((len(node.get("prefixItems", ())) for node in nodes), default=0)
    for index in range(most + 1):
        yield [schema for node in nodes for schema in _item(node, index)]


def _holds_more(node: Node) -> bool:
    """Whether it lists arrays or objects."""
    values = [node["const"]] if "const" in node else node.get("enum", ())
    return any(isinstance(value, list | dict) for value in values)
