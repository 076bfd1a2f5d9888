"""Schemas as people write them: every draft, every keyword, noise and all; and instances near to valid ones.

`Wild(random)` draws a schema and values for it; `oracle()` judges by the jsonschema library, with patterns
and formats judged by tables of its own, so that nothing of the product stands on both sides.
"""

from __future__ import annotations

import copy
import random
import re
from collections.abc import Iterator
from decimal import Decimal, localcontext
from typing import Any

import jsonschema
from jsonschema.exceptions import ValidationError

DRAFTS: dict[int, tuple[str, Any]] = {
    4: ("http://json-schema.org/draft-04/schema#", jsonschema.Draft4Validator),
    6: ("http://json-schema.org/draft-06/schema#", jsonschema.Draft6Validator),
    7: ("http://json-schema.org/draft-07/schema#", jsonschema.Draft7Validator),
    2019: ("https://json-schema.org/draft/2019-09/schema", jsonschema.Draft201909Validator),
    2020: ("https://json-schema.org/draft/2020-12/schema", jsonschema.Draft202012Validator),
}
PATTERNS: dict[str, str] = {  # ECMA -> the same for Python
    r"^[a-z]+$": r"^[a-z]+\Z",
    r"^\d{3}-\d{4}$": r"^[0-9]{3}-[0-9]{4}\Z",
    r"\d": r"[0-9]",
    r"\w+\s\w+": r"[0-9A-Za-z_]+\s[0-9A-Za-z_]+",
    r"^(?!foo)": r"^(?!foo)",
    r"^(?!.*bar$)[a-z]*": r"^(?!.*bar\Z)[a-z]*",
    r"^(?=.*[0-9])(?=.*[a-z]).{2,8}$": r"^(?=.*[0-9])(?=.*[a-z]).{2,8}\Z",
    r"^(a|b)\1$": r"^(a|b)\1\Z",
    r"^\p{Lu}": r"^[A-ZÉÜ]",
    r"^x-": r"^x-",
    r"^[A-Z]{2}(-[a-z]{2})?$": r"^[A-Z]{2}(-[a-z]{2})?\Z",
    r"^(\([0-9]{3}\))?[0-9]{3}-[0-9]{4}$": r"^(\([0-9]{3}\))?[0-9]{3}-[0-9]{4}\Z",
    r"^$|^[0-9]+$": r"^\Z|^[0-9]+\Z",
    r"é|ü": r"é|ü",
    r"^\S+$": r"^\S+\Z",
    r"^.*$": r"^[^\n\r\u2028\u2029]*\Z",
    r"^https?://": r"^https?://",
    r"^[^/]+/[^/]+$": r"^[^/]+/[^/]+\Z",
    r"\bfoo\b": r"(?a:\b)foo(?a:\b)",
    r"^v?\d+\.\d+(\.\d+)?$": r"^v?[0-9]+\.[0-9]+(\.[0-9]+)?\Z",
    r"": r"",
    r"a{2}": r"a{2}",
    r"^[\w.-]+$": r"^[0-9A-Za-z_.\-]+\Z",
}
NAME_PATTERNS = ["^x-", r"^[a-z]+$", r"\d", r"^\S+$", "", r"^.*$", r"^(?!foo)", r"^[\w.-]+$", "é|ü"]
STRINGS = [
    "", "a", "ab", "aa", "foo", "foobar", "x-y", "bar", "abc1", "123-4567", "Éa", "é", "A", "US-en", "US",
    "1", "(123)123-4567", "hello world", "https://a.b/c", "a/b", "v1.2", "1.2.3", 'q"\\', "x\ny", "\t",
    "null", "1.0", "a foo b", "😀", "日本語テキスト", "a" * 40, "tab\tq", "ü/", "\u2028", "true",
    "__proto__", "١٢", "\x7f",
]  # fmt: skip
FORMATS: dict[str, tuple[list[str], list[str]]] = {
    "date": (["2020-02-29", "1999-12-31"], ["2019-02-29", "", "2020-13-01", "foo", "2020-1-1"]),
    "date-time": (["2020-01-01T00:00:00Z", "1990-12-31T23:59:60Z", "2020-01-01t10:11:12.5+01:00",
        "1998-12-31T15:59:60.123-08:00"],
        ["2020-01-01", "", "foo", "2020-01-01T25:00:00Z", "2020-01-01T00:00:00", "1998-12-31T22:59:60Z"]),
    "time": (["10:11:12Z", "23:59:60Z", "01:29:60+01:30"], ["", "10:11:12", "24:00:00Z", "a", "22:59:60Z"]),
    "duration": (["P1D", "PT1H", "P4Y", "P1W"], ["", "P", "PT", "1D", "P1D2H", "P1YT"]),
    "email": (["a@b.co", "joe.b+c@example.com"], ["", "a", "@b", "a@", ".a@b.co", "a..b@c.d"]),
    "idn-email": (["a@b.co", "실례@실례.테스트"], ["", "foo", "@b"]),
    "hostname": (["a", "example.com", "a-b.c1"], ["", "-a", "a-", "a_b", "a..b", "a" * 64, "é"]),
    "idn-hostname": (["a", "example.com", "실례.테스트"], ["-a", "a..b", "〮실례.테스트", "a" * 64]),
    "ipv4": (["1.2.3.4", "255.255.255.255"], ["", "1.2.3", "256.1.1.1", "01.2.3.4", "a"]),
    "ipv6": (["::1", "2001:db8::1", "::ffff:1.2.3.4"],
        ["", ":", "1.2.3.4", "::g", "12345::", "fe80::1%eth0"]),
    "uri": (["http://a.b/c?d#e", "urn:a:b", "mailto:a@b.c"], ["", "a", "/a/b", "http://a b", "//x/y", "é:"]),
    "uri-reference": (["", "a", "/a/b", "http://a.b", "#x"], ["a b", "\\\\a", "#a\\b", "é"]),
    "iri": (["http://é.b/ü", "http://a.b/c"], ["", "a", "http://a b", "http://[::g]/"]),
    "iri-reference": (["", "é", "/a"], ["a b", "\\\\a"]),
    "uri-template": (["", "http://a/{b}", "{+x}/c"], ["{", "a{b", "{}}"]),
    "uuid": (["2eb8aa08-aa98-11ea-b4aa-73b441d16380"], ["", "a", "2eb8aa08aa9811eab4aa73b441d16380"]),
    "json-pointer": (["", "/a~0b", "/a/0"], ["a", "/~", "#/a"]),
    "relative-json-pointer": (["0", "1/a", "0#"], ["", "/a", "-1", "01/a"]),
    "regex": (["a*", "^(a|b)$", ""], ["(", "[a", "a**", "\\"]),
}  # fmt: skip
UNKNOWN_FORMATS = ["int32", "int64", "float", "double", "byte", "password", "binary", "non-blank", "currency",
    "phone", "html", "markdown", "color", "textarea", "x"]  # fmt: skip
