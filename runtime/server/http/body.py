"""A request's body: read within its limits, decoded as JSON, and converted to a struct. Every error names
what is wrong, and where. Knows no route.

The JSON is RFC 8259 and strict: one value, UTF-8, no NaN, no key twice in one object. `admit` bounds the work
that it asks for before it is decoded: each value costs some microseconds of Python, a number in a list far
less than a string or an object. The interpreter's lock is never held for long.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections.abc import Collection, Iterator, Mapping, Set
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import Any, NamedTuple, NoReturn, TypeVar

import msgspec
import msgspec.inspect
from starlette.requests import ClientDisconnect, Request

from runtime.config.serving.server import ServerConfig
from runtime.protocol.errors import (
    Aborted,
    BadRequest,
    BodyTimeout,
    BodyTooLarge,
    InvalidJson,
    WrongMediaType,
)
from runtime.protocol.registry import near
from runtime.server.http.ignored import may_ignore

S = TypeVar("S", bound=msgspec.Struct)
T = TypeVar("T")

SHORT = 16 << 10
"""Bytes of a body that the event loop itself decodes: it can only have few values."""
_MEDIUM = 1 << 20
"""Bytes of a body that does not wait for long ones: about 20 ms."""
_STEP = 256 << 10
"""Bytes that are scanned at a time: some milliseconds with the interpreter's lock."""
_PIECE = 64 << 10
"""Characters in which lone surrogates are searched at a time."""
_LONE = re.compile("[\ud800-\udfff]")
_SEPARATORS = b",:[{"
_BACKSLASH = 0x5C
_JSON_TYPE = re.compile(r"application/(?:json|[\w.+-]+\+json)\Z")
_MIN_INT, _MAX_INT = -(2**63), 2**64 - 1
_TYPES: dict[type, str] = {
    type(None): "null", bool: "a boolean", int: "a number", float: "a number", str: "a string",
    list: "a list", tuple: "a list",
}  # fmt: skip
_LONG_BODIES = ThreadPoolExecutor(1, thread_name_prefix="sglang-dsl-json")
"""One thread: msgspec holds the interpreter's lock while it decodes a list of numbers, and several long
bodies would keep it from the event loop one after another."""
_BODIES = ThreadPoolExecutor(1, thread_name_prefix="sglang-dsl-json-short")


def admit(body: bytes, config: ServerConfig, names: Collection[str] = ()) -> int:
    """How many values the body holds, approximately. names: of the fields it may have. Raises BodyTooLarge,
    which names the largest field."""
    values = strings = 0
    for more_values, more_strings in _weights(body):
        values += more_values
        strings += more_strings
        if values > config.max_body_values:
            raise _too_heavy(f"{config.max_body_values} values", "max_body_values", body, names)
        if strings > config.max_body_strings:
            what = f"{config.max_body_strings} strings, names, lists and objects"
            raise _too_heavy(what, "max_body_strings", body, names)
    return values


def _weights(body: bytes) -> Iterator[tuple[int, int]]:
    """For one piece of the body after another: its values, and those of them that are no numbers: strings
    (and names of fields), lists and objects. Separators within strings do not count."""
    at = within = 0
    while at < len(body):
        end = min(at + _STEP, len(body))
        while end < len(body) and body[end - 1] == _BACKSLASH:
            end += 1  # no piece ends within an escape
        piece = body[at:end]
        if b"\\" in piece:
            piece = piece.replace(rb"\\", b"").replace(rb"\"", b"")
        parts = piece.split(b'"')
        commas, colons, lists, objects = map(b"".join(parts[within::2]).count, _SEPARATORS)
        quotes = len(parts) - 1 + within
        yield commas + colons + lists + objects, lists + objects + quotes // 2
        at, within = end, quotes % 2


def _too_heavy(what: str, hint: str, body: bytes, names: Collection[str]) -> BodyTooLarge:
    field = _largest(body, names)
    most = "" if field == "body" else f", most of them in {field}"
    return BodyTooLarge(f"the body has more than {what}{most}", where=field, hint=hint)


