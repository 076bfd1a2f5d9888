"""separate_reasoning: thoughts and answers in variables of their own, streamed or not, with several samples,
next to text, and what later turns see of them."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import sglang_dsl as sgl
from sglang_dsl.errors import BadProgram

REPLY = "<think>\nwell, 2 + 2\n</think>\n\nIt is 4."


@sgl.function
def solve(s: Any) -> None:
    s += sgl.user("2 + 2?")
    s += sgl.assistant("So: " + sgl.separate_reasoning(sgl.gen("a"), "qwen3") + " Done.")
    s += sgl.user("Sure?")
    s += sgl.separate_reasoning(sgl.assistant(sgl.gen("b")), "qwen3")


def check(state: Any, backend: sgl.MockBackend) -> None:
    assert (state["a"], state["a_reasoning_content"]) == ("It is 4.", "well, 2 + 2")
    assert (state["b"], state["b_reasoning_content"]) == ("Yes.", "")
    # Text around it stays, and the turns end where they end.
    assert state.text() == ("USER: 2 + 2?\nASSISTANT: So: It is 4. Done.\nUSER: Sure?\nASSISTANT: Yes.\n")
    assert [turn["content"] for turn in state.messages()] == ["2 + 2?", "So: It is 4. Done.", "Sure?", "Yes."]
    # What a later turn is given: the answer, and the thoughts where a template wants them.
    second = backend.calls[1].prompt.messages
    assert second[1].content == "So: It is 4. Done."
    assert second[1].reasoning_content == "well, 2 + 2"


def test_answers_and_thoughts_are_apart() -> None:
    backend = sgl.MockBackend([REPLY, "Yes."])
    check(solve.run(backend=backend), backend)


@given(st.sets(st.integers(0, 40), max_size=8))
def test_streams_are_apart_too_however_they_are_cut(cuts: set[int]) -> None:
    backend = sgl.MockBackend([REPLY, "Yes."], split=sorted(cuts))
    state = solve.stream(backend=backend)
    assert "".join(state.text_iter("a")) == "It is 4."
    assert "".join(state.text_iter("a_reasoning_content")) == "well, 2 + 2"
    assert "".join(state.text_iter()) == state.text()
    check(state, backend)


def test_two_generations_in_one_turn_see_what_was_thought() -> None:
    @sgl.function
    def program(s: Any) -> None:
        with s.assistant():
            s += sgl.separate_reasoning(sgl.gen("a") + " then " + sgl.gen("b"), "deepseek-r1")

    backend = sgl.MockBackend(["one</think>A", "two</think>B"])
    state = program.run(backend=backend)
    assert (state["a"], state["b"]) == ("A", "B")
    assert (state["a_reasoning_content"], state["b_reasoning_content"]) == ("one", "two")
    # The turn is open: the model goes on from what it really wrote.
    assert backend.calls[1].prompt.messages[0].content == "one</think>A then "
    assert state.text() == "ASSISTANT: A then B\n"


def test_samples_typed_values_and_async() -> None:
    @sgl.function
    async def program(s: Any) -> Any:
        s += sgl.user("n?") + sgl.assistant(sgl.separate_reasoning(sgl.gen("n", int, n=2), "qwen3"))
        return await s["n"], await s["n_reasoning_content"]

    replies: Any = [["<think>a</think>4", "<think>b</think>5"]]
    assert asyncio.run(program.arun(backend=sgl.MockBackend(replies))).ret_value == ([4, 5], ["a", "b"])


def test_unclosed_thoughts_failures_and_unnamed_generations() -> None:
    @sgl.function
    def program(s: Any) -> None:
        s += sgl.user("?") + sgl.assistant(sgl.separate_reasoning(sgl.gen("x"), "deepseek-r1"))

    cut = program.run(backend=sgl.MockBackend(["still thinking"]))
    assert (cut["x"], cut["x_reasoning_content"]) == ("", "still thinking")
    failed = program.run(backend=sgl.MockBackend(errors={0: OSError("down")}))
    with pytest.raises(sgl.ProgramError, match="down"):
        failed["x_reasoning_content"]

    @sgl.function
    def unnamed(s: Any) -> None:
        s += sgl.user("?") + sgl.assistant(sgl.separate_reasoning(sgl.gen(), "qwen3"))

    assert unnamed.run(backend=sgl.MockBackend([REPLY])).text().endswith("ASSISTANT: It is 4.\n")


def test_auto_takes_the_marks_that_the_text_shows_and_unknown_kinds_are_refused() -> None:
    @sgl.function
    def program(s: Any) -> None:
        s += sgl.user("?") + sgl.assistant(sgl.separate_reasoning(sgl.gen("x")))

    state = program.run(backend=sgl.MockBackend(["[THINK]hm[/THINK]yes"]))
    assert (state["x"], state["x_reasoning_content"]) == ("yes", "hm")
    with pytest.raises(BadProgram, match="unknown kind of reasoning 'quen'"):
        sgl.separate_reasoning(sgl.gen("x"), "quen")
    with pytest.raises(BadProgram, match="takes gen"):
        sgl.separate_reasoning("text")  # type: ignore[arg-type]