NAMES = ["id", "name", "type", "value", "items", "a", "b", "x-y", "foo", "é", "v1", "$ref", "enum", "c d",
    "properties", "a/b", "c~d", 'q"', "address", "", "1", "default", "length", "back\\slash"]  # fmt: skip
NUMBERS: list[Any] = [0, 1, -1, 2, 3, 5, 10, 100, 0.5, 1.5, -2.25, 0.1, 0.3, 1.0, 1e3, 1e-7,
    12345678901234567890,    9007199254740993, -0.0, 99.99, 4.02, 1e20, 7]  # fmt: skip
TYPES = ["null", "boolean", "integer", "number", "string", "array", "object"]


class Unjudged(Exception):
    """The tables do not know."""


def _pattern(validator: Any, pattern: str, value: Any, schema: Any) -> Iterator[ValidationError]:
    if isinstance(value, str) and not re.search(PATTERNS[pattern], value):
        yield ValidationError("pattern")


def _format(validator: Any, name: str, value: Any, schema: Any) -> Iterator[ValidationError]:
    if isinstance(value, str) and name in FORMATS:
        good, bad = FORMATS[name]
        if value in bad:
            yield ValidationError("format")
        elif value not in good:
            raise Unjudged(name)


def _names(validator: Any, patterns: Any, value: Any, schema: Any) -> Iterator[ValidationError]:
    for pattern, inner in patterns.items() if isinstance(value, dict) else ():
        for name in value:
            if re.search(PATTERNS[pattern], name):
                yield from validator.descend(value[name], inner)