def _largest(body: bytes, names: Collection[str]) -> str:
    """The field that holds most; "body" if that is unknown."""
    try:
        fields = msgspec.json.decode(body, type=_unread(tuple(sorted(names))))
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return "body"
    held = zip(sorted(names), msgspec.structs.astuple(fields), strict=True)
    sizes = {name: sum(map(bytes(raw).count, _SEPARATORS)) for name, raw in held if raw}
    return max(sizes, key=sizes.__getitem__, default="body")


@lru_cache(maxsize=64)
def _unread(names: tuple[str, ...]) -> type[Any]:
    """A struct of these fields, not decoded; all others are skipped."""
    fields = [(f"f{at}", msgspec.Raw, msgspec.Raw()) for at in range(len(names))]
    return msgspec.defstruct("Unread", fields, rename={f"f{at}": name for at, name in enumerate(names)})


async def read_bytes(request: Request, config: ServerConfig) -> bytes:
    """The whole body. Raises BodyTooLarge, BodyTimeout; Aborted if the client disconnects."""
    limit = config.max_body_bytes
    announced = request.headers.get("content-length", "")
    if announced.isdecimal() and int(announced) > limit:
        raise _too_large(limit)
    parts: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(config.body_timeout_s):
            async for part in request.stream():
                size += len(part)
                if size > limit:
                    raise _too_large(limit)
                parts.append(part)
    except ClientDisconnect:
        raise Aborted("the client disconnected while sending its request") from None
    except TimeoutError:
        raise BodyTimeout(
            f"{size} bytes of the body arrived within {config.body_timeout_s:g} s, but not its end"
        ) from None
    return b"".join(parts)


class Body(NamedTuple):
    """size: bytes. values: their number, approximately."""

    data: dict[str, Any]
    size: int = 0
    values: int = 0


async def read_body(
    request: Request, config: ServerConfig, *, empty_ok: bool = False, names: Collection[str] = ()
) -> Body:
    """The body, a JSON object. `empty_ok`: no body counts as {}. names: of the fields it may have. Raises
    WrongMediaType, BodyTooLarge, BodyTimeout, InvalidJson, BadRequest."""
    body = await read_bytes(request, config)
    if not body and empty_ok:
        return Body({})
    check_media_type(request.headers.get("content-type"), request.headers.get("content-encoding"))
    data, values = await decode(body, config, names)
    if not isinstance(data, dict):
        raise BadRequest(f"the body must be a JSON object, got {json_type(data)}", where="body")
    return Body(data, len(body), values)


async def decode(body: bytes, config: ServerConfig, names: Collection[str] = ()) -> tuple[Any, int]:
    """The body as JSON, with the approximate number of values; a long one is decoded in a thread. Raises as
    decode_long."""
    if len(body) <= SHORT:
        return decode_json(body, config.max_body_depth), 0
    pool = _LONG_BODIES if len(body) > _MEDIUM else _BODIES
    return await asyncio.get_running_loop().run_in_executor(pool, decode_long, body, config, names)


def check_media_type(header: str | None, encoding: str | None = None) -> None:
    """Raise WrongMediaType unless the body is JSON in UTF-8, not compressed."""
    if encoding is not None and encoding.strip().lower() not in ("", "identity"):
        raise WrongMediaType(
            f"is {encoding.strip()!r:.40}", where="content-encoding", hint="send the body as it is"
        )
    hint = "send the header Content-Type: application/json"
    if header is None:
        raise WrongMediaType("the request has a body but no content type", where="content-type", hint=hint)
    media, _, parameters = header.partition(";")
    if not is_json(header):
        raise WrongMediaType(f"is {media.strip()!r}; the body must be JSON", where="content-type", hint=hint)
    for parameter in parameters.split(";"):
        name, _, value = parameter.partition("=")
        if name.strip().lower() == "charset" and value.strip().strip('"').lower() not in ("utf-8", "utf8"):
            raise WrongMediaType(f"the charset is {value.strip()!r}; JSON is UTF-8", where="content-type")


def is_json(header: str | None) -> bool:
    return header is not None and bool(_JSON_TYPE.match(header.partition(";")[0].strip().lower()))


