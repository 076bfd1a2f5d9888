"""A JSON schema as one regular expression, for programs that pass sglang's expression of their models as
`regex=`.

Objects have all their properties and no others, in order, with at most one space between the tokens: less
than a schema may allow, and always valid. Keywords that are not supported (`pattern`, bounds of numbers,
recursion) are refused; json_schema= takes the whole schema. Knows no backend.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from sglang_dsl.errors import BadProgram
from sglang_dsl.patterns import REGEX_STR

_HINT = "use json_schema= instead, which takes the whole schema"
_BLANK = "[ ]?"
_INT = r"-?(0|[1-9][0-9]*)"
_SCALARS: dict[str, str] = {
    "string": REGEX_STR,
    "integer": _INT,
    "number": _INT + r"(\.[0-9]+)?([eE][+-]?[0-9]+)?",
    "boolean": "(true|false)",
    "null": "null",
}
# Keywords that say nothing about the text, and those that are spelt out below.
_SILENT = frozenset({"title", "description", "default", "examples", "$schema", "$id", "$defs", "definitions"})
_SPELT: dict[str, frozenset[str]] = {
    "string": frozenset({"minLength", "maxLength"}),
    "array": frozenset({"items", "minItems", "maxItems"}),
    "object": frozenset({"properties", "required", "additionalProperties"}),
}


def regex_of_schema(schema: Mapping[str, Any]) -> str:
    """The expression of the JSON texts that `schema` describes. Raises BadProgram for a keyword that is not
    spelt out here, with its place."""
    return _Writer(schema).write(schema, "#", ())


def build_regex_from_object(source: object) -> str:
    """The same for a class that describes itself (pydantic's models do), JSON text, or a mapping."""
    describe: Callable[[], Mapping[str, Any]] | None = getattr(source, "model_json_schema", None)
    if describe is not None:
        return regex_of_schema(describe())
    if isinstance(source, str):
        try:
            source = json.loads(source)
        except ValueError as error:
            raise BadProgram(f"the schema is not JSON: {error}") from error
    if not isinstance(source, Mapping):
        raise BadProgram(f"a schema is a mapping, JSON text or a model, got {source!r:.80}")
    return regex_of_schema(source)


def _of_type(values: Sequence[Any], schema: Mapping[str, Any]) -> list[Any]:
    """Those of the schema's type, if it names one."""
    kinds = schema.get("type", list(_TYPES))
    fitting = [_TYPES.get(str(kind), ()) for kind in (kinds if isinstance(kinds, list) else [kinds])]
    return [one for one in values if any(type(one) in types for types in fitting)]


_TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,), "integer": (int,), "number": (int, float), "boolean": (bool,), "null": (type(None),),
    "array": (list,), "object": (dict,),
}  # fmt: skip


class _Writer:
    """Writes one document's schemas. `within`: the references that are being followed."""

    def __init__(self, document: Mapping[str, Any]) -> None:
        self._document = document

    def write(self, schema: Any, path: str, within: tuple[str, ...]) -> str:
        if not isinstance(schema, Mapping):
            raise BadProgram(f"{path}: {schema!r:.40} cannot be written as a regex; {_HINT}")
        keywords = {key: value for key, value in schema.items() if key not in _SILENT}
        match keywords:
            case {"$ref": str(target), **rest} if not rest:
                return self._followed(target, path, within)
            case {"enum": list(values), **rest} if not rest.keys() - {"type"} and _of_type(values, rest):
                return "(" + "|".join(_literal(value) for value in _of_type(values, rest)) + ")"
            case {"const": value, **rest} if not rest.keys() - {"type"} and _of_type([value], rest):
                return _literal(value)
            case {"anyOf": list(options), **rest} | {"allOf": [_] as options, **rest} if not rest and options:
                written = [self.write(one, f"{path}/{at}", within) for at, one in enumerate(options)]
                return f"({'|'.join(written)})"
            case {"type": str(kind), **rest} if not rest.keys() - _SPELT.get(kind, frozenset()):
                return self._typed(kind, rest, path, within)
        raise BadProgram(
            f"{path}: {', '.join(map(repr, keywords)) or 'any value'} is not written as a regex; {_HINT}"
        )

    def _followed(self, target: str, path: str, within: tuple[str, ...]) -> str:
        if target in within:
            raise BadProgram(f"{path}: {target} contains itself; {_HINT}")
        schema: Any = self._document
        for step in target.removeprefix("#").strip("/").split("/"):
            try:
                schema = schema[step.replace("~1", "/").replace("~0", "~")]
            except (KeyError, TypeError):
                raise BadProgram(f"{path}: {target} does not exist") from None
        return self.write(schema, target, (*within, target))

    def _typed(self, kind: str, keywords: Mapping[str, Any], path: str, within: tuple[str, ...]) -> str:
        match kind:
            case "object":
                return self._object(keywords, path, within)
            case "array":
                item = self.write(keywords.get("items", {}), f"{path}/items", within)
                items = _repeated(item, keywords.get("minItems", 0), keywords.get("maxItems"))
                return rf"\[{_BLANK}{items}{_BLANK}\]"
            case "string" if keywords:
                least, most = keywords.get("minLength", 0), keywords.get("maxLength", "")
                return REGEX_STR.replace(")*", f"){{{least},{most}}}")
            case _ if kind in _SCALARS:
                return _SCALARS[kind]
            case _:
                raise BadProgram(f"{path}: the type {kind!r} is not written as a regex; {_HINT}")

    def _object(self, keywords: Mapping[str, Any], path: str, within: tuple[str, ...]) -> str:
        properties = keywords.get("properties", {})
        if unknown := sorted(set(keywords.get("required", ())) - set(properties)):
            raise BadProgram(f"{path}: {', '.join(unknown)} is required but not described; {_HINT}")
        pairs = [
            f"{_literal(name)}{_BLANK}:{_BLANK}{self.write(value, f'{path}/properties/{name}', within)}"
            for name, value in properties.items()
        ]
        return rf"\{{{_BLANK}{f'{_BLANK},{_BLANK}'.join(pairs)}{_BLANK}\}}"


def _repeated(item: str, least: int, most: int | None) -> str:
    """`least` to `most` items with commas between them."""
    if most == 0:
        return ""
    more = f"({_BLANK},{_BLANK}{item}){{{max(0, least - 1)},{'' if most is None else most - 1}}}"
    return f"({item}{more}){'' if least else '?'}"


def _literal(value: Any) -> str:
    return re.escape(json.dumps(value, ensure_ascii=False)).replace("\\ ", " ")