def _others(validator: Any, inner: Any, value: Any, schema: Any) -> Iterator[ValidationError]:
    for name in value if isinstance(value, dict) else ():
        named = name in schema.get("properties", {})
        if not named and not any(re.search(PATTERNS[p], name) for p in schema.get("patternProperties", {})):
            yield from validator.descend(value[name], inner)


def _multiple(validator: Any, divisor: Any, value: Any, schema: Any) -> Iterator[ValidationError]:
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        with localcontext() as context:
            context.prec = 400
            if Decimal(repr(value)) % Decimal(repr(divisor)):
                yield ValidationError("multipleOf")


def _dependencies(validator: Any, named: Any, value: Any, schema: Any) -> Iterator[ValidationError]:
    """Held in every draft, as the suite of compatibility tests has it."""
    for name, needs in named.items() if isinstance(value, dict) else ():
        if name in value and isinstance(needs, list):
            yield from (ValidationError("dependencies") for other in needs if other not in value)
        elif name in value:
            yield from validator.descend(value, needs)


_OWN = {
    "dependencies": _dependencies, "pattern": _pattern, "format": _format, "patternProperties": _names,
    "additionalProperties": _others,
    "multipleOf": _multiple}  # fmt: skip


def draft_of(schema: Any) -> int:
    name = schema.get("$schema") if isinstance(schema, dict) else None
    return next(
        (draft for draft, (uri, _) in DRAFTS.items() if uri.rstrip("#") == str(name).rstrip("#")), 2020
    )


def _rest_of_items(validator: Any, *rest: Any) -> Iterator[ValidationError]:
    """Of draft 2019-09. The library takes `items` for a list there, also where it is true or false."""
    try:
        yield from jsonschema.Draft201909Validator.VALIDATORS["unevaluatedItems"](validator, *rest)
    except TypeError as error:
        raise Unjudged from error


# The library's own of draft 2019-09 takes names that additionalProperties judges for not judged.
_OF_2019 = {
    "unevaluatedItems": _rest_of_items,
    "unevaluatedProperties": jsonschema.Draft202012Validator.VALIDATORS["unevaluatedProperties"],
}


def oracle(schema: Any) -> Any:
    """A validator with `is_valid`, which raises Unjudged where a format's table does not know the text, or
    the library does not know better."""
    draft = draft_of(schema)
    own = _OWN | (_OF_2019 if draft == 2019 else {})
    return jsonschema.validators.extend(DRAFTS[draft][1], own)(schema)