def decode_json(body: bytes, max_depth: int) -> Any:
    """Strict JSON. Lone surrogates (escapes of half an emoji) become U+FFFD. Raises InvalidJson with line and
    column; BadRequest for numbers of more than 64 bits."""
    try:
        data = msgspec.json.decode(body)
        exact = _is_exact(data, body)
    except RecursionError:
        raise _too_deep(max_depth) from None
    except (msgspec.DecodeError, UnicodeDecodeError, OverflowError):
        exact = False
    if not exact:
        data = _decode_strictly(body, max_depth)
    if body.count(b"[") + body.count(b"{") > max_depth:
        _check_depth(data, max_depth)
    return data


def _is_exact(data: Any, body: bytes) -> bool:
    """Whether msgspec has decoded all of the body: of several values of one key it keeps the last. Raises
    OverflowError for an integer of more than 64 bits."""
    msgspec.msgpack.encode(data)
    again = msgspec.json.encode(data)
    if again == body:
        return True
    escaped_colon = b"\\u003a" in body or b"\\u003A" in body
    return again.count(b":") == body.count(b":") and not escaped_colon


def _decode_strictly(body: bytes, max_depth: int) -> Any:
    """decode_json by the standard library, which reports where a body is wrong, and accepts lone
    surrogates."""
    try:
        text = body.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InvalidJson(f"the body is not UTF-8 at byte {error.start}", where="body") from None
    try:
        data = json.loads(
            text, object_pairs_hook=_no_twins, parse_constant=_no_constant, parse_int=_whole_number
        )
        return _without_surrogates(data) if "\\u" in text else data
    except json.JSONDecodeError as error:
        raise InvalidJson(
            f"the body is not valid JSON: {error.msg} at line {error.lineno}, column {error.colno} "
            f"(character {error.pos})",
            where="body",
        ) from None
    except RecursionError:
        raise _too_deep(max_depth) from None


def decode_long(body: bytes, config: ServerConfig, names: Collection[str] = ()) -> tuple[Any, int]:
    """decode_json for a body of many values, with their approximate number. Raises BodyTooLarge, too."""
    values = admit(body, config, names)
    return decode_json(body, config.max_body_depth), values


def to_struct(data: Mapping[str, Any], kind: type[S]) -> S:
    """`data` as a `kind`. Ignored are unknown fields with empty values, and null or false for a field with a
    default whose type has no such value. Raises BadRequest with the path of the wrong value, for an unknown
    field with the nearest known one."""
    with contextlib.suppress(msgspec.ValidationError):
        return msgspec.convert(data, kind, str_keys=True)
    try:
        return msgspec.convert(_without_empty(data, kind, ""), kind, str_keys=True)
    except msgspec.ValidationError as error:
        message, _, path = str(error).partition(" - at `")
        path = path.rstrip("`").removeprefix("key in ").removeprefix("$").lstrip(".")
        raise BadRequest(message[:1].lower() + message[1:], where=path or "body") from None


def known_fields(data: Mapping[str, Any], known: Set[str], path: str = "") -> Mapping[str, Any]:
    """The fields that are `known`. Raises BadRequest for the first other one that may not be ignored (see
    ignored.py)."""
    if data.keys() <= known:
        return data
    fields: dict[str, Any] = {}
    for name, value in data.items():
        if name in known:
            fields[name] = value
        elif not may_ignore(name, value, path):
            meant = near(name, known)
            raise BadRequest(
                f"unknown field {name[:80]!r}",
                where=f"{path}.{name[:80]}" if path else name[:80],
                hint=f"did you mean {meant!r}?" if meant else f"known: {', '.join(sorted(known))}",
            )
    return fields


class _Field(NamedTuple):
    """ignores_null, ignores_false: it is optional, and has no such value. struct: it is another struct, or a
    list of one."""

    ignores_null: bool = False
    ignores_false: bool = False
    struct: type[msgspec.Struct] | None = None


@lru_cache(maxsize=256)
def _fields(kind: type[msgspec.Struct]) -> dict[str, _Field]:
    """By their JSON names."""
    facts = msgspec.inspect.type_info(kind)
    assert isinstance(facts, msgspec.inspect.StructType)
    fields: dict[str, _Field] = {}
    for one in facts.fields:
        types = _alternatives(one.type)
        ignores_null, ignores_false = (
            not one.required and not any(isinstance(each, (special, *_ANYTHING)) for each in types)
            for special in (msgspec.inspect.NoneType, msgspec.inspect.BoolType)
        )
        structs = [each.cls for each in types if isinstance(each, msgspec.inspect.StructType)]
        struct = structs[0] if len(structs) == 1 else None
        fields[one.encode_name] = _Field(ignores_null, ignores_false, struct)
    return fields


