"""Values of a type while their JSON is being generated. Knows types and plain data, no text and no nodes.

Complete parts are validated. Models, dataclasses, TypedDicts and containers are shown while they are open,
with None (or nothing, in a container) for missing parts. An incomplete string is shown if the type is str;
for other types, such as a Literal or a date, it is no value yet. A union is shown when only one of its types
is possible.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import json
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Final, NamedTuple, TypeAlias, get_args, get_origin

from sglang_dsl.ir.typed import adapter_of, supertype

Path: TypeAlias = "tuple[str | int, ...] | None"
"""Path of the part that is being written; () for the value itself, None for a complete one."""

NOTHING: Final = object()
"""Nothing can be shown yet."""
_UNKNOWN: Final = object()  # the type of a field whose annotation cannot be resolved
_ANY: Final = (Any, object)
_NUMBERS: Final = (int, float, bool, types.NoneType)
_ARRAYS: Final[dict[Any, Any]] = {
    set: set, frozenset: frozenset, tuple: tuple, collections.deque: collections.deque,
    collections.abc.Set: set, collections.abc.MutableSet: set, list: list, Sequence: list,
    collections.abc.MutableSequence: list, collections.abc.Collection: list, Iterable: list,
}  # fmt: skip
_MAPPINGS: Final[dict[Any, Any]] = {
    dict: dict, Mapping: dict, collections.abc.MutableMapping: dict,
    collections.OrderedDict: collections.OrderedDict, collections.Counter: collections.Counter,
    collections.defaultdict: lambda parts: collections.defaultdict(None, parts),
}  # fmt: skip
"""Types that are written as JSON arrays, and as objects, with their constructors."""


class Growing:
    """The values of one text, in order. Complete parts are created once and shared."""

    def __init__(self, annotation: Any) -> None:
        self._annotation = annotation
        # By type and data; the data is kept, so that its id stays unique.
        self._ended: dict[Any, tuple[Any, Any, Any]] = {}

    def value(self, data: Any, writing: Path) -> Any:
        """The value to show for `data`, the JSON so far, which is being written at `writing`."""
        return self._shown(self._annotation, data, writing)

    def _shown(self, annotation: Any, data: Any, writing: Path) -> Any:
        kind = _bare(annotation)
        if kind in _ANY:
            return data
        if isinstance(data, str) and _grows(kind):
            return data
        if writing is None:
            if type(data) is kind and kind in _NUMBERS:
                return data
            return self._whole(annotation, data)
        arms = [arm for arm in _arms(kind) if self._may_be(arm, data, writing)]
        if len(arms) > 1:
            arms = [arm for arm in arms if self._fits(arm, data, writing)]
        return self._built(arms[0], data, writing) if len(arms) == 1 else NOTHING

    def _whole(self, annotation: Any, data: Any) -> Any:
        """A complete value; an invalid one is built from its valid parts, if it has parts."""
        container = isinstance(data, dict | list)
        try:
            hash(annotation)
            kind = annotation
        except TypeError:  # an Annotated with a list in it
            kind = id(annotation)
        key = (kind, id(data)) if container else (kind, type(data), data)
        known = self._ended.get(key)
        if known is not None:
            return known[2]
        built = NOTHING if annotation is _UNKNOWN else _validated(annotation, data)
        if built is NOTHING and container:
            arms = [arm for arm in _arms(_bare(annotation)) if self._may_be(arm, data, None)]
            if len(arms) == 1:
                built = self._built(arms[0], data, None)
        self._ended[key] = (annotation, data, built)
        return built

    def _may_be(self, kind: Any, data: Any, writing: Path) -> bool:
        """Whether a type is written as JSON of the kind of `data`."""
        if kind in _ANY:
            return True
        root = _root(kind)
        if root is not _UNKNOWN:
            arms = _arms(_bare(root))
            return any(
                _grows(arm) if isinstance(data, str) else self._may_be(arm, data, writing) for arm in arms
            )
        base = get_origin(kind) or kind
        if isinstance(data, list):
            return base in _ARRAYS or _is_named_tuple(base)
        return isinstance(data, dict) and (
            base in _MAPPINGS or (_members(kind) is not None and not _is_named_tuple(base))
        )

    def _fits(self, kind: Any, data: Any, writing: Path) -> bool:
        """Whether an object with these members so far may still become one of this type."""
        members = None if _root(kind) is not _UNKNOWN else _members(kind)
        if members is None or not isinstance(data, dict):
            return True
        known = {member.key: member for member in members}
        others = getattr(kind, "model_config", {}).get("extra") == "allow"
        return all(
            others
            if name not in known
            else (
                _below(writing, name) is not None
                or self._shown(known[name].annotation, value, None) is not NOTHING
            )
            for name, value in data.items()
        )

    def _built(self, kind: Any, data: Any, writing: Path) -> Any:
        """An object or array of this type, built from its parts."""
        if kind in _ANY:
            return data
        root = _root(kind)
        if root is not _UNKNOWN:
            inner = self._shown(root, data, writing)
            return NOTHING if inner is NOTHING else kind.model_construct(inner)
        members = _members(kind)
        if isinstance(data, list):
            return self._array(kind, members, data, writing)
        if members is not None:
            return self._object(kind, members, data, writing)
        key, item = get_args(kind) or (Any, Any)
        names = ((self._shown(key, name, None), name) for name in data)
        parts = ((name, self._shown(item, data[raw], _below(writing, raw))) for name, raw in names)
        make = _MAPPINGS[get_origin(kind) or kind]
        return make({name: part for name, part in parts if name is not NOTHING and part is not NOTHING})

    def _array(self, kind: Any, members: Sequence[Member] | None, data: list[Any], writing: Path) -> Any:
        base, arguments = get_origin(kind) or kind, get_args(kind)
        if members is not None:
            parts = self._parts([member.annotation for member in members], data, writing)
            return base._make([*parts, *[None] * (len(members) - len(parts))])
        if base is tuple and arguments and arguments[-1] is not Ellipsis:
            return tuple(self._parts(arguments, data, writing))
        item = arguments[0] if arguments else Any
        shown = (self._shown(item, value, _below(writing, at)) for at, value in enumerate(data))
        kept = [one for one in shown if one is not NOTHING]
        make = _ARRAYS[base]
        try:
            return make(kept)
        except TypeError:  # incomplete items of a set may be unhashable
            return make(one for one in kept if type(one).__hash__ is not None)

    def _parts(self, annotations: Sequence[Any], data: list[Any], writing: Path) -> list[Any]:
        """Items by position, up to the first missing one."""
        parts: list[Any] = []
        for at, (annotation, value) in enumerate(zip(annotations, data)):
            part = self._shown(annotation, value, _below(writing, at))
            if part is NOTHING:
                break
            parts.append(part)
        return parts

    def _object(self, kind: Any, members: Sequence[Member], data: dict[str, Any], writing: Path) -> Any:
        shown = {
            member.name: self._shown(member.annotation, data[member.key], _below(writing, member.key))
            for member in members
            if member.key in data
        }
        parts = {name: part for name, part in shown.items() if part is not NOTHING}
        base = get_origin(kind) or kind
        if typing.is_typeddict(base):
            return parts
        parts = {member.name: parts.get(member.name) for member in members}
        if hasattr(base, "model_construct"):
            return kind.model_construct(**parts)
        built = object.__new__(base)
        for name, part in parts.items():
            object.__setattr__(built, name, part)
        return built


class Member(NamedTuple):
    """A field: its name, its name in JSON, its type."""

    name: str
    key: str
    annotation: Any


def _below(writing: Path, key: str | int) -> Path:
    return writing[1:] if writing and writing[0] == key else None


def _validated(annotation: Any, data: Any) -> Any:
    try:
        return adapter_of(annotation).validate_json(json.dumps(data))
    except Exception:  # noqa: BLE001 - also of user validators; raised when the whole is read
        return NOTHING


def _bare(annotation: Any) -> Any:
    """A type without annotations, aliases and type variables."""
    while True:
        annotation = supertype(annotation)
        origin = get_origin(annotation)
        if origin in (Annotated, typing.Required, typing.NotRequired, typing.Final):
            annotation = get_args(annotation)[0]
        elif isinstance(annotation, typing.TypeVar):
            bound, choices = annotation.__bound__, annotation.__constraints__
            annotation = bound or (typing.Union[choices] if choices else Any)  # noqa: UP007 - computed
        elif type(origin or annotation).__name__ == "TypeAliasType":
            annotation = _substituted((origin or annotation).__value__, annotation)
        else:
            return annotation


def _substituted(annotation: Any, alias: Any) -> Any:
    """A type with the variables of a generic `alias` replaced by its arguments."""
    variables = getattr(annotation, "__parameters__", ())
    origin = get_origin(alias)
    parameters = getattr(origin, "__type_params__", ()) or getattr(origin, "__parameters__", ())
    replacements = dict(zip(parameters, get_args(alias)))
    if isinstance(annotation, typing.TypeVar):
        return replacements.get(annotation, annotation)
    if not variables or not replacements:
        return annotation
    return annotation[tuple(replacements.get(one, one) for one in variables)]


def _arms(kind: Any) -> list[Any]:
    """The types of a union without None; another type alone."""
    if get_origin(kind) not in (typing.Union, types.UnionType):
        return [kind]
    arms = [arm for one in get_args(kind) for arm in _arms(_bare(one))]
    return [arm for arm in arms if arm is not types.NoneType]


def _grows(kind: Any) -> bool:
    """Whether an incomplete string is a value of the type. A union must have no other string type."""
    texts = [arm for arm in _arms(kind) if not _never_a_string(arm)]
    return bool(texts) and all(arm is str or arm in _ANY for arm in texts)


def _never_a_string(kind: Any) -> bool:
    base = get_origin(kind) or kind
    held = base in _ARRAYS or base in _MAPPINGS
    return kind in _NUMBERS or held or (_root(kind) is _UNKNOWN and _members(kind) is not None)


def _root(kind: Any) -> Any:
    """The type of a RootModel's content; _UNKNOWN for other types."""
    if not isinstance(kind, type) or not getattr(kind, "__pydantic_root_model__", False):
        return _UNKNOWN
    field = kind.model_fields["root"]  # type: ignore[attr-defined]
    return _with(field.annotation, field.metadata)


