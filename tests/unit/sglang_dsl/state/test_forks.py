"""Forks: sharing, joining, and a constant number of threads."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

import sglang_dsl as sgl
from sglang_dsl import BadProgram, MockBackend, gen


def echo(call: Any) -> str:
    return "<" + str(call.prompt.plain_text)[-3:] + ">"


def test_gather_makes_lists_in_order() -> None:
    @sgl.function
    def program(s: Any) -> None:
        s += "p "
        forks = s.fork(3)
        assert len(forks) == 3
        forks += lambda i: f"b{i}:" + gen("x")
        for i, fork in enumerate(forks):
            fork += f" {i}"
            if i != 1:
                fork += gen("some")
        forks[2] += gen("last")
        forks.join()
        s += "then " + gen("y")

    mock = MockBackend(echo, delay_s=0.001)
    state = program.run(backend=mock)
    assert state["x"] == ["<b0:>", "<b1:>", "<b2:>"]
    assert len(state["some"]) == 2
    assert len(state["last"]) == 1
    assert state.text() == "p then <en >"
    assert state.usage()["calls"] == 3 + 2 + 1 + 1
    assert state.usage()["prompt_tokens"] == mock.usage.prompt_tokens


def test_nested_joins_give_nested_lists() -> None:
    @sgl.function
    def program(s: Any) -> None:
        outer = s.fork(2)
        for o, branch in enumerate(outer):
            inner = branch.fork(2)
            inner += lambda i, o=o: f"{o}{i}" + gen("x")
            inner.join()
        outer.join()

    assert program.run(backend=MockBackend(echo))["x"] == [["<00>", "<01>"], ["<10>", "<11>"]]


def test_a_name_the_parent_has_is_gathered_too_when_branches_set_it() -> None:
    @sgl.function
    def program(s: Any) -> None:
        s += gen("x")
        s.set_var("kept", 1)
        for _ in range(2):
            forks = s.fork(2)
            forks += lambda i: f" {i}" + gen("x")
            forks.join()

    state = program.run(backend=MockBackend(["r", "a", "b", "c", "d"]))
    assert state["x"] == ["c", "d"]
    assert state["kept"] == 1


def test_branches_inherit_variables_meta_and_an_open_turn() -> None:
    @sgl.function
    def program(s: Any) -> Any:
        s += sgl.user("q")
        s += sgl.assistant_begin()
        s += gen("a")
        forks = s.fork(2)
        forks += " more" + gen("b")
        forks += sgl.assistant_end()
        return forks

    state = program.run(backend=MockBackend(["first", "second", "third"]))
    forks = state.ret_value
    assert forks[0]["a"] == "first"
    assert forks[0].get_meta_info("a")["completion_tokens"] == 1
    assert [f.messages()[-1]["content"] for f in forks] == ["first moresecond", "first morethird"]
    # The parent's turn is still open.
    state += "!" + sgl.assistant_end()
    assert state.messages()[-1]["content"] == "first!"


def test_concatenate_adds_what_the_branches_said() -> None:
    @sgl.function
    def program(s: Any) -> None:
        s += sgl.user_begin() + "docs:"
        forks = s.fork(3)
        forks += lambda i: f"\n[{i}] " + gen(f"d{i}")
        forks.join("concate_and_append")
        s += "\nQuestion?" + sgl.user_end() + sgl.assistant(gen("a"))

    mock = MockBackend(["x", "y", "z", "answer"])
    state = program.run(backend=mock)
    assert state.messages()[0]["content"] == "docs:\n[0] x\n[1] y\n[2] z\nQuestion?"
    assert state["a"] == "answer"
    assert mock.calls[-1].prompt.messages[0].content == "docs:\n[0] x\n[1] y\n[2] z\nQuestion?"


def test_concatenated_branches_may_hold_whole_turns() -> None:
    @sgl.function
    def program(s: Any) -> None:
        forks = s.fork(2)
        forks += lambda i: sgl.user(f"q{i}") + sgl.assistant(gen("a"))
        forks.join(mode="concate_and_append")

    state = program.run(backend=MockBackend(["one", "two"]))
    assert [m["content"] for m in state.messages()] == ["q0", "one", "q1", "two"]


def test_copy_brings_variables_back_and_leaves_the_text() -> None:
    @sgl.function
    def program(s: Any) -> None:
        s += "a"
        with s.copy() as tmp:
            tmp += "b" + gen("x")
        with pytest.raises(LookupError), s.copy() as tmp:
            raise LookupError

    state = program.run(backend=MockBackend(["v"]))
    assert state["x"] == ["v"]
    assert state.text() == "a"


def test_additions_to_a_group() -> None:
    @sgl.function
    def program(s: Any) -> Any:
        forks = s.fork(2)
        forks += "text "
        forks += gen("x")
        forks += [" one", " " + gen("y")]
        with pytest.raises(BadProgram, match="3 additions for 2 forks"):
            forks += ["a", "b", "c"]
        with pytest.raises(TypeError, match="forks take text"):
            forks += 3
        with pytest.raises(BadProgram, match="cannot be replaced"):
            forks[0] = forks[1]
        with pytest.raises(BadProgram, match="unknown join mode"):
            forks.join("other")
        return [f.text() for f in forks]

    assert program.run(backend=MockBackend(["r"] * 3)).ret_value == ["text r one", "text r r"]


@pytest.mark.parametrize("size", [0, -1, 1.5, True, "2"])
def test_wrong_sizes(size: Any) -> None:
    with pytest.raises(BadProgram, match="at least 1"):
        sgl.function(lambda s: s.fork(size)).run()


def test_the_shared_prefix_is_committed_once_before_the_branches_generate() -> None:
    order: list[str] = []

    class Watching(MockBackend):
        async def commit(self, prompt: Any) -> None:
            await super().commit(prompt)
            order.append("commit " + str(prompt.plain_text))

        async def generate(self, call: Any) -> Any:
            order.append("generate")
            return await super().generate(call)

    @sgl.function
    def program(s: Any, size: int, text: str = "shared ") -> None:
        s += text
        forks = s.fork(size)
        forks += lambda i: str(i) + gen("x")
        forks.join()

    program.run(4, backend=Watching()).sync()
    assert order == ["commit shared ", *["generate"] * 4]
    order.clear()
    program.run(1, backend=Watching()).sync()
    program.run(3, text="", backend=Watching()).sync()
    assert order == ["generate"] * 4


def test_a_failed_commit_reaches_the_branches_with_its_place() -> None:
    class NoRoom(MockBackend):
        async def commit(self, prompt: Any) -> None:
            raise MemoryError("pool is full")

    @sgl.function
    def program(s: Any) -> None:
        s += "shared "
        forks = s.fork(2)
        forks += gen("x")
        forks.join()

    with pytest.raises(sgl.BackendError, match="pool is full") as caught:
        program.run(backend=NoRoom())
    assert caught.value.variable == "x"


def test_a_fork_does_not_wait_for_its_parent() -> None:
    gate = threading.Event()

    async def script(call: Any) -> str:
        while not gate.is_set():
            await asyncio.sleep(0.001)
        return "r"

    @sgl.function
    def program(s: Any) -> Any:
        s += gen("slow")
        forks = s.fork(2)
        forks += gen("x")
        return forks

    state = program.run(backend=MockBackend(script))
    assert not gate.is_set()
    gate.set()
    assert state.ret_value[1].text() == "rr"


def test_threads_do_not_grow_with_forks_or_states() -> None:
    arrived, total = 0, 1000
    all_there = asyncio.Event()

    async def together(call: Any) -> str:
        nonlocal arrived
        arrived += 1
        if arrived == total:
            all_there.set()
        await asyncio.wait_for(all_there.wait(), 60)
        return "r"

    mock = MockBackend(together)

    @sgl.function
    def program(s: Any, size: int) -> Any:
        s += "start "
        forks = s.fork(size)
        forks += gen("x")
        return forks

    program.run(2, backend=MockBackend()).usage()
    # Those of earlier tests may end meanwhile.
    before = set(threading.enumerate())
    states = [program.run(500, backend=mock) for _ in range(2)]
    assert set(threading.enumerate()) <= before
    texts = [fork["x"] for state in states for fork in state.ret_value]
    assert len(texts) == 1000
    assert set(threading.enumerate()) <= before
    assert mock.most_in_flight == total
