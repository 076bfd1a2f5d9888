"""States in notebooks, and their calls as diagrams."""

from __future__ import annotations

import asyncio
import base64
from html.parser import HTMLParser
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import sglang_dsl as sgl
from sglang_dsl import BadProgram, MockBackend, gen

VOID = {"img"}
KNOWN = {"div", "mark", "sub", "details", "summary", "table", "tr", "td", "th", "code", "img"}


class Reader(HTMLParser):
    """What a browser would see: tags that close in order, no scripts, nothing to load."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.shown = ""
        self.marked: list[str] = []
        self.titles: list[str] = []
        self.pictures: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag in KNOWN
        given = dict(attrs)
        assert set(given) <= {"style", "title", "open", "src", "alt"}
        assert "url(" not in str(given.get("style"))
        if "src" in given:
            assert str(given["src"]).startswith("data:image/")
            self.pictures.append(str(given["src"]))
        if "title" in given:
            self.titles.append(str(given["title"]))
        if tag not in VOID:
            self.open.append(tag)
        if tag == "mark":
            self.marked.append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.shown += data
        if "mark" in self.open:
            self.marked[-1] += data


@sgl.function
def program(s: Any, said: str) -> None:
    s += sgl.system("Be brief.") + sgl.user(said)
    s += sgl.assistant(gen("answer"))
    forks = s.fork(2)
    for index, fork in enumerate(forks):
        fork += sgl.user(f"part {index}") + sgl.assistant(gen("part"))
    forks.join()
    s += "loose"


HOSTILE = '<script>alert("1")</script><img src=x onerror=y> & \'"</mark></div>'


def test_turns_values_forks_and_usage_are_there_and_escaped() -> None:
    state = program.run(HOSTILE, backend=MockBackend(lambda call: HOSTILE))
    seen = Reader(state._repr_html_())
    assert seen.marked == [HOSTILE] * 3
    assert seen.shown.count(HOSTILE) == 4
    for word in (
        "Be brief.",
        "assistant",
        "fork, 2 branches",
        "branch 1",
        "part 1",
        "loose",
        "3 calls",
        "total",
    ):
        assert word in seen.shown
    assert len(seen.titles) == 1  # of "answer"; which call a "part" is from its text does not tell
    assert "completion tokens" in seen.titles[0]


def test_failures_stand_below_and_tracing_shows_too() -> None:
    @sgl.function
    def fails(s: Any) -> None:
        s += sgl.system("Be brief.") + sgl.assistant(gen("x"))

    state = fails.run(backend=MockBackend(errors={0: RuntimeError("<b>broken</b>")}))
    seen = Reader(state._repr_html_())
    assert "<b>broken</b>" in seen.shown
    assert "Be brief." in seen.shown
    found: list[str] = []

    @sgl.function
    def shows(s: Any) -> None:
        s += sgl.user("hello") + sgl.assistant(gen("x"))
        found.append(s._repr_html_())

    shows.trace()
    assert "hello" in Reader(found[0]).shown


def test_pictures_in_the_document_are_shown_and_no_others_loaded() -> None:
    png = base64.b64decode("iVBORw0KGgo=")

    @sgl.function
    def look(s: Any) -> None:
        s += sgl.user(sgl.image(png) + sgl.image("https://example.org/<a>.png") + "what?")

    seen = Reader(look.run()._repr_html_())
    assert len(seen.pictures) == 1
    assert "[image: https://example.org/<a>.png]" in seen.shown


def test_an_async_state_shows_what_there_is_without_waiting() -> None:
    @sgl.function
    async def quick(s: Any) -> None:
        s += sgl.user("hi") + sgl.assistant(gen("x"))
        await s["x"]

    async def main() -> str:
        state = await quick.arun(backend=MockBackend(["there"]))
        html: str = state._repr_html_()
        return html

    assert Reader(asyncio.run(main())).marked == ["there"]


@given(st.lists(st.text(max_size=20), max_size=4), st.text(max_size=20))
def test_any_text_is_shown_as_it_is(texts: list[str], value: str) -> None:
    @sgl.function
    def any_text(s: Any) -> None:
        for text in texts:
            s += sgl.user(text)
        s += sgl.assistant(gen("x"))

    # NUL is no character of HTML, and carriage returns are line ends there.
    clean = [text.replace("\0", "").replace("\r", "") for text in texts]
    html = any_text.run(backend=MockBackend([value]))._repr_html_().replace("\0", "").replace("\r", "")
    seen = Reader(html)
    assert seen.marked == [value.replace("\0", "").replace("\r", "")]
    assert all(text in seen.shown for text in clean)


def test_the_calls_of_a_run_as_diagrams(capsys: pytest.CaptureFixture[str]) -> None:
    state = program.run("hi", backend=MockBackend())
    state.show(form="mermaid")
    drawn = capsys.readouterr().out
    assert drawn.startswith("---\ntitle:")
    assert drawn.count("gen part") == 2
    assert "n0 --> n1" in drawn
    state.show(form="dot")
    assert capsys.readouterr().out.startswith("digraph")
    state.show()
    assert "fork, 2 branches" in capsys.readouterr().out
    with pytest.raises(BadProgram, match="form is one of"):
        state.show(form="svg")
