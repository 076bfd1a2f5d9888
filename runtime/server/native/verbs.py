"""Routes of the control verbs whose body has the verb's parameters, and whose answer is Done. The routes, and
which need the admin key, are in runtime.protocol.control.VERBS; routes that differ are in control.py and
sleep.py.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.routing import Route

from runtime.processes.frontend.client import CLIENT
from runtime.protocol.control import VERBS, Verb, parameters
from runtime.server.context import RouteGroup, ServerContext, json_endpoint
from runtime.server.http.openapi import Operation
from runtime.server.native.control import OF_REQUESTS, Control, Done, body_of
from runtime.server.native.sleep import Sleep

_OTHERS = {**Control.OPENAPI, **Sleep.OPENAPI}
AS_THEY_ARE: dict[str, Verb] = {
    path: verb for verb in VERBS.values() for path in verb.paths if f"POST {path}" not in _OTHERS
}
"""path -> the verb that it asks for."""


def _empty_ok(body: type[msgspec.Struct]) -> bool:
    return not any(one.required for one in msgspec.structs.fields(body))


def _operation(verb: Verb) -> Operation:
    body = body_of(verb)
    if body is None:
        return Operation(verb.summary, response=Done, errors=(400, 504))
    return Operation(verb.summary, request=body, response=Done, empty_ok=_empty_ok(body), errors=(504,))


class Verbs(RouteGroup):
    """POST alone: a link or a picture of any page makes a browser send GET."""

    def routes(self) -> list[Route]:
        return [
            Route(path, json_endpoint(_handler(self._ctx, verb)), methods=["POST"])
            for path, verb in AS_THEY_ARE.items()
        ]


Verbs.OPENAPI = {f"POST {path}": _operation(verb) for path, verb in AS_THEY_ARE.items()}
_FOR_EVERYBODY = {path for verb in VERBS.values() if not verb.admin for path in verb.paths}
ORDERS = frozenset(
    path
    for method, _, path in (key.partition(" ") for key in {**Verbs.OPENAPI, **_OTHERS})
    if method == "POST" and path not in {*_FOR_EVERYBODY, *OF_REQUESTS}
)
"""The paths that need the admin key (see Access): all that are not explicitly for every client."""


def _handler(ctx: ServerContext, verb: Verb) -> Callable[[Request], Awaitable[Done]]:
    body = body_of(verb)
    owned = any(one.name == "owner" for one in parameters(verb))

    async def serve(request: Request) -> Done:
        values: dict[str, Any] = {}
        if body is not None:
            values = msgspec.structs.asdict(await ctx.body(request, body, empty_ok=_empty_ok(body)))
        if owned:
            values["owner"] = CLIENT.get().owner
        return Done.of(await ctx.control(verb.request(**values)))

    return serve
