"""Routes of the control verbs whose body has the verb's parameters. The routes, and which need the admin key,
are in runtime.protocol.control.VERBS; routes that differ are in control.py.
"""

from __future__ import annotations

import inspect
from functools import partial
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.routing import Route

from runtime.processes.frontend.client import CLIENT
from runtime.protocol.control import VERBS, ControlOutput, Verb, parameters
from runtime.server.context import RouteGroup, json_endpoint
from runtime.server.http.openapi import Operation
from runtime.server.native.control import OF_REQUESTS, Control, Done

_VERBS: dict[str, Verb] = {
    path: verb for verb in VERBS.values() for path in verb.paths if f"POST {path}" not in Control.OPENAPI
}
"""path -> the verb that it asks for."""


class LoadedLoras(msgspec.Struct):
    """The directories of all adapters that are loaded now, by name."""

    loaded_adapters: dict[str, str]
    success: bool = True

    @classmethod
    def of(cls, answer: ControlOutput) -> LoadedLoras:
        return cls(answer.data["loaded_adapters"])


_ANSWERS: dict[str, type[LoadedLoras]] = dict.fromkeys(
    ("load_lora_adapter", "unload_lora_adapter"), LoadedLoras
)
"""Verbs whose answer is not Done."""


def _body_of(verb: Verb) -> type[msgspec.Struct] | None:
    """The struct of a body: the verb's parameters without `owner`, which is the client. None: it has none."""
    fields = [(one.name, one.type, _default(one)) for one in parameters(verb) if one.name != "owner"]
    if not fields:
        return None
    name = verb.request.__name__.removesuffix("Req")
    about = {"__doc__": inspect.getdoc(verb.request)}
    return msgspec.defstruct(name, fields, namespace=about, kw_only=True, forbid_unknown_fields=True)


def _default(one: msgspec.structs.FieldInfo) -> Any:
    if one.default_factory is msgspec.NODEFAULT:
        return one.default
    return msgspec.field(default_factory=one.default_factory)


def _operation(verb: Verb) -> Operation:
    body, answer = _body_of(verb), _ANSWERS.get(verb.name, Done)
    if body is None:
        return Operation(verb.summary, response=answer, errors=(400, 504))
    empty_ok = not any(one.required for one in msgspec.structs.fields(body))
    return Operation(verb.summary, request=body, response=answer, empty_ok=empty_ok, errors=(504,))


class Verbs(RouteGroup):
    """POST alone: a link or a picture of any page makes a browser send GET."""

    def routes(self) -> list[Route]:
        return [Route(path, json_endpoint(partial(self._serve, path)), methods=["POST"]) for path in _VERBS]

    async def _serve(self, path: str, request: Request) -> Any:
        verb, operation = _VERBS[path], self.OPENAPI[f"POST {path}"]
        values: dict[str, Any] = {}
        if operation.request is not None:
            body = await self._ctx.body(request, operation.request, empty_ok=operation.empty_ok)
            values = msgspec.structs.asdict(body)
        if any(one.name == "owner" for one in parameters(verb)):
            values["owner"] = CLIENT.get().owner
        return operation.response.of(await self._ctx.control(verb.request(**values)))


Verbs.OPENAPI = {f"POST {path}": _operation(verb) for path, verb in _VERBS.items()}
_FOR_EVERYBODY = {path for verb in VERBS.values() if not verb.admin for path in verb.paths}
ORDERS = frozenset(
    path
    for method, _, path in (key.partition(" ") for key in {**Verbs.OPENAPI, **Control.OPENAPI})
    if method == "POST" and path not in {*_FOR_EVERYBODY, *OF_REQUESTS}
)
"""The paths that need the admin key (see Access): all that are not explicitly for every client."""