class Wild:
    """One schema: `schema`. value() draws for it, near() spoils a value."""

    def __init__(self, pick: random.Random, size: int = 12) -> None:
        self.pick, self.left = pick, size
        self.draft = pick.choice([4, 4, 7, 7, 6, 2019, 2020, 2020, 2020])
        self.defs = "definitions" if self.draft <= 7 else pick.choice(["$defs", "definitions"])
        self.known = [
            pick.choice(["item", "node", "a b", "x/y", "Tree", "p~q"]) + str(i)
            for i in range(pick.randint(0, 3))
        ]
        self.depth = 0
        root = self.node()
        if not isinstance(root, dict):
            root = {}
        if self.pick.random() < 0.6 and "$ref" not in root and "type" not in root:
            root = {**self.object(), **root}
        if self.known:
            root[self.defs] = {name: self.node() for name in self.known}
        uri = DRAFTS[self.draft][0]
        if self.draft != 2020 or pick.random() < 0.4:
            root = {"$schema": uri.rstrip("#") if pick.random() < 0.2 else uri, **root}
        if pick.random() < 0.2:
            root["id" if self.draft == 4 else "$id"] = "http://example.com/root.json"
        self.schema = root

    def some(self, chance: float = 0.3) -> bool:
        return self.pick.random() < chance

    def node(self) -> Any:
        self.left -= 1
        self.depth += 1
        try:
            return self._node()
        finally:
            self.depth -= 1

    def _node(self) -> Any:
        pick = self.pick
        if self.left <= 0 or self.depth > 5:
            return self.leaf()
        kind = pick.choices(
            [self.object, self.array, self.leaf, self.ref, self.combine, self.untyped], [6, 3, 6, 3, 3, 1]
        )[0]
        node = kind()
        if isinstance(node, dict) and self.some(0.25):
            node = self.noise(node)
        if isinstance(node, dict) and "$ref" not in node and self.some(0.12):
            node.update(self.combine())
        return node

    def noise(self, node: dict[str, Any]) -> dict[str, Any]:
        words: dict[str, Any] = {"title": "T", "description": "what it is", "default": None,
            "examples": [1, "a"], "$comment": "c", "x-order": 3, "readOnly": True, "deprecated": False,
            "discriminator": {"propertyName": "type"}, "contentEncoding": "base64", "nullable": True,
            "contentMediaType": "application/json", "example": {},
            "javaType": "int", "media": {"type": "x"}, "required_": 1, "optional": True}  # fmt: skip
        name = self.pick.choice(list(words))
        return {name: words[name], **node}

    def ref(self) -> Any:
        if not self.known:
            return {"$ref": "#"} if self.some(0.1) else self.leaf()
        name = (
            self.pick.choice(self.known)
            .replace("~", "~0")
            .replace("/", "~1")
            .replace(" ", self.pick.choice([" ", "%20"]))
        )
        node: dict[str, Any] = {"$ref": f"#/{self.defs}/{name}"}
        if self.some(0.2):
            node.update(self.pick.choice([self.object, self.leaf_dict, lambda: {"description": "d"}])())
        return node

    def leaf_dict(self) -> dict[str, Any]:
        node = self.leaf()
        return node if isinstance(node, dict) else {}

    def leaf(self) -> Any:
        pick = self.pick
        what = pick.choices(
            ["string", "number", "enum", "const", "type", "types", "bool", "empty"], [8, 5, 4, 2, 3, 2, 1, 1]
        )[0]
        match what:
            case "string":
                return self.string()
            case "number":
                return self.number()
            case "enum":
                values = pick.sample(
                    [*STRINGS, *NUMBERS, None, True, False, [1, "a"], {"a": 1}], pick.randint(1, 5)
                )
                if self.some(0.6):
                    values = pick.sample(STRINGS, pick.randint(1, 6))
                node: dict[str, Any] = {"enum": values}
                if all(isinstance(value, str) for value in values) and self.some():
                    node["type"] = "string"
                return node
            case "const" if self.draft > 4:
                return {"const": pick.choice([*STRINGS, *NUMBERS, None, True, {"k": [1]}, [], {}])}
            case "type":
                return {"type": pick.choice(TYPES)}
            case "types":
                return {"type": pick.sample(TYPES, pick.randint(1, 3))}
            case "bool" if self.draft > 4:
                return self.some(0.8)
            case _:
                return {}

    def string(self) -> dict[str, Any]:
        node: dict[str, Any] = {"type": "string"} if self.some(0.85) else {}
        if self.some(0.3):
            node["pattern"] = self.pick.choice(list(PATTERNS))
        if self.some(0.25):
            node["minLength"] = self.pick.choice([0, 1, 2, 3, 1.0])
        if self.some(0.25):
            node["maxLength"] = self.pick.choice([3, 5, 10, 40, 255, 65535])
        if self.some(0.25):
            node["format"] = self.pick.choice([*FORMATS, *UNKNOWN_FORMATS])
        return node

    def number(self) -> dict[str, Any]:
        pick = self.pick
        node: dict[str, Any] = {"type": pick.choice(["integer", "number", ["number", "null"]])}
        for side, low, high in (("Minimum", -3, 3), ("Maximum", 2, 100)):
            if self.some(0.3):
                node[side.lower()] = pick.choice([pick.randint(low, high), pick.randint(low, high) + 0.5, 0])
                if self.draft == 4 and self.some():
                    node[f"exclusive{side}"] = self.some(0.5)
            if self.draft > 4 and self.some(0.12):
                node[f"exclusive{side}"] = pick.randint(low, high)
        if self.some(0.15):
            node["multipleOf"] = pick.choice([1, 2, 5, 0.5, 0.01, 0.1, 1.0, 1e-7])
        return node

    def object(self) -> dict[str, Any]:
        pick = self.pick
        node: dict[str, Any] = {"type": "object"} if self.some(0.9) else {}
        names = pick.sample(NAMES, pick.randint(0, 5))
        if names:
            node["properties"] = {name: self.node() for name in names}
        if self.some(0.6) and (names or self.draft > 4):
            node["required"] = pick.sample(names, pick.randint(0, len(names))) + (
                ["other"] if self.some(0.05) else []
            )
            if self.draft == 4 and not node["required"]:
                del node["required"]
        if self.some(0.4):
            node["additionalProperties"] = (
                False if self.some(0.6) else True if self.some(0.3) else self.node()
            )
        if self.some(0.15):
            node["patternProperties"] = {
                name: self.node() for name in pick.sample(NAME_PATTERNS, pick.randint(1, 3))
            }
        if self.some(0.06):
            node["minProperties"] = pick.randint(0, 3)
        if self.some(0.06):
            node["maxProperties"] = pick.randint(1, 4)
        if self.draft > 4 and self.some(0.08):
            node["propertyNames"] = pick.choice(
                [
                    {"pattern": pick.choice(NAME_PATTERNS)},
                    {"maxLength": 4},
                    {"enum": names or ["a"]},
                    self.node(),
                ]
            )
        if self.some(0.08) and names:
            one, other = pick.choice(names), pick.choice(names)
            words = (
                ["dependencies"]
                if self.draft <= 7
                else ["dependentRequired", "dependentSchemas", "dependencies"]
            )
            word = pick.choice(words)
            needs: Any = (
                [other]
                if word == "dependentRequired" or (word == "dependencies" and self.some(0.5))
                else self.node()
            )
            node[word] = {one: needs}
        # Of a schema under additionalProperties the reference (2019-09) takes keywords for names.
        closed = isinstance(node.get("additionalProperties", True), bool)
        if self.draft >= 2019 and closed and self.some(0.08):
            node["unevaluatedProperties"] = self.node() if self.some() else False
        return node

    def array(self) -> dict[str, Any]:
        pick = self.pick
        node: dict[str, Any] = {"type": "array"} if self.some(0.9) else {}
        if self.some(0.75):
            node["items"] = self.node()
        if self.some(0.15):
            several = [self.node() for _ in range(pick.randint(1, 3))]
            if self.draft >= 2020:
                node["prefixItems"] = several
            else:
                node["items"] = several
                if self.some(0.5):
                    node["additionalItems"] = self.node() if self.draft > 4 or self.some(0.5) else False
        if self.some(0.25):
            node["minItems"] = pick.choice([0, 1, 1, 2, 3])
        if self.some(0.2):
            node["maxItems"] = pick.choice([1, 2, 3, 10])
        if self.some(0.12):
            node["uniqueItems"] = self.some(0.8)
        if self.draft > 4 and self.some(0.08):
            node["contains"] = self.node()
            if self.draft >= 2019 and self.some(0.5):
                node[pick.choice(["minContains", "maxContains"])] = pick.randint(0, 2)
        if self.draft >= 2019 and self.some(0.06):
            node["unevaluatedItems"] = self.node() if self.some() else False
        return node

    def combine(self) -> dict[str, Any]:
        pick = self.pick
        word = pick.choices(["anyOf", "oneOf", "allOf", "not", "if"], [4, 4, 3, 2, 2])[0]
        if word == "not":
            return {"not": pick.choice([self.node, lambda: {"required": [pick.choice(NAMES)]}, self.leaf])()}
        if word == "if":
            node = {
                "if": pick.choice(
                    [self.node, lambda: {"properties": {"type": {"enum": ["a"]}}, "required": ["type"]}]
                )()
            }
            if self.some(0.8):
                node["then"] = self.node()
            if self.some(0.5):
                node["else"] = self.node()
            return node
        if self.some(0.2):
            return {word: [{"required": [name]} for name in pick.sample(NAMES, 2)]}
        return {word: [self.node() for _ in range(pick.randint(1, 3))]}

    def untyped(self) -> dict[str, Any]:
        node = {**self.leaf_dict(), **self.object(), **self.array()}
        node.pop("type", None)
        return node

    def value(self) -> Any:
        return self._value(self.schema, 0)

    def any(self, depth: int) -> Any:
        pick = self.pick
        kind = pick.randint(0, 7 if depth < 3 else 4)
        if kind < 3:
            return pick.choice(STRINGS)
        if kind < 5:
            return pick.choice([*NUMBERS, None, True, False])
        if kind < 6:
            return [self.any(depth + 1) for _ in range(pick.randint(0, 3))]
        return {name: self.any(depth + 1) for name in pick.sample(NAMES, pick.randint(0, 3))}

    def _value(self, node: Any, depth: int) -> Any:
        pick = self.pick
        if not isinstance(node, dict) or depth > 6:
            return self.any(depth)
        reference = node.get("$ref")
        if isinstance(reference, str):
            target: Any = self.schema
            for step in reference[1:].split("/")[1:]:
                target = target[step.replace("%20", " ").replace("~1", "/").replace("~0", "~")]
            return self._value(target, depth + 1)
        if "const" in node:
            return copy.deepcopy(node["const"])
        if "enum" in node:
            return copy.deepcopy(pick.choice(node["enum"]))
        several = [node.get(word) for word in ("anyOf", "oneOf", "allOf") if node.get(word)]
        if isinstance(node.get("then"), dict):
            several.append([node["then"]])
        base: Any = None
        if several:
            base = self._value(pick.choice(pick.choice(several)), depth + 1)
        kinds = node.get("type", [])
        kinds = kinds if isinstance(kinds, list) else [kinds]
        if not kinds:
            hints = (("object", ("properties", "required", "patternProperties")),
                ("array", ("items", "prefixItems", "contains")),
                ("string", ("pattern", "format")))  # fmt: skip
            kinds = [kind for kind, words in hints if any(word in node for word in words)]
            if not kinds:
                return base if several else self.any(depth)
        match pick.choice(kinds):
            case "object":
                out = dict(base) if isinstance(base, dict) else {}
                for name in node.get("required", []):
                    out.setdefault(name, self.any(depth))
                for name, inner in node.get("properties", {}).items():
                    if name in node.get("required", []) or self.some(0.5):
                        out[name] = self._value(inner, depth + 1)
                if self.some(0.3):
                    out.setdefault(pick.choice(NAMES), self.any(depth))
                if self.some(0.5):
                    several_items = list(out.items())
                    pick.shuffle(several_items)
                    out = dict(several_items)
                return out
            case "array":
                items = node.get("items", True)
                count = max(int(node.get("minItems", 0)), pick.randint(0, 3))
                first = items if isinstance(items, list) else node.get("prefixItems", [])
                rest = node.get("additionalItems", True) if isinstance(items, list) else items
                return [self._value(first[at] if at < len(first) else rest, depth + 1) for at in range(count)]
            case "string":
                if node.get("format") in FORMATS:
                    return pick.choice(pick.choice(FORMATS[node["format"]]))
                fits = [text for text in STRINGS if len(text) >= node.get("minLength", 0)
                    and len(text) <= node.get("maxLength", 99)
                    and re.search(PATTERNS[node.get("pattern", "")], text)]  # fmt: skip
                return pick.choice(fits or STRINGS)
            case "integer":
                return pick.choice([number for number in NUMBERS if number % 1 == 0])
            case "number":
                return pick.choice(NUMBERS)
            case kind:
                return self.some(0.5) if kind == "boolean" else None

    def near(self, value: Any) -> Any:
        """`value` with one place changed."""
        pick = self.pick
        if isinstance(value, dict) and value and self.some(0.8):
            out = dict(value)
            name = pick.choice(list(out))
            match pick.randint(0, 3):
                case 0:
                    del out[name]
                case 1:
                    out[pick.choice(NAMES)] = self.any(2)
                case _:
                    out[name] = self.near(out[name])
            return out
        if isinstance(value, list) and value and self.some(0.8):
            at = pick.randrange(len(value))
            return pick.choice([value[:at] + value[at + 1 :], [*value, self.any(2)], [*value, value[at]],
                [*value[:at], self.near(value[at]), *value[at + 1 :]]])  # fmt: skip
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            return pick.choice([value + 1, value - 1, value + 0.5, -value, str(value), value * 2])
        if isinstance(value, str):
            return pick.choice([value + "a", value[:-1], value * 2, pick.choice(STRINGS), None])
        return self.any(1)
