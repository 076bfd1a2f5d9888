"""States in notebooks, and their calls as diagrams."""

from __future__ import annotations

import asyncio
import base64
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import sglang_dsl as sgl
from sglang_dsl import BadProgram, MockBackend, gen, select
from sglang_dsl.backends.base import Call, Completion
from sglang_dsl.conversation.transcript import Generation, Transcript
from sglang_dsl.ir import Gen
from sglang_dsl.views import html
from sglang_dsl.views.snapshot import Snapshot
from tests.unit.sglang_dsl.views.seen_html import Seen


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
    seen = Seen(state._repr_html_())
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
    assert len(seen.told) == 3
    assert all("completion tokens" in told for told in seen.told)


def test_failures_stand_below_and_tracing_shows_too() -> None:
    @sgl.function
    def fails(s: Any) -> None:
        s += sgl.system("Be brief.") + sgl.assistant(gen("x"))

    state = fails.run(backend=MockBackend(errors={0: RuntimeError("<b>broken</b>")}))
    seen = Seen(state._repr_html_())
    assert "<b>broken</b>" in seen.shown
    assert "Be brief." in seen.shown
    found: list[str] = []

    @sgl.function
    def shows(s: Any) -> None:
        s += sgl.user("hello") + sgl.assistant(gen("x"))
        found.append(s._repr_html_())

    shows.trace()
    assert "hello" in Seen(found[0]).shown


def test_pictures_in_the_document_are_shown_and_no_others_loaded() -> None:
    png = base64.b64decode("iVBORw0KGgo=")

    @sgl.function
    def look(s: Any) -> None:
        s += sgl.user(sgl.image(png) + sgl.image("https://example.org/<a>.png") + "what?")

    seen = Seen(look.run()._repr_html_())
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

    assert Seen(asyncio.run(main())).marked == ["there"]


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
    seen = Seen(html)
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
    with pytest.raises(BadProgram, match="form must be one of"):
        state.show(form="svg")
    assert state._repr_mimebundle_()["text/vnd.mermaid"] == drawn


class Telling(MockBackend):
    """Tells one generated token for each character, with an alternative, as an engine does."""

    async def generate(self, call: Call) -> Completion:
        done = await super().generate(call)
        text = done.texts[0]
        lists = {
            "output_token_logprobs": [[-0.5, at, char] for at, char in enumerate(text)],
            "output_top_logprobs": [[[-0.5, at, char], [-3.0, 7, HOSTILE]] for at, char in enumerate(text)],
            "output_token_origins": ["forced" if char == "a" else "sampled" for char in text],
        }
        return Completion(done.texts, {**done.meta, **lists})


def test_tokens_are_shown_with_what_they_might_have_been() -> None:
    @sgl.function
    def twice(s: Any) -> None:
        for _ in range(2):  # the same name again: each text has its own tokens
            s += sgl.assistant(gen("x"))

    answers = iter(["ab<", "b\n"])
    seen = Seen(twice.run(backend=Telling(lambda call: next(answers)))._repr_html_())
    assert seen.marked == ["ab<", "b\n"]
    assert len(seen.told) == 5
    own, other = seen.told[0].splitlines()
    assert own == ' 60.7%  "a"  forced'
    assert other.startswith('  5.0%  "<script>alert(')
    assert "1 forced" in seen.shown
    assert "2 tokens, the stronger" in seen.shown


TEXT = st.text(max_size=12)


@given(TEXT, TEXT, TEXT, st.lists(st.tuples(TEXT, TEXT, TEXT), max_size=6))
def test_whatever_tokens_are_told_the_page_is_safe(
    name: str, pattern: str, text: str, told: list[tuple[str, str, str]]
) -> None:
    """Names, constraints, texts, tokens, alternatives, origins: all of them may be anybody's."""
    meta = {
        "output_token_logprobs": [[-0.5, 1, token] for token, _, _ in told],
        "output_top_logprobs": [[[-2.0, 2, other]] for _, other, _ in told],
        "output_token_origins": [origin for _, _, origin in told],
    }
    said = Transcript.EMPTY.open("assistant").say(
        text, chosen=name, generation=Generation(Gen(name, regex=pattern), meta)
    )
    seen = Seen(html.page(Snapshot(name, said)).replace("\0", "").replace("\r", ""))
    assert seen.marked == [text.replace("\0", "").replace("\r", "")]


