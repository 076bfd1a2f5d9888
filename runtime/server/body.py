"""A request's body: read within its limits, decoded as JSON, and turned into a struct; every refusal says
what was wrong, and where.

Knows no route. The JSON is RFC 8259 and strict: one value, UTF-8, no NaN, no key twice in one object.
"""

from __future__ import annotations

import asyncio
import difflib
import json
import re
from collections.abc import Collection, Mapping
from typing import Any, NoReturn, TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request

from runtime.config.server import ServerConfig
from runtime.protocol.errors import Aborted, BadRequest
from runtime.server.errors import BodyTimeout, BodyTooLarge, InvalidJson, WrongMediaType

T = TypeVar("T")

_LONG_NUMBER = re.compile(r"\d{19}")
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
_STRING = re.compile(r'"[^"\\]*+(?:\\.[^"\\]*+)*+"')
_NO_BRACKET = re.compile(r"[^\[\]{}]+")
_ONE_KIND = str.maketrans("{}", "[]")
_JSON_TYPE = re.compile(r"application/(?:json|[\w.+-]+\+json)\Z")
_MIN_INT, _MAX_INT = -(2**63), 2**64 - 1


async def read_bytes(request: Request, config: ServerConfig) -> bytes:
    """The whole body. Raises BodyTooLarge, BodyTimeout; Aborted when the client goes."""
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
    except TimeoutError:
        raise BodyTimeout(
            f"{size} bytes of the body came within {config.body_timeout_s:g} s, and not its end"
        ) from None
    except ClientDisconnect:
        raise Aborted("the client went away while sending its request") from None
    return b"".join(parts)


async def read_object(request: Request, config: ServerConfig, *, empty_ok: bool = False) -> dict[str, Any]:
    """The body as a JSON object. `empty_ok`: no body at all counts as {}.

    Raises WrongMediaType, BodyTooLarge, BodyTimeout, InvalidJson, BadRequest."""
    body = await read_bytes(request, config)
    if not body and empty_ok:
        return {}
    check_media_type(request.headers.get("content-type"), request.headers.get("content-encoding"))
    data = decode_json(body, config.max_body_depth)
    if not isinstance(data, dict):
        raise BadRequest(f"the body must be a JSON object, got {json_type(data)}", where="body")
    return data


async def read_struct(request: Request, config: ServerConfig, kind: type[T], *, empty_ok: bool = False) -> T:
    """The body as a `kind` (a msgspec struct); the same errors as read_object, and those of to_struct."""
    return to_struct(await read_object(request, config, empty_ok=empty_ok), kind)


def check_media_type(header: str | None, encoding: str | None = None) -> None:
    """Raise WrongMediaType unless the headers say JSON in UTF-8, not compressed."""
    if encoding is not None and encoding.strip().lower() not in ("", "identity"):
        raise WrongMediaType(
            f"is {encoding.strip()!r:.40}", where="content-encoding", hint="send the body as it is"
        )
    hint = "send the header Content-Type: application/json"
    if header is None:
        raise WrongMediaType("the request has a body and no content type", where="content-type", hint=hint)
    media, _, parameters = header.partition(";")
    if not _JSON_TYPE.match(media.strip().lower()):
        raise WrongMediaType(f"is {media.strip()!r}; the body must be JSON", where="content-type", hint=hint)
    for parameter in parameters.split(";"):
        name, _, value = parameter.partition("=")
        if name.strip().lower() == "charset" and value.strip().strip('"').lower() not in ("utf-8", "utf8"):
            raise WrongMediaType(f"the charset is {value.strip()!r}; JSON is UTF-8", where="content-type")


def decode_json(body: bytes, max_depth: int) -> Any:
    """Strict JSON. Lone surrogates (a cut emoji's escape) become U+FFFD, as they do in a tokenizer.

    Raises InvalidJson with line, column and offset; BadRequest for numbers no field can hold."""
    try:
        text = body.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InvalidJson(f"the body is not UTF-8 at byte {error.start}", where="body") from None
    whole = _whole_number if _LONG_NUMBER.search(text) else None
    try:
        data = json.loads(text, object_pairs_hook=_no_twins, parse_constant=_no_constant, parse_int=whole)
    except json.JSONDecodeError as error:
        raise InvalidJson(
            f"the body is not valid JSON: {error.msg} at line {error.lineno}, column {error.colno} "
            f"(character {error.pos})",
            where="body",
        ) from None
    except RecursionError:
        raise _too_deep(max_depth) from None
    if _depth(text, max_depth) > max_depth:
        raise _too_deep(max_depth)
    return _whole_text(data) if _SURROGATE.search(text) else data


