"""Paths finds what starlette's Router finds."""

from __future__ import annotations

import pytest
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route, Router
from starlette.testclient import TestClient

from runtime.server.app import Paths


async def said(request: Request) -> PlainTextResponse:
    route = request.scope["route"]
    return PlainTextResponse(f"{route.name} {route.path} {sorted(request.path_params.items())}")


ROUTES = [
    Route("/models", said, name="models"),
    Route("/models", said, methods=["POST"], name="made"),
    Route("/models", said, name="never"),
    Route("/models/{name:path}", said, name="one"),
    Route("/{any}", said, methods=["PUT"], name="any"),
    Route("/put", said, name="put"),
]


@pytest.mark.parametrize("root_path", ["", "/under"])
def test_the_same_route_is_found(root_path: str) -> None:
    one, other = (TestClient(kind(ROUTES), root_path=root_path) for kind in (Paths, Router))
    for path in (
        "/models",
        "/models/",
        "/models/a/b",
        "/put",
        "/put/",
        "/none",
        "/",
        "//models",
        "/under/models",
    ):
        for method in ("GET", "HEAD", "POST", "PUT", "DELETE"):
            found, wanted = one.request(method, path), other.request(method, path)
            assert (found.status_code, found.text) == (wanted.status_code, wanted.text), (method, path)
            assert found.headers.get("allow") == wanted.headers.get("allow")
