"""Paths: which route a request is for, found in one step where the path has no parameters."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.routing import Route, Router
from starlette.types import Receive, Scope, Send


class Paths(Router):
    """A Router of many routes. What it cannot find at once, other methods among it, it looks for as usual."""

    def __init__(self, routes: Sequence[Route]) -> None:
        super().__init__(routes)
        plain = [route for route in reversed(routes) if not route.param_convertors]  # the first one counts
        self._plain = {(method, route.path): route for route in plain for method in route.methods or ()}

    async def app(self, scope: Scope, receive: Receive, send: Send) -> None:
        found = None
        if scope["type"] == "http" and not scope.get("root_path"):
            found = self._plain.get((scope["method"], scope["path"]))
        if found is None:
            await super().app(scope, receive, send)
            return
        scope.update(router=self, route=found, endpoint=found.endpoint, path_params={})
        await found.handle(scope, receive, send)
