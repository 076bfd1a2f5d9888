"""The lowering of one schema object, keyword by keyword: each is carried over, or expressed by others, if the
engine keeps that exactly, or else left to the validator.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from typing import Any

from runtime.grammar.automata.regex_syntax import rust_literal
from runtime.grammar.json_schema.document import (
    COMMENTS,
    KIND,
    REFERENCES,
    SAME_VALUE,
    SchemaDocument,
    SchemaPath,
    known,
    mistake,
    show,
)
from runtime.grammar.json_schema.lowering import Lowered, Lowering, Plan, Relaxation, Unspelled
from runtime.grammar.json_schema.shapes import between_multiples, canonical, leaves, shorter_within
from runtime.grammar.json_schema.texts.ecma import matches_pattern, spell, spellable
from runtime.grammar.json_schema.texts.formats import CHECKED, FORMATS, MAX_LENGTH

MAX_PATTERNS = 64
_EXACT = 2**53


def lower(
    document: SchemaDocument, relaxation: Relaxation, start: SchemaPath = (),
    dead: Container[SchemaPath] = (),
) -> Plan:  # fmt: skip
    """The plan for a whole document, or for the schema at `start` in it; nothing matches the schemas `dead`.
    Raises BadConstraint or UnsupportedConstraint with keyword and path."""
    return Lowering(document, relaxation, lambda *node: KeywordRules(*node).lower(), dead).run(start)


class KeywordRules:
    """The lowering of one schema object."""

    def __init__(self, lowering: Lowering, path: SchemaPath, node: Mapping[str, Any]) -> None:
        self._lowering, self._document = lowering, lowering.document
        self._relaxation = lowering.relaxation
        self._path, self._node = path, node
        self._all: list[Lowered] = []  # further conditions, all of which apply
        self._out: dict[str, Any] = {}
        self._names_kept = False

    def lower(self) -> Lowered:
        done = self._skipped() if self._relaxation.siblings else set()
        # In the order written, which decides the order of properties; what only adds to them comes last.
        for word in sorted(self._node, key=("propertyNames", "unevaluatedProperties").__contains__):
            rule = _RULES.get(word)
            if rule is None or rule in done or not known(word, self._document.draft):
                continue
            done.add(rule)
            if rule is not KeywordRules.property_conditions:
                rule(self)
        self.property_conditions()
        if self._all:
            self._out["allOf"] = [*self._out.get("allOf", []), *self._all]
        return self._out or True

    def _skipped(self) -> set[Rule]:
        """The rules that are left to the validator if this object combines conditions with a reference: the
        engine cannot join them when the reference leads back here."""
        joined = [word for word in ("anyOf", "oneOf", "allOf", "$ref") if self.has(word)]
        others = [word for word in self._node if word in _RULES and word not in joined and self.has(word)]
        if not joined or not (others or len(joined) > 1):
            return set()
        left = joined if "properties" in self._node or "items" in self._node else [*joined[1:], *others]
        self.leave(*left)
        return {_RULES[word] for word in left}

    def check(self, *keywords: str) -> None:
        self._lowering.check(self._path, *keywords)

    def has(self, word: str) -> bool:
        return word in self._node and known(word, self._document.draft)

    def child(self, *steps: str | int) -> Lowered:
        inner: Any = self._node
        for step in steps:
            inner = inner[step]
        return self._lowering.lower_node(self._path + steps, inner)

    def leave(self, *keywords: str) -> None:
        """Leave keywords of this object to the validator."""
        self.check(*(word for word in keywords if self.has(word)))

    # -- any instance

    def type(self) -> None:
        names = self._node["type"]
        names = names if isinstance(names, list) else [names]
        self._out["type"] = names[0] if len(names) == 1 else names

    def values(self) -> None:
        for word in ("enum", "const"):
            if not self.has(word):
                continue
            values = self._node["enum"] if word == "enum" else [self._node["const"]]
            if not values:
                raise mistake("enum is empty: nothing matches", (*self._path, word))
            if any(map(_is_beyond, values)):
                self._spelled(word, values)
                continue
            options: list[Any] = []
            for value in values:
                options.append(value)
                if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
                    options.append(int(value))  # the same number, as it is usually written
            if self._relaxation.everything:
                self._spelled(word, options)
                continue
            options = [value for value in options if _spellable(value)]
            if not options:
                raise self.unspelled(word)
            self.also("enum", options)

    def unspelled(self, word: str) -> Unspelled:
        return Unspelled(
            f"{word} asks for control characters, which JSON strings here do not hold",
            where=f"{KIND} {show((*self._path, word))}",
        )

    def _spelled(self, word: str, options: list[Any]) -> None:
        """Values whose texts may differ: members in any order, 1.0 for 1."""
        self.check(word)
        kinds = {_JSON_TYPES[type(value)] for value in options if isinstance(value, (int, float, list, dict))}
        plain = [value for value in options if isinstance(value, (str, bool, type(None)))]
        either: list[Lowered] = [{"enum": plain}] if plain else []
        if kinds - {"boolean"}:
            either.append({"type": sorted(kinds - {"boolean"})})
        self._all.append({"anyOf": either})

    def also(self, word: str, value: Any) -> None:
        """Add `word`, as a further condition if it is there already."""
        if word in self._out:
            self._all.append({word: value})
        else:
            self._out[word] = value

    def all_of(self) -> None:
        branches = [self.child("allOf", index) for index in range(len(self._node["allOf"]))]
        if self._relaxation.siblings and len(branches) > 1:
            self.check("allOf")
            branches = branches[:1]
        self._out["allOf"] = branches

    def any_of(self) -> None:
        self.also("anyOf", [self.child("anyOf", index) for index in range(len(self._node["anyOf"]))])

    def one_of(self) -> None:
        branches = [self.child("oneOf", index) for index in range(len(self._node["oneOf"]))]
        if self._relaxation.one_of and len(branches) > 1:
            self.check("oneOf")
            self.also("anyOf", branches)
        else:
            self._out["oneOf"] = branches

    def negations(self) -> None:
        if self._node["not"] in (True, {}):
            self._all.append(False)
        else:
            self.leave("not")

    def conditions(self) -> None:
        if not self.has("if") or not (self.has("then") or self.has("else")):
            return
        self.leave("if", "then", "else")
        yes: list[Lowered] = [self.child("if")]
        if self.has("then"):
            yes.append(self.child("then"))
        if self.has("else") and not self._relaxation.siblings:
            self._all.append({"anyOf": [{"allOf": yes}, self.child("else")]})

    def reference(self) -> None:
        for word in REFERENCES:
            if not self.has(word):
                continue
            target = self._lowering.reference(self._path, word, self._node[word])
            if isinstance(target, dict):
                self.also("$ref", target["$ref"])
            elif target is False:
                self._all.append(False)

    # -- strings

    def lengths(self) -> None:
        for word in ("minLength", "maxLength"):
            if word in self._node:
                self.also(word, int(self._node[word]))

    def texts(self) -> None:
        for word in ("pattern", "format"):
            if word not in self._node:
                continue
            value = self._node[word]
            known_format = word == "pattern" or value in FORMATS or value in CHECKED
            spelled = self._lowering.text_rule(self._path, word, value)
            if spelled is None or self._relaxation.patterns:
                if known_format:
                    self.check(word)
                continue
            self.also("pattern", spelled)
            if word == "format" and value in MAX_LENGTH:
                self._all.append({"maxLength": MAX_LENGTH[value]})

    # -- numbers

    def numbers(self) -> None:
        keywords = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
        if self._relaxation.numbers or any(map(_is_beyond, map(self._node.get, keywords))):
            self.leave(*keywords)
            return
        bounds: dict[str, Any] = {}
        for side in ("Minimum", "Maximum"):
            limit, exclusive = self._node.get(side.lower()), self._node.get(f"exclusive{side}")
            if isinstance(exclusive, bool):
                if limit is not None:
                    bounds[f"exclusive{side}" if exclusive else side.lower()] = limit
                continue
            if limit is not None:
                bounds[side.lower()] = limit
            if exclusive is not None:
                bounds[f"exclusive{side}"] = exclusive
        divisor = self._node.get("multipleOf")
        if divisor is not None and divisor % 1:
            bounds = between_multiples(bounds, divisor)
        shorter = [] if self._node.get("type") == "integer" else shorter_within(bounds, divisor)
        if divisor is not None:
            bounds["multipleOf"] = divisor
        if shorter:
            self._all.append({"anyOf": [bounds, {"enum": shorter}]})
        else:
            self._out.update(bounds)

    # -- objects

    def properties(self) -> None:
        node = self._node
        if any(map(self.has, SAME_VALUE)):
            self.leave("unevaluatedProperties")
        spelled = self._pattern_properties()
        named = {name: self.child("properties", name) for name in node.get("properties", {})}
        patterns: dict[str, Lowered] = {}
        if named:
            self._out["properties"] = {name: inner for name, inner in named.items() if spellable(name)}
        if spelled is None:
            self.leave("patternProperties", "additionalProperties", "unevaluatedProperties")
        else:
            schemas = {pattern: self.child("patternProperties", name) for name, pattern in spelled.items()}
            patterns = self._apart(schemas, len(spelled))
            rest = self._rest()
            names = self._names_rule()
            # A pattern's schema holds for named properties too.
            apart = rest is None or isinstance(rest, bool) or not self._out.get("properties")
            if names is not None and apart and not patterns:
                self._names_kept = True
                for name in self._out.get("properties", {}):
                    self._out["properties"][name] = named[name] if self._name_fits(name) else False
                listed = self._node["propertyNames"].get("enum")
                others = True if rest is None else rest
                if listed is not None and others is not False:  # a list of names, so that it can be exhausted
                    texts = [name for name in listed if isinstance(name, str) and spellable(name)]
                    properties = self._out.setdefault("properties", {})
                    properties.update({name: others for name in texts if name not in named})
                elif others is not False:
                    patterns = {names: others}
                rest = False
            if rest is not None:
                self._out["additionalProperties"] = rest
        if patterns:
            self._out["patternProperties"] = patterns

    def _rest(self) -> Lowered | None:
        """The schema of the properties that are not named, if there is one."""
        if "additionalProperties" in self._node:
            return self.child("additionalProperties")
        if self.has("unevaluatedProperties") and not any(map(self.has, SAME_VALUE)):
            return self.child("unevaluatedProperties")
        return None

    def _apart(self, patterns: dict[str, Lowered], count: int) -> dict[str, Lowered]:
        """Patterns of which no two match one name, as the engine needs them; else one for all, checked."""
        together = len(patterns) < count or len(patterns) > MAX_PATTERNS or self._relaxation.property_patterns
        alone = len(patterns) < 2 and "properties" not in self._node
        if not patterns or alone or not together:
            return patterns
        self.check("patternProperties")
        return {"|".join(f"(?:{pattern})" for pattern in patterns): True}

    def _names_rule(self) -> str | None:
        """propertyNames as one expression for a name, if it is that simple."""
        rule = self._node.get("propertyNames")
        if not self.has("propertyNames") or not isinstance(rule, dict) or any(map(self.has, SAME_VALUE)):
            return None
        keywords = {word for word in rule if word in _NAME_KEYWORDS}
        if not keywords or len(keywords) < len(rule.keys() - COMMENTS):
            return None
        if keywords <= {"type", "minLength", "maxLength"} and rule.get("type", "string") == "string":
            high = int(rule["maxLength"]) if "maxLength" in rule else ""
            return f"^(?s:.{{{int(rule.get('minLength', 0))},{high}}})$"
        if keywords <= {"type", "pattern"} and rule.get("type", "string") == "string":
            return spell(rule["pattern"]).rust
        if keywords == {"enum"}:
            names = [name for name in rule["enum"] if isinstance(name, str) and spellable(name)]
            return f"^(?:{'|'.join(map(rust_literal, names))})$" if names else None
        return None

    def _name_fits(self, name: str) -> bool:
        """Whether propertyNames, simple as _names_rule() takes it, allows `name`."""
        rule = self._node["propertyNames"]
        if "enum" in rule:
            return bool(name in rule["enum"])
        if "pattern" in rule:
            return matches_pattern(rule["pattern"], name)
        return bool(rule.get("minLength", 0) <= len(name) <= rule.get("maxLength", len(name)))

    def _pattern_properties(self) -> dict[str, str] | None:
        """The expression of each name of patternProperties; None if the engine cannot keep them."""
        names = self._node.get("patternProperties", {})
        if not names:
            return {}
        spelled: dict[str, str] = {}
        for name in names:
            rust = self._lowering.text_rule((*self._path, "patternProperties", name), "pattern", name)
            if rust is None:
                return None
            spelled[name] = rust
        return spelled

    def required(self) -> None:
        if self._relaxation.everything:
            self.check("required")
            return
        if not all(map(spellable, self._node["required"])):
            raise self.unspelled("required")
        self._out["required"] = list(dict.fromkeys(self._node["required"]))

    def property_counts(self) -> None:
        if self._relaxation.property_counts:
            self.leave("minProperties", "maxProperties")
            return
        for word in ("minProperties", "maxProperties"):
            if word in self._node:
                self._out[word] = int(self._node[word])
        if self._node.get("minProperties", 0) > 1:
            self.check("minProperties")  # the engine counts a name that is repeated as two

    def property_conditions(self) -> None:
        self.leave("dependencies", "dependentRequired", "dependentSchemas")
        if self.has("propertyNames") and not self._names_kept:
            self.leave("propertyNames")

    # -- arrays

    def items(self) -> None:
        node = self._node
        if self.has("prefixItems"):
            self._out["prefixItems"] = [
                self.child("prefixItems", at) for at in range(len(node["prefixItems"]))
            ]
        if isinstance(node.get("items"), list):
            if self._document.draft > 2019:
                raise mistake(
                    "items is a list; since draft 2020-12 that is prefixItems", (*self._path, "items")
                )
            self._out["prefixItems"] = [self.child("items", at) for at in range(len(node["items"]))]
            if "additionalItems" in node:
                self._out["items"] = self.child("additionalItems")
        elif "items" in node:
            self._out["items"] = self.child("items")

    def unevaluated_items(self) -> None:
        listed = isinstance(self._node.get("items"), list) and "additionalItems" not in self._node
        if any(map(self.has, (*SAME_VALUE, "contains"))):
            self.leave("unevaluatedItems")
        elif listed or "items" not in self._node:
            self._out["items"] = self.child("unevaluatedItems")

    def item_counts(self) -> None:
        for word in ("minItems", "maxItems"):
            if word in self._node:
                self._out[word] = int(self._node[word])
        self._bound_by_values()

    def _bound_by_values(self) -> None:
        """Items that must differ are at most as many as the values listed for them."""
        items = self._node.get("items")
        listed = items.get("enum") if isinstance(items, Mapping) and not self.has("prefixItems") else None
        if self._has_unique() and isinstance(listed, list):
            values = len(set(map(canonical, listed)))
            self._out["maxItems"] = min(self._out.get("maxItems", values), values)

    def _has_unique(self) -> bool:
        return self._node.get("uniqueItems") is True and bool(self._node.get("maxItems", 2) > 1)

    def item_conditions(self) -> None:
        if self._has_unique():
            self.check("uniqueItems")
            self._bound_by_values()
        if self.has("contains"):
            self.leave("contains", "minContains", "maxContains")


Rule = Callable[[KeywordRules], None]
_NAME_KEYWORDS = {"type", "minLength", "maxLength", "pattern", "enum"}
_JSON_TYPES = {
    bool: "boolean", int: "number", float: "number", list: "array", dict: "object",
}  # fmt: skip


def _table(*groups: tuple[Rule, tuple[str, ...]]) -> dict[str, Rule]:
    return {word: rule for rule, keywords in groups for word in keywords}


_RULES = _table(
    (KeywordRules.type, ("type",)),
    (KeywordRules.values, ("enum", "const")),
    (KeywordRules.all_of, ("allOf",)),
    (KeywordRules.any_of, ("anyOf",)),
    (KeywordRules.one_of, ("oneOf",)),
    (KeywordRules.negations, ("not",)),
    (KeywordRules.conditions, ("if", "then", "else")),
    (KeywordRules.reference, REFERENCES),
    (KeywordRules.lengths, ("minLength", "maxLength")),
    (KeywordRules.texts, ("pattern", "format")),
    (KeywordRules.numbers, ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")),
    (KeywordRules.properties, ("properties", "patternProperties", "additionalProperties")),
    (KeywordRules.properties, ("propertyNames", "unevaluatedProperties")),
    (KeywordRules.required, ("required",)),
    (KeywordRules.property_counts, ("minProperties", "maxProperties")),
    (KeywordRules.property_conditions, ("dependencies", "dependentRequired", "dependentSchemas")),
    (KeywordRules.items, ("items", "prefixItems", "additionalItems")),
    (KeywordRules.item_counts, ("minItems", "maxItems")),
    (KeywordRules.item_conditions, ("uniqueItems", "contains", "minContains", "maxContains")),
    (KeywordRules.unevaluated_items, ("unevaluatedItems",)),
)


def _is_beyond(value: Any) -> bool:
    """Whether some number of the value is beyond the engine's, which are floats."""
    return any(isinstance(one, int) and abs(one) > _EXACT for one in leaves(value))


def _spellable(value: Any) -> bool:
    return all(spellable(one) for one in leaves(value) if isinstance(one, str))
