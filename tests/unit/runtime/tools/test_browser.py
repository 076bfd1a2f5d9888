"""The browser tool over a folder, and over a search engine that a real HTTP server plays."""

from __future__ import annotations

import asyncio
import ipaddress
import json
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.protocol.errors import BadRequest
from runtime.tools import DemoToolServer, ToolResult, ToolServerError
from runtime.tools.documents import NotReadable, SearchEngine
from runtime.tools.fetch import is_public

RIVER = "\n".join(["# Rivers of Ostrel", "", "The river Sarn runs through Ostrel.", *map(str, range(300))])
PAGE = """<html><head><title>Mount
Thal</title><style>p {}</style></head><body><p>Thal is a mountain &amp; a name.</p>
<script>var hidden = 1</script><ul><li>Snow</li><li>Rock</li></ul></body></html>"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    root = tmp_path / "documents"
    (root / "deep").mkdir(parents=True)
    (root / "rivers.md").write_text(RIVER)
    (root / "deep" / "thal.html").write_text(PAGE)
    (root / "bread.txt").write_text("Bread\nFlour and water. A river is not needed.\n")
    (root / "서울.txt").write_text("서울 안내\n한강은 서울을 지난다. 東京都は別の町。")
    (root / "ignored.bin").write_bytes(b"river \xff")
    (tmp_path / "secret.txt").write_text("the river's secret")
    (root / "link.txt").symlink_to(tmp_path / "secret.txt")
    return root


def asked(documents: str | Path, *calls: tuple[str, dict[str, object]]) -> list[ToolResult]:
    async def run() -> list[ToolResult]:
        async with DemoToolServer(str(documents)).get_tool_session("browser") as session:
            return [await session.call(name, arguments) for name, arguments in calls]

    return asyncio.run(asyncio.wait_for(run(), 100))


def test_a_folder_is_searched_and_read(folder: Path) -> None:
    found, opened, more, line, by_place, none = asked(
        folder,
        ("search", {"query": "Which river runs through Ostrel?"}),
        ("open", {"id": 0, "num_lines": 3}),
        ("open", {"loc": 302}),
        ("find", {"pattern": "THE RIVER", "cursor": 1}),
        ("open", {"id": "bread.txt"}),
        ("search", {"query": "zebra"}),
    )
    assert found.text == (
        "[0] Results for 'Which river runs through Ostrel?' (search), lines 0 to 3 of 4\n"
        "[0] Rivers of Ostrel (rivers.md)\n    The river Sarn runs through Ostrel.\n"
        "[1] Bread (bread.txt)\n    Flour and water. A river is not needed."
    )
    assert opened.text == (
        "[1] Rivers of Ostrel (rivers.md), lines 0 to 2 of 303\n"
        "# Rivers of Ostrel\n\nThe river Sarn runs through Ostrel."
    )
    assert more.text == "[2] Rivers of Ostrel (rivers.md), lines 302 to 302 of 303\n299"
    assert line.text == "Rivers of Ostrel (rivers.md)\nL2: The river Sarn runs through Ostrel."
    assert by_place.text.endswith("Bread\nFlour and water. A river is not needed.")
    assert none == ToolResult("nothing was found for 'zebra'")


def test_pages_and_other_scripts(folder: Path) -> None:
    found, page, city, town = asked(
        folder,
        ("search", {"query": "mountain"}),
        ("open", {"id": "0"}),
        ("search", {"query": "한강은", "topn": 1}),
        ("search", {"query": "京"}),
    )
    assert "Mount Thal (deep/thal.html)" in found.text
    assert page.text.splitlines()[1:] == ["Thal is a mountain & a name.", "Snow", "Rock"]
    assert "서울.txt" in city.text
    assert "서울.txt" in town.text


@pytest.mark.parametrize(
    ("name", "arguments", "told"),
    [
        ("search", {}, "query is missing"),
        ("search", {"query": "river", "topn": []}, "topn is a whole number"),
        ("open", {"id": 5}, "there is no number 5 here; there are 1 from 0 on"),
        ("open", {"id": "../secret.txt"}, "not among the documents"),
        ("open", {"id": "rivers.md", "cursor": 0.5e400}, "not among"),
        ("open", {"id": True}, "id is a whole number"),
        ("open", {"cursor": float("inf")}, "cursor is a whole number"),
        ("find", {"pattern": "zebra"}, "'zebra' is not on the page"),
        ("click", {}, "there is no tool 'click'; there are search, open, find"),
    ],
)
def test_what_is_wrong_is_told(folder: Path, name: str, arguments: dict[str, object], told: str) -> None:
    _, found = asked(folder, ("search", {"query": "mountain"}), (name, arguments))
    assert found.is_error == (name != "find")
    assert told in found.text


def test_nothing_is_open_at_first(folder: Path) -> None:
    assert all(one.is_error for one in asked(folder, ("open", {}), ("find", {"pattern": "a"})))


def test_links_out_of_the_folder_are_not_followed(folder: Path) -> None:
    [found] = asked(folder, ("search", {"query": "secret"}))
    assert "nothing was found" in found.text


class Web(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        parts, own = urlsplit(self.path), f"http://{self.headers['host']}"
        status, kind, body = 200, "text/html; charset=utf-8", PAGE
        match parts.path:
            case "/search":
                query = parse_qs(parts.query)["q"][0]
                places = [
                    f"{own}/page",
                    f"{own}/moved",
                    "http://127.0.0.2:1/",
                    "file:///etc/passwd",
                    f"{own}/round",
                ]
                results = [{"url": place, "title": query, "content": "Snow"} for place in places]
                kind, body = "application/json", json.dumps({"results": results})
                body = "[]" if query == "broken" else body
                status = 500 if query == "down" else 200
            case "/moved":
                status = 302
            case "/to-changing":
                status = 302
            case "/round":
                status = 307
        self.send_response(status)
        self.send_header("content-type", kind)
        if status in (302, 307):
            changing = f"http://changing.test:{self.server.server_address[1]}/page"
            places = {"/moved": "/page", "/round": "/round", "/to-changing": changing}
            self.send_header("location", places[parts.path])
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def engine() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Web) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/search?q={{query}}&format=json"
        server.shutdown()
        thread.join()


def test_a_search_engine(engine: str) -> None:
    found, page, moved, inside, file, endless, broken, down = asked(
        engine,
        ("search", {"query": "Thal & snow?"}),
        ("open", {"id": 0}),
        ("open", {"id": 1}),
        ("open", {"id": 2}),
        ("open", {"id": 3}),
        ("open", {"id": 4}),
        ("search", {"query": "broken"}),
        ("search", {"query": "down"}),
    )
    assert "[0] Thal & snow? (http://127.0.0.1:" in found.text
    for one in (page, moved):
        assert "Thal is a mountain & a name.\nSnow\nRock" in one.text
    for one, told in (
        (inside, "without a public address"),
        (file, "is not an http(s) URL"),
        (endless, "redirects too many times"),
        (broken, "not what it should be"),
        (down, "500"),
    ):
        assert one.is_error
        assert told in one.text
        assert len(one.text.splitlines()) == 1


def test_a_page_is_read_from_the_address_that_was_checked(
    engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A name that is public when it is looked at, and this machine when it is connected to (DNS rebinding);
    it is asked directly, and as the end of a redirect."""
    port = urlsplit(engine).port
    public, answers, real = "192.0.9.1", [], socket.getaddrinfo

    def changing(name: object, *rest: Any, **more: Any) -> Any:
        if name == "changing.test":
            answers.append(public if len(answers) % 2 == 0 else "127.0.0.1")
            name = answers[-1]
        return real(name, *rest, **more)

    connected: list[str] = []

    class Transport(httpx.AsyncHTTPTransport):
        async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
            connected.append(request.url.host)
            if request.url.host == public:
                assert request.headers["host"] == f"changing.test:{port}"
                assert request.extensions["sni_hostname"] == "changing.test"
                raise httpx.ConnectError("no packet leaves this machine")
            return await super().handle_async_request(request)

    monkeypatch.setattr(socket, "getaddrinfo", changing)
    monkeypatch.setattr(httpx, "AsyncHTTPTransport", Transport)
    for page in (f"http://changing.test:{port}/page", f"http://127.0.0.1:{port}/to-changing"):
        with pytest.raises(NotReadable, match="cannot be fetched: ConnectError"):
            asyncio.run(SearchEngine(engine).read(page))
        assert answers == [public]
        assert connected[-1] == public
        answers.clear()


