"""SchemaDocument: one schema, its draft, and what its references mean.

Places are tuples of the keys and indices that lead to them from the root. It knows which keywords hold
schemas, not what they assert.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple
from urllib.parse import unquote, urldefrag, urljoin

from runtime.protocol.errors import BadConstraint, UnsupportedConstraint

Place = tuple[str | int, ...]

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
IN_PLACE = (
    "$ref", "$dynamicRef", "$recursiveRef", "allOf", "anyOf", "oneOf", "not", "if", "then", "else",
    "dependentSchemas",
)  # fmt: skip
"""Keywords whose schemas are for the same value as the one they stand in."""
_BASE = "http://root.invalid/"


class Target(NamedTuple):
    """Where a reference leads. `node` is the schema there, `base` the URI its own references start from."""

    place: Place
    node: Any
    base: str


def show(place: Place) -> str:
    """A place as a JSON pointer with a leading `#`."""
    return "#" + "".join("/" + str(part).replace("~", "~0").replace("/", "~1") for part in place)


def mistake(text: str, place: Place) -> BadConstraint:
    return BadConstraint(text, where=f"{KIND} {show(place)}")


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
    """The draft of a metaschema; None where it is nobody's. Its address is written with either scheme."""
    if name.startswith("http://json-schema.org/draft/"):
        name = name.replace("http://", "https://", 1)
    elif name.startswith("https://json-schema.org/draft-"):
        name = name.replace("https://", "http://", 1)
    return _DRAFTS.get(name.removesuffix("#"))


def is_metaschema(uri: str) -> bool:
    return urldefrag(uri)[0].removesuffix("#") in _DRAFTS


