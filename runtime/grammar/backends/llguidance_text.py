"""A Lark grammar of the plain texts, without quotes and escapes of JSON, that a string schema takes."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from runtime.grammar.automata.regex_syntax import rust_literal, spelled
from runtime.grammar.json_schema.texts.common_text import search_language
from runtime.grammar.json_schema.texts.ecma import spell
from runtime.grammar.json_schema.texts.formats import FORMATS, MAX_LENGTH
from runtime.protocol.errors import BadConstraint, UnsupportedConstraint

_ANY = "(?s:.*)"
_DEEPEST = 16


def text_grammar(schema: Any, excludes: Sequence[str], formats: bool) -> tuple[str, list[str]]:
    """The Lark grammar of the texts that a string schema takes and that contain none of `excludes`, and the
    keywords that it does not keep. formats: whether `format` asserts. Raises BadConstraint."""
    writer = _Writer(schema, formats)
    terms = [writer.terms(schema, 0)]
    if excludes:
        terms.append(writer.term(f"{_ANY}(?:{'|'.join(map(rust_literal, excludes))}){_ANY}", negated=True))
    lines = [f"{name}: {term}" for name, term in writer.named.items()]
    return "\n".join(["start: TEXT", f"TEXT: {' & '.join(terms)}", *lines]), writer.ignored


class _Writer:
    """named: the terminals of the grammar."""

    def __init__(self, root: Any, formats: bool) -> None:
        self.named: dict[str, str] = {}
        self.ignored: list[str] = []
        self._root, self._formats = root, formats

    def term(self, pattern: str, negated: bool = False) -> str:
        name = f"T{len(self.named)}"
        self.named[name] = f"{'~' * negated}/{pattern}/"
        return name

    def terms(self, schema: Any, depth: int) -> str:
        """The expression for the texts of a schema."""
        if depth > _DEEPEST:
            raise BadConstraint("schemas are nested too deeply", where="json_schema")
        if not isinstance(schema, Mapping):
            return self.term(_ANY if schema is not False else r"[^\s\S]")
        terms = [self._length(schema)]
        if "$ref" in schema:
            terms.append(self.terms(self._referred(schema["$ref"]), depth + 1))
        values = [*schema.get("enum", ())] if isinstance(schema.get("enum"), list) else None
        if "const" in schema:
            values = [one for one in values or [schema["const"]] if one == schema["const"]]
        if values is not None:
            texts = [rust_literal(one) for one in values if isinstance(one, str)]
            terms.append(self.term("|".join(texts) if texts else r"[^\s\S]"))
        for word in ("pattern", "format"):
            if isinstance(schema.get(word), str):
                terms += self._matched(word, schema[word])
        terms += [self.terms(part, depth + 1) for part in schema.get("allOf") or ()]
        for word in ("anyOf", "oneOf"):
            if schema.get(word):
                options = [self.terms(part, depth + 1) for part in schema[word] if _takes_texts(part)]
                terms.append(f"({' | '.join(options)})" if options else self.term(r"[^\s\S]"))
        return terms[0] if len(terms) == 1 else f"({' & '.join(terms)})"

    def _length(self, schema: Mapping[str, Any]) -> str:
        low, high = int(schema.get("minLength", 0)), schema.get("maxLength")
        if schema.get("format") in MAX_LENGTH and self._formats:
            longest = MAX_LENGTH[schema["format"]]
            high = longest if high is None else min(int(high), longest)
        if high is not None and int(high) < low:
            raise BadConstraint(f"maxLength {high} is less than minLength {low}", where="json_schema")
        if not low and high is None:
            return self.term(_ANY)
        return self.term(f"(?s:.{{{low},{'' if high is None else int(high)}}})")

    def _matched(self, word: str, value: str) -> list[str]:
        """The term of a `pattern` or a `format`, if it can be kept."""
        try:
            if word == "pattern":
                rust = spell(value)
                if rust.rust is None:
                    raise UnsupportedConstraint(rust.why)
                return [self.term(spelled(search_language(rust.rust)))]
            if self._formats and value in FORMATS:
                return [self.term(spelled(search_language(f"^(?:{FORMATS[value]})$")))]
        except UnsupportedConstraint:
            pass
        self.ignored.append(f"{word} {json.dumps(value)[:80]}")
        return []

    def _referred(self, reference: Any) -> Any:
        target: Any = self._root
        for step in str(reference).removeprefix("#").strip("/").split("/"):
            target = target.get(step) if isinstance(target, Mapping) else None
        if target is None:
            raise BadConstraint(f"{reference!r} refers to nothing", where="json_schema")
        return target


def _takes_texts(schema: Any) -> bool:
    kind = schema.get("type") if isinstance(schema, Mapping) else None
    return kind is None or kind == "string" or (isinstance(kind, list) and "string" in kind)
