"""SchemaDocument: one schema as read from its text, its draft, and what its references mean. A path is the
tuple of keys and indices that lead to a subschema from the root.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, get_args
from urllib.parse import unquote, urldefrag, urljoin

from runtime.protocol.constraint import Constraint, SchemaFormat
from runtime.protocol.errors import BadConstraint, BadRequest, UnsupportedConstraint

SchemaPath = tuple[str | int, ...]
Paths = tuple[SchemaPath, ...]

KIND = "json_schema"
DEFAULT_DRAFT = 2020
_DRAFTS = {
    "http://json-schema.org/draft-03/schema": 4,  # read as draft 4, which replaced it
    "http://json-schema.org/draft-04/schema": 4,
    "http://json-schema.org/draft-06/schema": 6,
    "http://json-schema.org/draft-07/schema": 7,
    "https://json-schema.org/draft/2019-09/schema": 2019,
    "https://json-schema.org/draft/2020-12/schema": 2020,
}
ONE = (
    "additionalItems", "additionalProperties", "contains", "else", "if", "not", "propertyNames", "then",
    "unevaluatedItems", "unevaluatedProperties",
)  # fmt: skip
LISTS = ("allOf", "anyOf", "oneOf", "prefixItems")
MAPS = ("$defs", "definitions", "dependentSchemas", "patternProperties", "properties")
REFERENCES = ("$ref", "$dynamicRef", "$recursiveRef")
SAME_VALUE = (
    *REFERENCES, "allOf", "anyOf", "oneOf", "not", "if", "then", "else",
    "dependentSchemas",
)  # fmt: skip
"""Keywords whose schemas apply to the same value as the schema they are in."""
_SINCE = {
    "const": 6, "contains": 6, "propertyNames": 6, "if": 7, "then": 7, "else": 7, "dependentRequired": 2019,
    "dependentSchemas": 2019, "minContains": 2019, "maxContains": 2019, "unevaluatedItems": 2019,
    "unevaluatedProperties": 2019, "prefixItems": 2020, "$dynamicRef": 2020, "$recursiveRef": 2019,
}  # fmt: skip
_UNTIL = {"additionalItems": 2019, "$recursiveRef": 2019}
_BASE = "http://root.invalid/"


class Target(NamedTuple):
    """The target of a reference, and the schema there."""

    path: SchemaPath
    node: Any


def show(path: SchemaPath) -> str:
    """A path as a JSON pointer with a leading `#`."""
    return "#" + "".join("/" + str(part).replace("~", "~0").replace("/", "~1") for part in path)


def mistake(text: str, path: SchemaPath) -> BadConstraint:
    return BadConstraint(text, where=f"{KIND} {show(path)}")


def unsupported(text: str, path: SchemaPath, hint: str | None = None) -> UnsupportedConstraint:
    return UnsupportedConstraint(text, where=f"{KIND} {show(path)}", hint=hint)


def _join(base: str, reference: str) -> tuple[str, str]:
    """(URI, fragment) of a reference; urljoin by itself loses the base of an urn."""
    if reference.startswith("#") or not reference:
        return base, reference[1:]
    uri, fragment = urldefrag(urljoin(base, reference))
    return uri, fragment


def draft_of(schema: Any) -> int:
    name = schema.get("$schema") if isinstance(schema, Mapping) else None
    if not isinstance(name, str):
        return DEFAULT_DRAFT
    return _known_draft(name) or DEFAULT_DRAFT


def _known_draft(name: str) -> int | None:
    """The draft of a metaschema, or None. Its address may have either scheme."""
    if name.startswith("http://json-schema.org/draft/"):
        name = name.replace("http://", "https://", 1)
    elif name.startswith("https://json-schema.org/draft-"):
        name = name.replace("https://", "http://", 1)
    return _DRAFTS.get(name.removesuffix("#"))


def is_metaschema(uri: str) -> bool:
    return urldefrag(uri)[0].removesuffix("#") in _DRAFTS


def known(word: str, draft: int) -> bool:
    """Whether `word` has an effect in that draft."""
    return _SINCE.get(word, 0) <= draft <= _UNTIL.get(word, 9999)


class SchemaDocument:
    """`root` as parsed JSON, taken over; `$schema` is removed, and `format` unless it asserts (`formats`).
    `ignored`: what has no effect. Raises UnsupportedConstraint if a part is of another draft."""

    def __init__(self, root: Any, *, formats: bool = True) -> None:
        self.root = root
        self.draft = draft_of(root)
        self._id = "id" if self.draft <= 4 else "$id"
        self._resources: dict[str, SchemaPath] = {}
        self._anchors: dict[str, SchemaPath] = {}
        self._bases: dict[SchemaPath, str] = {}
        self.dynamic_anchors: dict[str, int] = {}
        self._resources[_BASE] = ()
        self._index((), root, _BASE)
        self.objects: dict[SchemaPath, dict[str, Any]] = {}
        """Every schema object that a reference or a keyword leads to."""
        self.targets: dict[SchemaPath, dict[str, Target]] = {}
        """The targets of the references of each of them, by keyword, those that are in this document."""
        self.parts: dict[SchemaPath, list[SchemaPath]] = {}
        """The direct subschemas of each of them."""
        self._enter_objects()
        self.scoped = False
        """Whether some reference leads to one of several schemas, depending on the way to it."""
        self.ignored: list[str] = []
        for path, node in self.objects.items():
            self._leave_draft(path, node)
            if not formats and isinstance(node.get("format"), str):
                self.ignored.append(f"format {node.pop('format')!r} at {show(path)} (an annotation here)")
            for word in REFERENCES[1:]:
                anchor = str(node.get(word, "")).partition("#")[2]
                self.scoped |= word in node and self.dynamic_anchors.get(anchor, 0) > 1

    def _leave_draft(self, path: SchemaPath, node: dict[str, Any]) -> None:
        """Remove `$schema`. Without an identifier it counts only at the root (2020-12, 8.1.1); an unknown
        metaschema is assumed to have all vocabularies (8.1.2)."""
        name = node.pop("$schema", None)
        if not isinstance(name, str):
            return
        draft = _known_draft(name)
        if path == () and draft is None:
            self.ignored.append(
                f"$schema {name[:200]!r}, which is not known: read as draft {DEFAULT_DRAFT}-12"
            )
        if path != () and draft not in (None, self.draft) and isinstance(node.get(self._id), str):
            text = (
                f"$schema {name!r} is of another draft than the whole, and one document is read by one draft"
            )
            raise unsupported(text, path, "write this part in the draft of the whole")

    def subschemas(self, node: Mapping[str, Any]) -> Iterator[tuple[SchemaPath, Any]]:
        """The direct subschemas of a schema, with the steps that lead to them."""
        for name, value in node.items():
            if not known(name, self.draft):
                continue
            if name in ONE or (name == "items" and not isinstance(value, list)):
                yield (name,), value
            elif (name in LISTS or name == "items") and isinstance(value, list):
                yield from (((name, index), item) for index, item in enumerate(value))
            elif name in MAPS and isinstance(value, Mapping):
                yield from (((name, key), item) for key, item in value.items())
            elif name == "dependencies" and isinstance(value, Mapping):
                yield from (((name, key), item) for key, item in value.items() if not isinstance(item, list))

    def _index(self, path: SchemaPath, node: Any, base: str) -> None:
        if not isinstance(node, Mapping):
            return
        base = self._enter(path, node, base)
        self._bases[path] = base
        if self.alone(node):
            return
        for name in ("$anchor", "$dynamicAnchor"):
            anchor = node.get(name)
            if isinstance(anchor, str) and self.draft >= 2019:
                self._anchors[f"{base}#{anchor}"] = path
                if name == "$dynamicAnchor":
                    self.dynamic_anchors[anchor] = self.dynamic_anchors.get(anchor, 0) + 1
        if node.get("$recursiveAnchor") is True:
            self.dynamic_anchors[""] = self.dynamic_anchors.get("", 0) + 1
        for steps, inner in self.subschemas(node):
            self._index(path + steps, inner, base)

    def reachable(self) -> Iterator[tuple[SchemaPath, dict[str, Any]]]:
        """The `objects` save those under `$defs` that no reference names."""
        waiting: list[SchemaPath] = [()]
        met: set[SchemaPath] = set()
        while waiting:
            path = waiting.pop()
            if path in self.objects and path not in met:
                met.add(path)
                yield path, self.objects[path]
                inside = ((inner, inner[len(path)]) for inner in self.parts[path])
                waiting += [inner for inner, word in inside if word not in ("$defs", "definitions")]
                waiting += [target.path for target in self.targets[path].values()]

    def _enter_objects(self) -> None:
        waiting: list[SchemaPath] = [()]
        while waiting:
            path = waiting.pop()
            node = self.node(path)
            if path not in self.objects and isinstance(node, dict):
                self.objects[path] = node
                self.targets[path] = {}
                for word in REFERENCES:
                    if isinstance(node.get(word), str) and known(word, self.draft):
                        target = self.resolve(node[word], path)
                        if target is not None:
                            self.targets[path][word] = target
                inside = () if self.alone(node) else self.subschemas(node)
                self.parts[path] = [path + steps for steps, _ in inside]
                waiting += self.parts[path]
                waiting += [target.path for target in self.targets[path].values()]

    def alone(self, node: Mapping[str, Any]) -> bool:
        """Whether a $ref hides its siblings here, as it did before 2019-09."""
        return self.draft <= 7 and isinstance(node.get("$ref"), str)

    def _enter(self, path: SchemaPath, node: Mapping[str, Any], base: str) -> str:
        """The base URI inside of `node`; its identifiers are remembered."""
        name = node.get(self._id)
        if not isinstance(name, str) or self.alone(node):
            return base
        uri, fragment = _join(base, name)
        if fragment and self.draft <= 7:
            self._anchors[f"{uri}#{fragment}"] = path
            if name.startswith("#"):
                return base
        self._resources.setdefault(uri, path)
        return uri

    def base_at(self, path: SchemaPath) -> str:
        """The base URI of the schema at `path`."""
        for end in range(len(path), -1, -1):
            if path[:end] in self._bases:
                return self._bases[path[:end]]
        return _BASE

    def resolve(self, reference: str, path: SchemaPath) -> Target | None:
        """The target of a reference in the schema at `path`; None if it is not in this document."""
        uri, fragment = _join(self.base_at(path), reference)
        start = self._resources.get(uri)
        if start is None and uri.endswith("#"):
            start = self._resources.get(uri[:-1])
        if start is None:
            return None
        if not fragment:
            return self._follow((), list(start))
        if fragment.startswith("/"):
            steps = [part.replace("~1", "/").replace("~0", "~") for part in unquote(fragment)[1:].split("/")]
            return self._follow(start, steps)
        anchor = self._anchors.get(f"{uri}#{unquote(fragment)}")
        return None if anchor is None else self._follow((), list(anchor))

    def node(self, path: SchemaPath) -> Any:
        """The schema at `path`, which must exist."""
        node: Any = self.root
        for step in path:
            node = node[step]
        return node

    def _follow(self, start: SchemaPath, steps: list[Any]) -> Target | None:
        node, path = self.node(start), start
        for step in steps:
            if isinstance(node, Mapping) and step in node:
                path, node = (*path, step), node[step]
            elif isinstance(node, list) and str(step).isdigit() and int(step) < len(node):
                path, node = (*path, int(step)), node[int(step)]
            else:
                return None
        return Target(path, node)


# -- reading a schema, and the layout of JSON

ANY_JSON = "$$ANY$$"
"""The schema of any JSON value, as requests for a plain JSON object spell it."""

WHITESPACE = {
    "compact": None,
    "single": r"[ ]",
    "flexible": r"(?:[ ]|\r?\n[ \t]{0,40})",
}
"""Policy -> what may come, at most once, wherever JSON allows whitespace; None = nothing."""

ESCAPES = 'nrbtf\\"'
"""One spelling for each character: `\\u0061` beside `a` would get a name past the schema for it."""

_MAX_NESTING = 100


def layout(whitespace: str) -> dict[str, Any]:
    """A policy as what llguidance reads under "x-guidance". Raises BadRequest for an unknown name."""
    if whitespace not in WHITESPACE:
        raise BadRequest(f"must be one of {', '.join(WHITESPACE)}, got {whitespace!r}", where="whitespace")
    pattern = WHITESPACE[whitespace]
    form = {"whitespace_flexible": False} if pattern is None else {"whitespace_pattern": pattern}
    return {"coerce_one_of": False, "lenient": False, "json_allowed_escapes": ESCAPES, **form}


def format_policy(name: str) -> str:
    """`name`, if it is a SchemaFormat. Raises BadRequest."""
    known = get_args(SchemaFormat)
    if name not in known:
        raise BadRequest(f"must be one of {', '.join(known)}, got {name!r}", where="schema_format")
    return name


def read_document(constraint: Constraint, policy: str) -> SchemaDocument:
    """The schema of a constraint. `policy`: of `format`, unless the constraint says. Raises BadConstraint."""
    asserts = (constraint.schema_format or policy) == "assertion"
    return SchemaDocument(read_schema(constraint.spec), formats=asserts)


def read_schema(spec: str) -> Any:
    """The schema in `spec`. Raises BadConstraint with the position of the mistake."""
    if spec == ANY_JSON:
        return True
    try:
        schema = json.loads(spec, parse_constant=_no_constant)
    except json.JSONDecodeError as error:
        text = f"is not JSON: {error.msg} at line {error.lineno}, column {error.colno}"
        raise BadConstraint(text, where=KIND) from None
    except (RecursionError, ValueError) as error:
        text = "is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise BadConstraint(text, where=KIND) from None
    if not isinstance(schema, (dict, bool)):
        raise BadConstraint("a schema is a JSON object or a boolean", where=KIND)
    _check(schema, (), _SURROGATE.search(spec) is not None)
    return schema


def _no_constant(name: str) -> Any:
    raise ValueError(f"holds {name}, which is not JSON")


_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]|[\ud800-\udfff]")
COMMENTS = {"$comment", "default", "description", "examples", "title"}


def _check(node: Any, path: SchemaPath, surrogates: bool) -> None:
    """Refuse nesting beyond the engine's own bound, which it reports without a path; and lone surrogates,
    which JSON can spell and no text contains."""
    if len(path) >= _MAX_NESTING:
        text = f"is nested more than {_MAX_NESTING} levels deep"
        raise BadConstraint(text, where=KIND, hint="use $defs and $ref")
    if isinstance(node, str):
        if surrogates and any("\ud800" <= char <= "\udfff" for char in node):
            raise unsupported("holds a lone surrogate, which no text has", path)
    elif isinstance(node, list):
        for number, inner in enumerate(node):
            _check(inner, (*path, number), surrogates)
    elif isinstance(node, dict):
        for name, inner in node.items():
            _check(name, path, surrogates)
            _check(inner, (*path, name), surrogates and name not in COMMENTS)
