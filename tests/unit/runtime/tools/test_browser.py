"""The browser tool over a folder, and over a search engine that a real HTTP server plays."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest

from runtime.protocol.errors import BadRequest
from runtime.tools import DemoToolServer, ToolResult, ToolServerError

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
            case "/round":
                status = 307
        self.send_response(status)
        self.send_header("content-type", kind)
        if status in (302, 307):
            self.send_header("location", "/page" if status == 302 else "/round")
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
        (inside, "is not a public address"),
        (file, "is no page of the web"),
        (endless, "leads to ever other pages"),
        (broken, "not what it should be"),
        (down, "500"),
    ):
        assert one.is_error
        assert told in one.text
        assert len(one.text.splitlines()) == 1


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