_ANYTHING = (msgspec.inspect.AnyType, msgspec.inspect.RawType)


def _alternatives(kind: msgspec.inspect.Type) -> list[msgspec.inspect.Type]:
    """The types that a value may have; of a list, also the structs that its items may be."""
    match kind:
        case msgspec.inspect.UnionType():
            return [each for one in kind.types for each in _alternatives(one)]
        case msgspec.inspect.ListType():
            items = _alternatives(kind.item_type)
            return [kind, *(one for one in items if isinstance(one, msgspec.inspect.StructType))]
        case _:
            return [kind]


def _without_empty(data: Mapping[str, Any], kind: type[msgspec.Struct], path: str) -> dict[str, Any]:
    """The data without the values that to_struct ignores."""
    fields = _fields(kind)
    closed = kind.__struct_config__.forbid_unknown_fields
    kept: dict[str, Any] = {}
    for name, value in (known_fields(data, fields.keys(), path) if closed else data).items():
        field = fields.get(name, _Field())
        if (value is None and field.ignores_null) or (value is False and field.ignores_false):
            continue
        inner = f"{path}.{name}" if path else name
        if field.struct is not None and isinstance(value, Mapping):
            value = _without_empty(value, field.struct, inner)
        elif field.struct is not None and isinstance(value, list):
            value = [
                _without_empty(item, field.struct, f"{inner}[{at}]") if isinstance(item, Mapping) else item
                for at, item in enumerate(value)
            ]
        kept[name] = value
    return kept


def json_type(value: Any) -> str:
    """JSON's name of the type of this value."""
    return _TYPES.get(type(value), "an object")


def expect(value: Any, kind: type[T], path: str, message: str) -> T:
    """The value, if it is a `kind`. Raises BadRequest."""
    if not isinstance(value, kind):
        raise BadRequest(f"{message}, got {json_type(value)}", where=path)
    return value


def check_range(value: float | None, path: str, least: int, most: int | None = None) -> None:
    """Raise BadRequest for a value that is out of range; None is not."""
    if value is None or (value >= least and (most is None or value <= most)):
        return
    span = f"at least {least}" if most is None else f"from {least} to {most}"
    raise BadRequest(f"must be {span}, got {value}", where=path)


def _no_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        last = {name: at for at, (name, _) in enumerate(pairs)}
        twin = next(name for at, (name, _) in enumerate(pairs) if last[name] != at)
        raise InvalidJson(f"the key {twin[:80]!r} occurs twice in one object", where=twin[:80])
    return fields


def _no_constant(name: str) -> NoReturn:
    raise InvalidJson(f"the body is not valid JSON: {name} is not a JSON number", where="body")


def _whole_number(digits: str) -> int:
    if len(digits) > 21 or not _MIN_INT <= int(digits) <= _MAX_INT:
        raise BadRequest(f"the number {digits[:24]}... does not fit in 64 bits", where="body")
    return int(digits)


def _check_depth(data: Any, most: int) -> None:
    """Raise InvalidJson for a value that is nested deeper. Level by level, so that other threads run in
    between."""
    level = [data] if isinstance(data, (dict, list)) else []
    depth = 0
    while level:
        depth += 1
        if depth > most:
            raise _too_deep(most)
        below: list[Any] = []
        for value in level:
            items = value.values() if isinstance(value, dict) else value
            below += [one for one in items if isinstance(one, (dict, list))]
        level = below


def _without_surrogates(data: Any) -> Any:
    text = json.dumps(data, ensure_ascii=False)
    pieces = (text[at : at + _PIECE] for at in range(0, len(text), _PIECE))
    return json.loads("".join(_LONE.sub("\ufffd", piece) for piece in pieces))


def _too_large(limit: int) -> BodyTooLarge:
    return BodyTooLarge(f"the body has more than {limit} bytes", where="body", hint="max_body_bytes")


def _too_deep(limit: int) -> InvalidJson:
    return InvalidJson(f"the body is nested more than {limit} levels deep", where="body")
