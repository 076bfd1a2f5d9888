"""Python types as constraints: what a generation must match to be a value of the type, and how its text is
read. Knows no nodes and no backends.

    int float bool          as with dtype=, and the value is converted
    str                     any text
    Literal, Enum of texts  one of the options, written bare
    anything else           JSON by the type's own schema, read and validated by pydantic's TypeAdapter:
                            models, dataclasses, TypedDict, Annotated, unions, lists, ...

A NewType is read as its supertype.
"""

from __future__ import annotations

import enum
import functools
import re
import sys
import types
import typing
from collections.abc import Callable, Iterator
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin

from runtime.protocol.registry import MissingExtra, Registry
from runtime.protocol.typed import Typed as Typed
from runtime.protocol.typed import json_in as json_in
from runtime.protocol.typed import unfenced as unfenced

_TYPES: Registry[Any] = Registry(
    "reader of types",
    {"JSON": "pydantic:TypeAdapter", "TypedDict": "typing_extensions:TypedDict"},
    extras={"JSON": "typed", "TypedDict": "typed"},
)
T = TypeVar("T")
_PLAIN: dict[object, str] = {int: "int", float: "float", bool: "bool", str: "text"}
_MEMBERS = ("properties", "$defs", "patternProperties")
_INNER = ("items", "additionalProperties", "anyOf", "oneOf", "prefixItems")


def is_type(value: object) -> bool:
    """Whether `value` is a type that can be an annotation."""
    return (
        isinstance(value, type | types.UnionType | typing.TypeVar | typing.NewType)
        or get_origin(value) is not None
        or value is Any
        or type(value).__name__ == "TypeAliasType"
    )


def must_be(value: Any, annotation: Any) -> None:
    """Raises ValueError if `value` is not of a type, without conversion (True is no int), or if the type is
    invalid; MissingExtra as describe()."""
    name, annotation = _name(annotation), supertype(annotation)
    plain = isinstance(annotation, type) and get_origin(annotation) is None
    if plain and not typing.is_typeddict(annotation):
        right = isinstance(value, annotation) and (annotation is not int or type(value) is not bool)
    elif options := _options(annotation):
        right = value in options.values()
    else:
        adapter = describe(annotation).adapter
        try:
            adapter.validate_python(value, strict=True)
            right = True
        except ValueError:  # pydantic's
            right = False
    if not right:
        raise ValueError(f"{value!r:.80} is not of the type {name}")


def supertype(annotation: Any) -> Any:
    """The supertype of a NewType; other types as they are."""
    while isinstance(annotation, typing.NewType):
        annotation = annotation.__supertype__
    return annotation


def describe(annotation: Any) -> Typed:
    """How values of a type are written. Raises ValueError for an invalid type or one without a schema,
    MissingExtra if it needs pydantic, which is not installed."""
    return _kept(_describe, annotation)


def schema(annotation: Any) -> dict[str, Any]:
    """The JSON schema of a type; must not be changed. An object has no members besides its type's, unless the
    type allows them. Raises ValueError, MissingExtra."""
    return _kept(_schema, annotation)


def _kept(memo: Callable[[Any], T], annotation: Any) -> T:
    """A memoized function of a type; unhashable types are not memoized."""
    try:
        hash(annotation)
    except TypeError:  # an Annotated with a list in it
        return memo.__wrapped__(annotation)  # type: ignore[attr-defined, no-any-return]
    return memo(annotation)


@functools.lru_cache(maxsize=256)
def _describe(annotation: Any) -> Typed:
    name, base = _name(annotation), supertype(annotation)
    plain = _PLAIN.get(base) if isinstance(base, type) else None
    if plain is not None:
        return Typed(name, plain, annotation)
    options = _options(base)
    if options:
        return Typed(name, "choices", annotation, options=options)
    if not is_type(annotation):
        raise ValueError(f"expected a type, got {annotation!r:.80}")
    return Typed(name, "json", annotation, adapter=adapter_of(annotation))


def adapter_of(annotation: Any) -> Any:
    """pydantic's TypeAdapter of a type. Raises ValueError, MissingExtra."""
    return _kept(_adapter, annotation)


@functools.lru_cache(maxsize=256)
def _schema(annotation: Any) -> dict[str, Any]:
    name, adapter = _name(annotation), adapter_of(annotation)
    try:
        schema_of: dict[str, Any] = adapter.json_schema()
    except Exception as error:
        raise ValueError(f"{name} has no JSON schema: {_first_line(error)}") from error
    _close(schema_of)
    return schema_of


@functools.lru_cache(maxsize=256)
def _adapter(annotation: Any) -> Any:
    name = _name(annotation)
    try:
        make = _TYPES.load("JSON")
    except MissingExtra as error:
        raise MissingExtra(f"{name}: {error}") from error
    try:
        return make(_readable(annotation))
    except Exception as error:
        raise ValueError(f"{name} is not a type that can be read from JSON: {_first_line(error)}") from error


def _first_line(error: Exception) -> str:
    """Without the paragraphs that pydantic adds."""
    return str(error).partition("\n")[0]


def _readable(annotation: Any) -> Any:
    """The same with typing's TypedDicts, which pydantic refuses before Python 3.12, as typing_extensions'."""
    if sys.version_info >= (3, 12):
        return annotation
    annotation = supertype(annotation)
    if typing.is_typeddict(annotation):
        fields: dict[str, Any] = {}
        for name, hint in typing.get_type_hints(annotation, include_extras=True).items():
            left_out = name in annotation.__optional_keys__
            if (qualifier := get_origin(hint)) in (typing.Required, typing.NotRequired):
                left_out, hint = qualifier is typing.NotRequired, get_args(hint)[0]
            inner = _readable(hint)
            fields[name] = typing.NotRequired[inner] if left_out else inner
        return _TYPES.load("TypedDict")(annotation.__name__, fields)
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin in (typing.Union, types.UnionType):
        return typing.Union[tuple(map(_readable, arguments))]  # noqa: UP007 - of a computed tuple
    if origin in (list, dict, tuple):
        return origin[tuple(map(_readable, arguments))]
    return annotation


def _name(annotation: Any) -> str:
    """A type's name for readers and models: without annotations, and without addresses, which differ between
    processes."""
    if get_origin(annotation) is Annotated:
        return _name(get_args(annotation)[0])
    if isinstance(annotation, type | typing.NewType) and get_origin(annotation) is None:
        return str(annotation.__name__)
    return re.sub(r" at 0x[0-9a-fA-F]+", "", repr(annotation)).replace("typing.", "")


def _options(annotation: Any) -> dict[str, Any]:
    """Text -> value of a Literal or an Enum of texts; empty for other types."""
    if get_origin(annotation) is Literal:
        options = {value: value for value in get_args(annotation)}
    elif isinstance(annotation, type) and issubclass(annotation, enum.Enum):
        options = {member.value: member for member in annotation}
    else:
        return {}
    return options if all(type(text) is str and text for text in options) else {}


def _close(node: Any) -> None:
    """Forbid additional members where a schema does not mention them; not under allOf, where several schemas
    describe one object."""
    if not isinstance(node, dict):
        return
    if "properties" in node and "allOf" not in node:
        node.setdefault("additionalProperties", False)
    for inner in _below(node):
        _close(inner)


def _below(node: dict[str, Any]) -> Iterator[Any]:
    for word in _MEMBERS:
        if isinstance(node.get(word), dict):
            yield from node[word].values()
    for word in _INNER:
        inner = node.get(word)
        yield from inner if isinstance(inner, list) else (inner,)
