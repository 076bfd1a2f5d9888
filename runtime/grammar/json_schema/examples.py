"""Examples: small values of a schema, as the first completions to try.

Each part gets the smallest value that may match: a listed one, required members, the shortest text of a
pattern, a bound of a number. A validator checks the parts, the caller the whole. Work is bounded, so there
may be none; PAUSE is yielded between two pieces of it.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from itertools import chain, count, islice
from typing import Any

from runtime.grammar.automata.dfa import compile_node
from runtime.grammar.automata.shortest_end import ShortestEnds
from runtime.grammar.completion import PAUSE
from runtime.grammar.json_schema.checks.runtime_checks import RuntimeChecks
from runtime.grammar.json_schema.document import Paths, SchemaDocument, SchemaPath, known, read_document
from runtime.grammar.json_schema.lower import lower
from runtime.grammar.json_schema.lowering import Relaxation, Unspelled
from runtime.grammar.json_schema.shapes import is_of, item_paths, member_paths
from runtime.grammar.json_schema.texts.common_text import LIMITS, search_language, shortest_of_all
from runtime.grammar.json_schema.texts.ecma import spell
from runtime.grammar.json_schema.texts.formats import FORMATS
from runtime.protocol.constraint import Constraint
from runtime.protocol.errors import BadConstraint

Nodes = Mapping[SchemaPath, Mapping[str, Any]]
"""Schema objects by path."""

_WORK = 1500  # schemas looked at for one document
_WHOLE = 4  # values of the whole that are offered
_FEW = 6  # values of a part that are tried beside its neighbours
_LISTED = 64
_DEPTH = 24
_LONGEST = 2000  # characters, items or members that are filled up
_KINDS = {
    "object": ("properties", "required", "additionalProperties", "patternProperties", "minProperties"),
    "array": ("items", "prefixItems", "minItems", "contains", "uniqueItems"),
    "string": ("pattern", "minLength", "maxLength", "format"),
    "number": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
    "integer": (), "null": (), "boolean": (),
}  # fmt: skip
# The shortest dates are of the year 0, which the standard has and many a library has not.
_DAYS = ("2000-01-01", "1970-01-01", "2024-02-29", "2038-12-31")
_TIMES = {"date": "", "date-time": "T00:00:00Z"}
_NOTHING = object()
_AHEAD = re.compile(r"\^\(\?([=!])((?:[^()\\]|\\.|\((?:[^()\\]|\\.)*\))*)\)")
"""A look-ahead at the beginning of a pattern."""


def examples(document: SchemaDocument) -> Iterator[Any]:
    """JSON values that may be whole documents of the schema, and PAUSE."""
    if document.scoped:
        return
    try:
        yield from _few(Examples(document).values(), _WHOLE)
    except (BadConstraint, RecursionError, ArithmeticError, LookupError, TypeError, ValueError):
        return  # beyond what is done for an example, such as numbers that no float represents


@lru_cache(maxsize=256)
def values_of(constraint: Constraint) -> tuple[Any, ...]:
    """Values that match a constraint's JSON schema, the smallest first, if any were found within the bounds.
    `format` asserts unless the constraint sets it otherwise. Raises BadConstraint."""
    document = read_document(constraint, "assertion")
    return tuple(value for value in examples(document) if value is not PAUSE)


class Examples:
    """The examples of one document."""

    def __init__(self, document: SchemaDocument) -> None:
        self._document = document
        try:
            plan = lower(document, Relaxation())
        except Unspelled:  # for a part, which need not be in all values
            plan = lower(document, Relaxation(everything=True))
        self._runtime_checks = RuntimeChecks(plan)
        self._work = _WORK

    def values(self) -> Iterator[Any]:
        """Values that match, the smallest first."""
        return self._of(((),), frozenset(), 0)

    def _of(self, paths: Paths, chosen: frozenset[SchemaPath], depth: int) -> Iterator[Any]:
        """Values for all schemas at `paths`. chosen: the choices among them that were made already."""
        yield PAUSE
        self._work -= 1
        if self._work < 0 or depth > _DEPTH:
            return
        nodes: dict[SchemaPath, Mapping[str, Any]] = {}
        for path in self._runtime_checks.closure(paths):
            node = self._document.node(path)
            if node is False:
                return
            if isinstance(node, Mapping) and not self._document.alone(node):
                nodes[path] = {word: node[word] for word in node if known(word, self._document.draft)}
        for step, options in _ways(nodes):
            if step not in chosen:
                for option in options:
                    yield from _few(self._of((*paths, *option), chosen | {step}, depth + 1), _FEW)
                return
        for value in self._plain(nodes, depth):
            if value is PAUSE or self._matches(paths, value):
                yield value

    def _matches(self, paths: Paths, value: Any) -> bool:
        self._work -= 1
        return all(self._runtime_checks.holds(path, value) for path in paths)

    def _plain(self, nodes: Nodes, depth: int) -> Iterator[Any]:
        """Values for the schemas without their choices; not all of them match."""
        lists = [node["enum"] for node in nodes.values() if "enum" in node]
        lists += [[node["const"]] for node in nodes.values() if "const" in node]
        if lists:
            kinds = self._kinds(nodes)
            yield from (value for value in min(lists, key=len)[:_LISTED] if is_of(value, kinds))
            return
        for kind in self._kinds(nodes):
            match kind:
                case "object":
                    yield from _few(self._objects(nodes, depth), _FEW)
                case "array":
                    yield from _few(self._arrays(nodes, depth), _FEW)
                case "string":
                    yield from islice(_strings(list(nodes.values())), 2 * _LISTED)
                case "integer" | "number":
                    yield from _numbers(list(nodes.values()), whole=kind == "integer")
                case "boolean":
                    yield from (True, False)
                case "null":
                    yield None

    def _kinds(self, nodes: Nodes) -> list[str]:
        kinds = ["integer", "number", "string", "null", "boolean", "array", "object"]
        for node in nodes.values():
            if "type" in node:
                types = node["type"] if isinstance(node["type"], list) else [node["type"]]
                kinds = [kind for kind in kinds if kind in types or (kind == "integer" and "number" in types)]
        likely = [kind for kind in kinds if any(node.keys() & set(_KINDS[kind]) for node in nodes.values())]
        return likely + [kind for kind in kinds if kind not in likely]

    # -- objects ---------------------------------------------------------------------------------------------

    def _objects(self, nodes: Nodes, depth: int) -> Iterator[Any]:
        known = list(dict.fromkeys(name for node in nodes.values() for name in node.get("properties", ())))
        required = [name for node in nodes.values() for name in _names(node.get("required"))]
        fewest = max((node.get("minProperties", 0) for node in nodes.values()), default=0)
        # Choices are mostly distinguished by members with listed values.
        tags = {
            name
            for node in nodes.values()
            for name, inner in node.get("properties", {}).items()
            if isinstance(inner, Mapping) and inner.keys() & {"enum", "const"}
        }
        spare = sorted((name for name in known if name not in required), key=lambda name: name not in tags)
        spare.append("a0")  # not a name of the schema
        required_tags = [name for name in required if name in tags]
        seen: set[str] = set()
        for more in ((), *((name,) for name in spare[: _FEW - 1])):
            for skip in ({}, *({name: number} for name in required_tags[:_FEW] for number in (1, 2, 3))):
                needed = [*required, *more]
                for value in self._object(nodes, known, needed, min(fewest, _LONGEST), depth, skip):
                    if value is PAUSE or _key(value) not in seen:
                        yield value
                        seen.add(_key(value) if value is not PAUSE else "")

    def _object(
        self, nodes: Nodes, known: list[str], needed: list[str], fewest: int,
        depth: int, skip: Mapping[str, int],
    ) -> Iterator[Any]:  # fmt: skip
        """At most one object, with the `needed` members, those they depend on, and others up to `fewest`.
        skip: how many of a member's values are passed over."""
        names = dict.fromkeys(needed)
        others = chain(known, self._others(nodes, fewest), (f"a{number}" for number in range(fewest)))
        extra: list[SchemaPath] = []
        waiting = list(names)
        while waiting or len(names) < fewest:
            name = waiting.pop() if waiting else next((one for one in others if one not in names), None)
            if name is None:
                return
            if name not in needed and not self._may_be(nodes, name):
                continue
            names[name] = None
            for path, node in nodes.items():
                for word in ("dependentRequired", "dependencies", "dependentSchemas"):
                    needs = node.get(word, {}).get(name) if isinstance(node.get(word), Mapping) else None
                    if isinstance(needs, list):
                        waiting += [other for other in needs if other not in names]
                        names.update(dict.fromkeys(needs))
                    elif needs is not None and (*path, word, name) not in nodes:
                        extra.append((*path, word, name))
        if extra:
            inner = tuple(dict.fromkeys([*nodes, *extra]))
            chosen = frozenset(step for step, _ in _ways(nodes))
            yield from _few(self._of(inner, chosen, depth + 1), 1)
            return
        order = {name: at for at, name in enumerate(known)}
        members: dict[str, Any] = {}
        for name in sorted(names, key=lambda name: order.get(name, len(order))):
            paths = self._members(nodes, name)
            value: Any = _NOTHING if paths else 0
            spare = skip.get(name, 0)
            for one in self._of(paths, frozenset(), depth + 1) if paths else ():
                if one is PAUSE:
                    yield PAUSE
                elif spare:
                    spare -= 1
                else:
                    value = one
                    break
            if value is _NOTHING:
                return
            members[name] = value
        yield members

    def _others(self, nodes: Nodes, count: int) -> Iterator[str]:
        """Names of members that are not listed: by `propertyNames` and patterns."""
        rules = [(*path, "propertyNames") for path, node in nodes.items() if "propertyNames" in node]
        if rules and count:
            for name in _few(self._of(tuple(rules), frozenset(), 1), count):
                if isinstance(name, str):
                    yield name
        for node in nodes.values():
            for pattern in node.get("patternProperties", ()) if count else ():
                for low in (0, 4, 8):
                    yield from islice(_strings([{"pattern": pattern, "minLength": low}]), count)

    def _may_be(self, nodes: Nodes, name: str) -> bool:
        rules = [(*path, "propertyNames") for path, node in nodes.items() if "propertyNames" in node]
        if any(self._document.node(path) is False for path in self._members(nodes, name)):
            return False
        return self._matches(tuple(rules), name)

    def _members(self, nodes: Nodes, name: str) -> Paths:
        return tuple(inner for path in nodes for inner in member_paths(self._document, path, name))

    # -- arrays ----------------------------------------------------------------------------------------------

    def _arrays(self, nodes: Nodes, depth: int) -> Iterator[Any]:
        least = max((node.get("minItems", 0) for node in nodes.values()), default=0)
        least = min(max(0, math.ceil(least)), _LONGEST)
        contained = [
            ((*path, "contains"), min(math.ceil(node.get("minContains", 1)), _LONGEST))
            for path, node in nodes.items()
            if "contains" in node
        ]
        unique = any(node.get("uniqueItems") for node in nodes.values())
        for size in (least, max(least, sum(times for _, times in contained)), least + 1):
            items: list[Any] = []
            seen: set[str] = set()
            needed = [path for path, times in contained for _ in range(times)]
            for index in range(size):
                paths = tuple(p for path in nodes for p in item_paths(self._document, path, index))
                if index < len(needed):
                    paths = (*paths, needed[index])
                value = _NOTHING
                for one in _few(self._of(paths, frozenset(), depth + 1) if paths else count(), _LISTED):
                    if one is PAUSE:
                        yield PAUSE
                    elif not unique or _key(one) not in seen:
                        value = one
                        break
                if value is _NOTHING:
                    return
                items.append(value)
                seen.add(_key(value))
            yield items


