"""The pages of a server: an overview (/, also as JSON), its API (/docs, /openapi.json) and the viewer
(/viewer).

They are the same for all clients: browsers send no key by themselves. The viewer fetches what it shows, with
a key if one is needed.
"""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from runtime import viewer
from runtime.protocol.console import version
from runtime.server.context import RouteGroup, ServerContext, json_endpoint
from runtime.server.http.errors import json_response

NAME = "sglang-dsl runtime"
WHAT = "Serves a language model, with the APIs of OpenAI, Anthropic and Ollama besides its own."
LINKS = {
    "/viewer": "Viewer: recent requests, the prefix cache, and files with runs of programs",
    "/docs": "API: what each route takes",
    "/openapi.json": "API as an OpenAPI document",
    "/server_info": "Options and counters of this server",
    "/metrics": "Metrics for Prometheus",
    "/health": "Whether it works",
}


class Pages(RouteGroup):
    """`document`: the OpenAPI document of the other routes. secured: an API key is required."""

    def __init__(self, ctx: ServerContext, document: Mapping[str, Any], *, secured: bool) -> None:
        super().__init__(ctx)
        self._secured, self._document = secured, document
        self._docs = _page(f"{NAME}: API", _api(document))

    def routes(self) -> list[Route]:
        handlers = {
            "/": self.index,
            "/docs": self.docs,
            "/openapi.json": self.openapi,
            "/viewer": self.viewer,
            "/viewer/sources.json": self.sources,
            **{f"/viewer/{name}": self.asset for name in viewer.NAMES},
        }
        return [Route(path, json_endpoint(handler)) for path, handler in handlers.items()]

    async def openapi(self, request: Request) -> Mapping[str, Any]:
        return self._document

    async def index(self, request: Request) -> Any:
        facts = {}
        if not self._secured:  # else neither version nor model is public
            kind = "generates text" if self._ctx.model.is_generation else "makes vectors"
            facts = {"version": version(), "model": self._ctx.served_name, "kind": kind}
        if "text/html" not in request.headers.get("accept", ""):
            links = {path.removeprefix("/").removesuffix(".json"): path for path in LINKS}
            return {"name": NAME, **facts, **links, "routes": sorted(self._document["paths"])}
        rows = "".join(f"<dt>{escape(key)}<dd>{escape(value)}" for key, value in facts.items())
        items = "".join(f'<li><a href="{path}">{path}</a> {escape(what)}' for path, what in LINKS.items())
        needs = "<p>Requests need an API key: <code>Authorization: Bearer KEY</code>." * self._secured
        return html_response(_page(NAME, f"<p>{escape(WHAT)}</p>{needs}<dl>{rows}</dl><ul>{items}</ul>"))

    async def docs(self, request: Request) -> Response:
        return html_response(self._docs)

    async def viewer(self, request: Request) -> Response:
        return html_response(viewer.asset(viewer.PAGE)[0])

    async def sources(self, request: Request) -> Response:
        sources = viewer.Sources(
            title=NAME, requests="/recent_requests", radix="/radix_tree", wants_key=self._secured
        )
        return json_response(sources, headers=viewer.HEADERS)

    async def asset(self, request: Request) -> Response:
        body, kind = viewer.asset(request.url.path.rpartition("/")[2])
        return Response(body, headers={**viewer.HEADERS, "content-type": kind})


def html_response(body: str | bytes, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    kind = {"content-type": "text/html; charset=utf-8"}
    return Response(body, status, headers={**viewer.HEADERS, **(headers or {}), **kind})


def wait_page(why: str) -> str:
    """A page that reloads every second, until the server is ready. It needs no other file."""
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{escape(NAME)}</title>'
        '<meta http-equiv="refresh" content="1"><meta name="color-scheme" content="light dark">'
        f"<h1>{escape(NAME)}</h1><p>Please wait: {escape(why)}. This page asks again by itself."
    )


def _page(title: str, body: str) -> str:
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{escape(title)}</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<link rel="icon" href="/viewer/icon.svg"><link rel="stylesheet" href="/viewer/page.css">'
        f'<body class="plain"><main><h1>{escape(title)}</h1>{body}</main></body></html>'
    )


def _api(document: Mapping[str, Any]) -> str:
    """All operations by tag, with their parameters and the fields of their bodies."""
    tags: dict[str, list[str]] = {}
    for path, item in document["paths"].items():
        for method, operation in item.items():
            fields = _fields(operation, document["components"]["schemas"])
            shown = _operation(method.upper(), path, operation, fields)
            tags.setdefault(operation["tags"][0], []).append(shown)
    parts = ['<p>The same as data: <a href="/openapi.json">/openapi.json</a>.</p>']
    for tag, operations in tags.items():
        parts += [f"<h2>{escape(tag)}</h2>", *operations]
    return "".join(parts)


def _fields(operation: Mapping[str, Any], schemas: Mapping[str, Any]) -> list[str]:
    """The names of the fields that the body of a request may have."""
    content = operation.get("requestBody", {}).get("content", {})
    schema = content.get("application/json", {}).get("schema", {})
    if "$ref" in schema:
        schema = schemas[schema["$ref"].rpartition("/")[2]]
    return list(schema.get("properties", ()))


def _operation(method: str, path: str, operation: Mapping[str, Any], fields: list[str]) -> str:
    names = [f"{one['name']} ({one['in']})" for one in operation.get("parameters", ())]
    rows = [
        f"<dt>{title}<dd>{', '.join(f'<code>{escape(one)}</code>' for one in listed)}"
        for title, listed in (("parameters", names), ("body", fields))
        if listed
    ]
    what = f"<code><b>{method}</b> {escape(path)}</code> {escape(operation['summary'])}"
    return f"<details><summary>{what}</summary><dl>{''.join(rows)}</dl></details>"