class SchemaDocument:
    """`root` as parsed JSON, taken over: the draft it names counts for the whole of it, and `$schema`
    goes. formats: whether `format` asserts; where it does not it goes, too. `told`: what has no effect.
    Raises UnsupportedConstraint where a part is of another draft."""

    def __init__(self, root: Any, *, formats: bool = True) -> None:
        self.root = root
        self.draft = draft_of(root)
        self._id = "id" if self.draft <= 4 else "$id"
        self._resources: dict[str, Place] = {}
        self._anchors: dict[str, Place] = {}
        self._bases: dict[Place, str] = {}
        self.dynamic_anchors: dict[str, int] = {}
        self._resources[_BASE] = ()
        self._index((), root, _BASE)
        self.scoped = False
        """Whether some reference leads to one of several schemas, depending on the way to it."""
        self.told: list[str] = []
        for place, node in self.objects():
            self._leave_draft(place, node)
            if not formats and isinstance(node.get("format"), str):
                self.told.append(f"format {node.pop('format')!r} at {show(place)} (an annotation here)")
            for word in ("$dynamicRef", "$recursiveRef"):
                anchor = str(node.get(word, "")).partition("#")[2]
                self.scoped |= word in node and self.dynamic_anchors.get(anchor, 0) > 1

    def _leave_draft(self, place: Place, node: dict[str, Any]) -> None:
        """Take `$schema` out. Without an identifier beside it, it means nothing but at the root (2020-12,
        8.1.1); a metaschema that is not known is taken to have all vocabularies (8.1.2)."""
        name = node.pop("$schema", None)
        if not isinstance(name, str):
            return
        own = _known_draft(name)
        if place == () and own is None:
            self.told.append(f"$schema {name[:200]!r}, which is not known: read as draft {DEFAULT_DRAFT}-12")
        if place != () and own is not None and own != self.draft and isinstance(node.get(self._id), str):
            raise UnsupportedConstraint(
                f"$schema {name!r} is of another draft than the whole, and one document is read by one draft",
                where=f"{KIND} {show(place)}",
                hint="write this part in the draft of the whole",
            )

    def subschemas(self, node: Mapping[str, Any]) -> Iterator[tuple[Place, Any]]:
        """The schemas right under a schema, with the steps that lead to them."""
        for name in node:
            value = node[name]
            if name in ONE:
                yield (name,), value
            elif name in LISTS and isinstance(value, list):
                yield from (((name, index), item) for index, item in enumerate(value))
            elif name in MAPS and isinstance(value, Mapping):
                yield from (((name, key), item) for key, item in value.items())
            elif name == "items":
                if isinstance(value, list):
                    yield from (((name, index), item) for index, item in enumerate(value))
                else:
                    yield (name,), value
            elif name == "dependencies" and isinstance(value, Mapping):
                yield from (((name, key), item) for key, item in value.items() if not isinstance(item, list))

    def _index(self, place: Place, node: Any, base: str) -> None:
        if not isinstance(node, Mapping):
            return
        base = self._enter(place, node, base)
        self._bases[place] = base
        if self.alone(node):
            return
        for name in ("$anchor", "$dynamicAnchor"):
            anchor = node.get(name)
            if isinstance(anchor, str) and self.draft >= 2019:
                self._anchors[f"{base}#{anchor}"] = place
                if name == "$dynamicAnchor":
                    self.dynamic_anchors[anchor] = self.dynamic_anchors.get(anchor, 0) + 1
        if node.get("$recursiveAnchor") is True:
            self.dynamic_anchors[""] = self.dynamic_anchors.get("", 0) + 1
        for steps, inner in self.subschemas(node):
            self._index(place + steps, inner, base)

    def objects(self) -> Iterator[tuple[Place, dict[str, Any]]]:
        """Every schema object that a reference or a keyword leads to, with its place."""
        waiting: list[tuple[Place, Any]] = [((), self.root)]
        met: set[Place] = {()}
        while waiting:
            place, node = waiting.pop()
            if not isinstance(node, dict):
                continue
            yield place, node
            after = (
                [] if self.alone(node) else [(place + steps, inner) for steps, inner in self.subschemas(node)]
            )
            for word in ("$ref", "$dynamicRef", "$recursiveRef"):
                reference = node.get(word)
                if isinstance(reference, str) and (target := self.resolve(reference, self.base_at(place))):
                    after.append((target.place, target.node))
            for step in after:
                if step[0] not in met:
                    met.add(step[0])
                    waiting.append(step)

    def alone(self, node: Mapping[str, Any]) -> bool:
        """Whether a $ref hides its siblings here, as it did before 2019-09."""
        return self.draft <= 7 and isinstance(node.get("$ref"), str)

    def _enter(self, place: Place, node: Mapping[str, Any], base: str) -> str:
        """The base URI inside of `node`; its identifiers are remembered."""
        name = node.get(self._id)
        if not isinstance(name, str) or self.alone(node):
            return base
        uri, fragment = _join(base, name)
        if fragment and self.draft <= 7:
            self._anchors[f"{uri}#{fragment}"] = place
            if name.startswith("#"):
                return base
        self._resources.setdefault(uri, place)
        return uri

    def base_at(self, place: Place) -> str:
        """The base URI of the schema at `place`, wherever it is."""
        for end in range(len(place), -1, -1):
            if place[:end] in self._bases:
                return self._bases[place[:end]]
        return _BASE

    def resolve(self, reference: str, base: str) -> Target | None:
        """What `reference` means where `base` is the base URI; None if it is not in this document."""
        uri, fragment = _join(base, reference)
        start = self._resources.get(uri)
        if start is None and uri.endswith("#"):
            start = self._resources.get(uri[:-1])
        if start is None:
            return None
        if not fragment:
            return self._at(start)
        if fragment.startswith("/"):
            steps = [part.replace("~1", "/").replace("~0", "~") for part in unquote(fragment)[1:].split("/")]
            return self._follow(start, steps)
        place = self._anchors.get(f"{uri}#{unquote(fragment)}")
        return None if place is None else self._at(place)

    def _at(self, place: Place) -> Target | None:
        return self._follow((), list(place))

    def _follow(self, start: Place, steps: list[Any]) -> Target | None:
        node: Any = self.root
        for step in start:
            node = node[step]
        place = start
        for step in steps:
            if isinstance(node, Mapping) and step in node:
                place, node = (*place, step), node[step]
            elif isinstance(node, list) and str(step).isdigit() and int(step) < len(node):
                place, node = (*place, int(step)), node[int(step)]
            else:
                return None
        return Target(place, node, self.base_at(place))