OUTER = st.one_of(
    st.just("::ffff:{inner}"), st.just("::{inner}"), st.just("::ffff:0:{inner}"), st.just("64:ff9b::{inner}"),
    st.just("2002:{hex}::"), st.just("2002:{hex}:1:2:3:4:5"),
)  # fmt: skip


@given(outer=OUTER, inner=st.ip_addresses(v=4))
def test_an_address_inside_an_address_decides(outer: str, inner: ipaddress.IPv4Address) -> None:
    number = int(inner)
    address = outer.format(inner=inner, hex=f"{number >> 16:x}:{number & 0xFFFF:x}")
    assert is_public(address) == (inner.is_global and not inner.is_multicast)


@given(inner=st.ip_addresses(v=4), last=st.sampled_from(["0:5efe", "200:5efe"]))
def test_isatap_is_public_where_both_are(inner: ipaddress.IPv4Address, last: str) -> None:
    assert is_public(f"2600:1:2:3:{last}:{inner}") == (inner.is_global and not inner.is_multicast)
    assert not is_public(f"fe80::{last}:{inner}")
    assert not is_public(f"64:ff9b:1::{inner}")
    # Teredo: of the server, and of the client with its bits turned round.
    number = int(inner)
    assert not is_public(f"2001:0:{number >> 16:x}:{number & 0xFFFF:x}::1")


@pytest.mark.parametrize(
    ("address", "public"),
    [
        ("8.8.8.8", True), ("2606:4700::1111", True), ("127.0.0.1", False), ("10.0.0.1", False),
        ("::", False), ("::1", False), ("fe80::1%eth0", False), ("fec0::1", False), ("ff0e::1", False),
        ("224.0.0.1", False), ("100.64.0.1", False), ("169.254.169.254", False),
    ],
)  # fmt: skip
def test_plain_addresses(address: str, public: bool) -> None:
    assert is_public(address) == public


def test_what_there_is(folder: Path) -> None:
    server = DemoToolServer(str(folder))
    assert server.names() == ["python", "browser"]
    browser = server.get_tool_description("browser")
    assert browser is not None
    assert [tool.name for tool in browser.tools] == ["search", "open", "find"]
    assert DemoToolServer().names() == ["python"]
    assert not DemoToolServer().has_tool("browser")
    assert DemoToolServer().get_tool_description("browser") is None
    with pytest.raises(ToolServerError, match="there is no tool 'browser'; known: python"):
        DemoToolServer().get_tool_session("browser")
    with pytest.raises(BadRequest, match="there is no folder"):
        DemoToolServer(str(folder / "none"))
    with pytest.raises(BadRequest, match="a search URL has"):
        DemoToolServer("https://search.example/")