def to_struct(data: Any, kind: type[T], where: str = "") -> T:
    """`data` as a `kind`. Raises BadRequest: the path of the wrong value; for an unknown field the nearest
    known one. `where`: the path of `data` itself."""
    if isinstance(data, Mapping):
        known = field_names(kind)
        if known:
            check_fields(data, known, where)
    try:
        return msgspec.convert(data, kind, str_keys=True)
    except msgspec.ValidationError as error:
        raise _named(error, where) from None


def from_query(request: Request, kind: type[T]) -> T:
    """The query's parameters as a `kind`; numbers and truths are read from their text. Raises BadRequest."""
    given = dict(request.query_params)
    check_fields(given, field_names(kind))
    try:
        made = msgspec.convert(given, kind, strict=False, str_keys=True)
    except msgspec.ValidationError as error:
        raise _named(error, "") from None
    for name, value in msgspec.structs.asdict(made).items() if isinstance(made, msgspec.Struct) else ():
        if isinstance(value, int) and not _MIN_INT <= value <= _MAX_INT:
            raise BadRequest(f"the number {given.get(name, '')[:24]}... does not fit in 64 bits", where=name)
    return made


def field_names(kind: type[Any]) -> tuple[str, ...]:
    """The names of a struct's fields as JSON has them; () for what is no struct."""
    if not issubclass(kind, msgspec.Struct):
        return ()
    return tuple(kind.__struct_encode_fields__)


def check_fields(data: Mapping[str, Any], known: Collection[str], where: str = "") -> None:
    """Raise BadRequest for the first key that is not among `known`."""
    for name in data:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            raise BadRequest(
                f"unknown field {name[:80]!r}",
                where=f"{where}.{name[:80]}" if where else name[:80],
                hint=f"did you mean {near[0]!r}?" if near else f"known: {', '.join(sorted(known))}",
            )


def json_type(value: Any) -> str:
    """What JSON calls this value."""
    match value:
        case None:
            return "null"
        case bool():
            return "a boolean"
        case int() | float():
            return "a number"
        case str():
            return "a string"
        case list() | tuple():
            return "a list"
        case _:
            return "an object"


def _named(error: msgspec.ValidationError, where: str) -> BadRequest:
    message, _, path = str(error).partition(" - at `")
    place = path.rstrip("`").removeprefix("key in ").removeprefix("$").lstrip(".")
    whole = f"{where}.{place}" if where and place else where or place
    return BadRequest(message[:1].lower() + message[1:], where=whole or "body")


def _no_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        last = {name: at for at, (name, _) in enumerate(pairs)}
        twin = next(name for at, (name, _) in enumerate(pairs) if last[name] != at)
        raise InvalidJson(f"the key {twin[:80]!r} stands twice in one object", where=twin[:80])
    return made


def _no_constant(name: str) -> NoReturn:
    raise InvalidJson(f"the body is not valid JSON: {name} is no JSON number", where="body")


def _whole_number(digits: str) -> int:
    if len(digits) > 21 or not _MIN_INT <= int(digits) <= _MAX_INT:
        raise BadRequest(f"the number {digits[:24]}... does not fit in 64 bits", where="body")
    return int(digits)


def _depth(text: str, limit: int) -> int:
    """How deeply valid JSON is nested; stops counting above `limit`. Only whole-text operations, each as fast
    as copying: a body of millions of brackets must not hold the server up."""
    if text.count("[") + text.count("{") <= limit:
        return 0  # deeper than that it cannot be
    brackets = _NO_BRACKET.sub("", _STRING.sub("", text)).translate(_ONE_KIND)
    depth = 0
    while brackets and depth <= limit:
        brackets = brackets.replace("[]", "")  # the innermost level
        depth += 1
    return depth


def _whole_text(value: Any) -> Any:
    match value:
        case str():
            return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        case list():
            return [_whole_text(item) for item in value]
        case dict():
            return {_whole_text(name): _whole_text(item) for name, item in value.items()}
        case _:
            return value


def _too_large(limit: int) -> BodyTooLarge:
    return BodyTooLarge(f"the body has more than {limit} bytes", where="body", hint="max_body_bytes")


def _too_deep(limit: int) -> InvalidJson:
    return InvalidJson(f"the body is nested more than {limit} levels deep", where="body")
