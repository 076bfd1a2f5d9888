"""Routes of the control verbs that are served as they are: the body holds the parameters, the answer is Done.

runtime.protocol.control.VERBS says which verbs have routes, and what only the admin key may do. A route that
reads or answers otherwise is in control.py or sleep.py.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from runtime.processes.frontend.client import CLIENT
from runtime.protocol.control import VERBS, Verb, parameters
from runtime.server.context import ServerContext
from runtime.server.http.errors import json_response
from runtime.server.http.openapi import Operation
from runtime.server.native import control, sleep
from runtime.server.native.control import Done, raise_if_refused

_OTHERS = {**control.OPENAPI, **sleep.OPENAPI}
AS_THEY_ARE: dict[str, Verb] = {
    path: verb for verb in VERBS.values() for path in verb.paths if f"POST {path}" not in _OTHERS
}
"""path -> the verb it asks for."""


def body_of(verb: Verb) -> type[msgspec.Struct] | None:
    """The struct of a body: its parameters without `owner`, which is the client. None: there are none."""
    fields = [_field(one) for one in parameters(verb) if one.name != "owner"]
    if not fields:
        return None
    name = verb.request.__name__.removesuffix("Req")
    about = {"__doc__": inspect.getdoc(verb.request)}
    return msgspec.defstruct(name, fields, namespace=about, kw_only=True, forbid_unknown_fields=True)


def _field(one: msgspec.structs.FieldInfo) -> tuple[str, Any] | tuple[str, Any, Any]:
    """A field as msgspec.defstruct takes it."""
    if one.required:
        return one.name, one.type
    if one.default_factory is not msgspec.NODEFAULT:
        return one.name, one.type, msgspec.field(default_factory=one.default_factory)
    return one.name, one.type, one.default


def _empty_ok(body: type[msgspec.Struct]) -> bool:
    return not any(one.required for one in msgspec.structs.fields(body))


def _operation(verb: Verb) -> Operation:
    body = body_of(verb)
    if body is None:
        return Operation(verb.summary, response=Done, errors=(400, 504))
    return Operation(verb.summary, request=body, response=Done, empty_ok=_empty_ok(body), errors=(504,))


OPENAPI: dict[str, Operation] = {f"POST {path}": _operation(verb) for path, verb in AS_THEY_ARE.items()}
_FOR_EVERYBODY = {path for verb in VERBS.values() if not verb.admin for path in verb.paths}
ORDERS = frozenset(
    path
    for method, _, path in (key.partition(" ") for key in {**OPENAPI, **_OTHERS})
    if method == "POST" and path not in {*_FOR_EVERYBODY, *control.OF_REQUESTS}
)
"""The paths that only the admin key may use (see KeyCheck): all that no row or set leaves to everybody."""


def routes(ctx: ServerContext) -> list[Route]:
    # POST alone: a link or a picture of any page makes a browser send GET.
    return [Route(path, _handler(ctx, verb), methods=["POST"]) for path, verb in AS_THEY_ARE.items()]


def _handler(ctx: ServerContext, verb: Verb) -> Callable[[Request], Coroutine[Any, Any, Response]]:
    body = body_of(verb)
    owned = any(one.name == "owner" for one in parameters(verb))

    async def serve(request: Request) -> Response:
        values: dict[str, Any] = {}
        if body is not None:
            asked = await ctx.asked(request, body, empty_ok=_empty_ok(body))
            values = msgspec.structs.asdict(asked)
        if owned:
            values["owner"] = CLIENT.get().owner
        answer = await ctx.manager.control_async(verb.request(**values), ctx.config.control_timeout_s)
        raise_if_refused(answer)
        return json_response(Done(True, answer.message, answer.data))

    return serve