def test_what_generations_are_held_to_is_shown() -> None:
    @sgl.function
    def held(s: Any) -> None:
        s += sgl.assistant(gen("a", regex="<b>|x") + gen("n", int) + select("c", ["<p>", "q"]))

    seen = Seen(held.run(backend=MockBackend())._repr_html_())
    assert "regex <b>|x" in seen.shown
    assert "int" in seen.shown
    assert "select <p> | q" in seen.shown
    assert any('"<p>"' in told and "%" in told for told in seen.told)


def test_forks_that_nobody_joined_are_shown() -> None:
    @sgl.function
    def races(s: Any) -> None:
        s += "begin "
        forks = s.fork(2)
        forks += gen("x")
        kept.append(forks)
        forks[0].sync()
        forks[1].sync()
        s += "end"

    kept: list[Any] = []
    shown = Seen(races.run(backend=MockBackend(["one", "two"]))._repr_html_()).shown
    assert shown.index("begin") < shown.index("one") < shown.index("two") < shown.index("end")


def test_a_group_is_shown_side_by_side() -> None:
    @sgl.function
    def forks_it(s: Any) -> None:
        s += sgl.user("?") + sgl.assistant(gen("before"))
        forks = s.fork(3)
        forks += sgl.user("and") + sgl.assistant(gen("x"))
        kept.append(forks)

    kept: list[Any] = []
    answers = iter(["first", "one", HOSTILE, "three"])
    state = forks_it.run(backend=MockBackend(lambda call: next(answers)))
    seen = Seen(kept[0]._repr_html_())
    assert sorted(seen.marked) == sorted(["one", HOSTILE, "three"])
    assert "branch 2" in seen.shown
    assert "3 calls" in seen.shown
    assert repr(kept[0]) == "ProgramStateGroup(3 forks)"
    assert kept[0]._repr_mimebundle_()["text/vnd.mermaid"].count("gen x") == 3
    state.sync()


def test_calls_of_the_slower_of_a_group_are_shown() -> None:
    @sgl.function
    def forks_it(s: Any) -> None:
        forks = s.fork(2)
        forks[0] += "quick" + gen("x")
        forks[1] += "slow" + gen("x")
        kept.append(forks)

    def answer(call: Call) -> str:
        time.sleep(0.3 if str(call.prompt).endswith("slow") else 0.0)
        return "said"

    kept: list[Any] = []
    state = forks_it.run(backend=MockBackend(answer))
    assert "2 calls" in Seen(kept[0]._repr_html_()).shown
    state.sync()


def test_a_running_state_is_waited_for_and_its_bundle_is_not() -> None:
    @sgl.function
    def slow(s: Any) -> None:
        s += sgl.user("hi") + sgl.assistant(gen("x"))

    state = slow.stream(backend=MockBackend(["there"], delay_s=0.7))
    assert state._repr_mimebundle_() == {} or "there" in state._repr_mimebundle_()["text/html"]
    assert Seen(state._repr_html_()).marked == ["there"]
    with pytest.raises(NotImplementedError):  # nobody looks on: IPython shows the page as it is
        state._ipython_display_()


def test_what_is_under_way_is_shown_last() -> None:
    @sgl.function
    def stops(s: Any) -> None:
        s += sgl.user("hi") + sgl.assistant(gen("x"))

    state = stops.stream(backend=MockBackend(["some words that come one by one"] * 2, chunk_delay_s=3600))
    for _ in state.text_iter("x"):
        break
    seen = state.snapshot()
    assert seen.running
    assert seen.partial
    assert "some words that come one by one".startswith(seen.partial)
    assert Seen(html.page(seen)).marked == [seen.partial]
    state.cancel()