def _with(annotation: Any, metadata: Sequence[Any]) -> Any:
    return Annotated[(annotation, *metadata)] if metadata else annotation


def _is_named_tuple(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, tuple) and hasattr(kind, "_fields")


def _members(kind: Any) -> Sequence[Member] | None:
    """The fields of a model, dataclass, TypedDict or NamedTuple; None for other types."""
    try:
        return _known_members(kind)
    except TypeError:  # a type that cannot be hashed
        return _known_members.__wrapped__(kind)


@functools.lru_cache(maxsize=256)
def _known_members(kind: Any) -> tuple[Member, ...] | None:
    base = get_origin(kind) or kind
    if not isinstance(base, type):
        return None
    if hasattr(base, "model_construct"):
        fields = kind.model_fields.items()
        return tuple(
            Member(name, _key(field, name), _with(field.annotation, field.metadata)) for name, field in fields
        )
    if dataclasses.is_dataclass(base):
        named = {field.name: _key(field.default, field.name) for field in dataclasses.fields(base)}
    elif typing.is_typeddict(base):
        named = {name: name for name in base.__annotations__}
    elif _is_named_tuple(base):
        named = {name: name for name in base._fields}  # type: ignore[attr-defined]
    else:
        return None
    try:
        hints = typing.get_type_hints(base, include_extras=True)
    except NameError:  # names of a function's own scope
        hints = {}
    return tuple(
        Member(name, key, _substituted(hints.get(name, _UNKNOWN), kind)) for name, key in named.items()
    )


def _key(field: Any, name: str) -> str:
    """A field's name in JSON."""
    alias = getattr(field, "validation_alias", None) or getattr(field, "alias", None)
    return alias if isinstance(alias, str) else name