def _ways(nodes: Nodes) -> Iterator[tuple[SchemaPath, list[Paths]]]:
    """The choices of some schemas, and the schemas that each option adds."""
    for path, node in nodes.items():
        for word in ("anyOf", "oneOf"):
            if isinstance(node.get(word), list):
                # References, which may lead back here, come last.
                order = sorted(enumerate(node[word]), key=lambda option: '"$ref"' in json.dumps(option[1]))
                yield (*path, word), [((*path, word, index),) for index, _ in order]
        if "if" in node:
            otherwise = ((*path, "else"),) if "else" in node else ()
            both = ((*path, "if"), (*path, "then")) if "then" in node else ((*path, "if"),)
            yield (*path, "if"), [otherwise, both]


def _few(values: Iterable[Any], most: int) -> Iterator[Any]:
    """At most so many values, and the pauses between them."""
    for value in values:
        yield value
        most -= value is not PAUSE
        if most <= 0:
            return


def _names(value: Any) -> list[str]:
    return value if isinstance(value, list) else []


def _key(value: Any) -> str:
    return json.dumps(value, sort_keys=True)


def _numbers(nodes: list[Mapping[str, Any]], *, whole: bool) -> Iterator[int | float]:
    ideas: list[Any] = [0, 1]
    for node in nodes:
        for word in ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum"):
            bound = node.get(word)
            if isinstance(bound, int | float) and not isinstance(bound, bool):
                ideas += [math.ceil(bound), math.floor(bound), math.floor(bound) + 1, math.ceil(bound) - 1]
                ideas += [] if whole else [bound, bound + 0.5, bound - 0.5, bound * 1.001, bound * 0.999]
                step = node.get("multipleOf")
                if isinstance(step, int | float) and step > 0:
                    ideas += [math.ceil(bound / step) * step, math.floor(bound / step) * step]
        step = node.get("multipleOf")
        if isinstance(step, int | float):
            ideas += [step, -step, 2 * step]
    ideas += [-1, *range(2, 12)] if whole else [0.5, -1, 1.5, *range(2, 12)]
    ideas += [*range(12, 65), *(sign * 10**size + sign for size in (2, 3, 4, 6, 9) for sign in (1, -1))]
    met: set[float] = set()
    for idea in ideas:
        if (not whole or idea == int(idea)) and idea not in met and math.isfinite(idea):
            met.add(idea)
            yield int(idea) if idea == int(idea) and abs(idea) < 1e15 else idea


def _strings(nodes: list[Mapping[str, Any]]) -> Iterator[str]:
    low = max((node.get("minLength", 0) for node in nodes), default=0)
    low = min(max(0, math.ceil(low)), _LONGEST)
    patterns = [node["pattern"] for node in nodes if isinstance(node.get("pattern"), str)]
    forms = {str(node.get("format")) for node in nodes}
    sources = [f"^(?:{FORMATS[form]})$" for form in sorted(forms & FORMATS.keys() - _TIMES.keys())]
    for form in forms & _TIMES.keys():
        yield from (f"{day}{_TIMES[form]}" for day in _DAYS)
    spelled = [*sources, *(one for pattern in patterns for one in _conditions(pattern))]
    if spelled:
        high = min((node["maxLength"] for node in nodes if "maxLength" in node), default=_LONGEST)
        yield from shortest_of_all(tuple(dict.fromkeys(spelled)), low, int(min(high, _LONGEST)))
    for pattern in (*sources, *patterns):
        text = shortest(pattern, ecma=pattern in patterns)
        if text is not None:
            yield text
            short = low - len(text)
            if short > 0:
                yield from (text[:at] + char * short + text[at:] for at, char in enumerate(text[:_LISTED]))
                yield from (text + "0" * short, "0" * short + text)
    yield "a" * low
    yield from (f"{number:0>{max(1, low)}}" for number in range(_LISTED))


def _conditions(pattern: str) -> Iterator[str]:
    """`pattern` and its positive look-aheads as conditions, in the syntax of lowered schemas."""
    rest = pattern
    while ahead := _AHEAD.match(rest):
        if ahead[1] == "=":
            yield from _conditions(f"^{ahead[2]}")
        rest = "^" + rest[ahead.end() :]
    try:
        spelled = spell(rest).rust
    except BadConstraint:
        return
    if spelled is not None:
        yield spelled


@lru_cache(maxsize=256)
def shortest(pattern: str, *, ecma: bool = True) -> str | None:
    """The shortest text in which `pattern` matches, if found. ecma: it is a schema's, else of `formats`."""
    try:
        spelled = spell(pattern).rust if ecma else pattern
        if spelled is None:
            return None
        return ShortestEnds(compile_node(search_language(spelled), LIMITS)).text(0).decode()
    except (BadConstraint, UnicodeDecodeError):
        return None
