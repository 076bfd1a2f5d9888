"""Failures: raised where a value is read, with their place; nothing hangs, nothing leaks."""

from __future__ import annotations

import asyncio
import gc
import inspect
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest

import sglang_dsl as sgl
from runtime.protocol.errors import QueueFull
from sglang_dsl import (
    BackendError,
    MockBackend,
    ProgramCancelled,
    StateClosed,
    Timeout,
    Unsupported,
    gen,
    select,
)
from sglang_dsl.concurrency.loop import background

NEVER_S = 3600.0


def here() -> int:
    """The line after the caller's."""
    frame = inspect.currentframe()
    assert frame is not None
    assert frame.f_back is not None
    return frame.f_back.f_lineno + 1


def test_the_error_names_program_place_variable_backend_and_cause() -> None:
    lines: list[int] = []

    @sgl.function
    def broken(s: Any) -> None:
        s += gen("first")
        built_elsewhere = gen("second", max_tokens=5)
        s += "text"
        lines.append(here())
        s += built_elsewhere
        s += gen("third")

    cause = ConnectionError("line cut")
    state = broken.run(backend=MockBackend(["ok"], errors={1: cause}))
    assert state["first"] == "ok"
    with pytest.raises(BackendError) as caught:
        state["second"]
    error = caught.value
    assert error.program is not None
    assert error.program.endswith("broken")
    assert error.source is not None
    assert (error.source.file, error.source.line) == (__file__, lines[0])
    assert (error.variable, error.backend) == ("second", "mock")
    assert error.node == "Gen(name='second', max_tokens=5)"
    assert error.__cause__ is cause
    assert f"{__file__}:{lines[0]}" in str(error)
    assert "line cut" in str(error)
    # Whatever comes later gives the same failure, and waits for nothing.
    for read in (lambda: state["third"], state.text, state.messages, state.sync, lambda: state["unknown"]):
        with pytest.raises(BackendError) as again:
            read()
        assert str(again.value) == str(error)
        assert again.value is not error
    assert state["first"] == "ok"
    assert str(state.error()) == str(error)
    assert state.usage()["calls"] == 1


def test_adding_after_a_failure_neither_raises_nor_hangs() -> None:
    @sgl.function
    def program(s: Any) -> None:
        s += gen("a")

    mock = MockBackend(errors={0: OSError("gone")})
    state = program.run(backend=mock)
    state.error()
    state += "more" + gen("b") + select("c", ["x"])
    with state.user():
        state += "u"
    with state.var_scope("scope"):
        state += "v"
    for name in ("a", "b", "c", "scope"):
        with pytest.raises(BackendError, match="gone"):
            state[name]
    assert len(mock.calls) == 1
    forks = state.fork(2)
    forks += gen("d")
    with pytest.raises(BackendError, match="gone"):
        forks[1]["d"]
    with pytest.raises(BackendError, match="gone"):
        forks.join()


def test_the_backends_own_errors_keep_their_kind_and_facts() -> None:
    refusal = Unsupported("no such thing", request_id="r-1", status=400, hint="Do this instead")

    @sgl.function
    def program(s: Any) -> None:
        s += gen("a")

    with pytest.raises(Unsupported) as caught:
        program.run(backend=MockBackend(errors={0: refusal}))["a"]
    assert (caught.value.request_id, caught.value.status) == ("r-1", 400)
    assert caught.value.variable == "a"
    assert str(caught.value).endswith("Do this instead")
    assert caught.value.fields()["hint"] == "Do this instead"
    assert refusal.variable is None


def test_a_read_in_the_body_raises_there() -> None:
    seen: list[str] = []

    @sgl.function
    def program(s: Any) -> None:
        s += gen("a")
        try:
            s["a"]
        except BackendError as error:
            seen.append(str(error))
            raise

    with pytest.raises(BackendError):
        program.run(backend=MockBackend(errors={0: OSError("x")}))
    assert len(seen) == 1


def test_a_bodys_own_exception_comes_out_of_run_and_stops_its_generations(idle: Callable[[], int]) -> None:
    mock = MockBackend(delay_s=NEVER_S)

    @sgl.function
    def program(s: Any) -> None:
        s += gen("a")
        forks = s.fork(3)
        forks += gen("b")
        raise LookupError("mine")

    with pytest.raises(LookupError, match="mine"):
        program.run(backend=mock)
    assert idle() == 0
    assert mock.in_flight == 0


def test_a_call_that_takes_too_long() -> None:
    @sgl.function
    def program(s: Any) -> None:
        s += gen("a")

    for stream in (False, True):
        mock = MockBackend(delay_s=NEVER_S)
        with pytest.raises(Timeout, match=r"0\.05 s") as caught:
            program.run(backend=mock, timeout=0.05, stream=stream)["a"]
        assert caught.value.retryable
        assert caught.value.source is not None
        assert mock.calls[0].timeout == 0.05
        assert mock.in_flight == 0


def test_cancelling_reaches_the_readers_and_the_backend(idle: Callable[[], int]) -> None:
    mock = MockBackend(delay_s=NEVER_S)

    @sgl.function
    def program(s: Any) -> None:
        s += gen("a") + gen("b")

    state = program.run(backend=mock)
    threading.Timer(0.05, state.cancel).start()
    for name in ("a", "b"):
        with pytest.raises(ProgramCancelled):
            state[name]
    assert idle() == 0
    assert mock.in_flight == 0


def test_branches_fail_alone_and_join_raises_the_first_in_order() -> None:
    @sgl.function
    def program(s: Any) -> Any:
        s += "start "
        forks = s.fork(4)
        forks += lambda i: gen(f"v{i}")
        return forks

    def reply(call: Any) -> str:
        raise AssertionError

    number = iter(range(10))

    def script(call: Any) -> str:
        at = next(number)
        if at in (1, 3):
            raise ValueError(f"branch {at}")
        return f"fine {at}"

    state = program.run(backend=MockBackend(script))
    forks = state.ret_value
    assert forks[0]["v0"] == "fine 0"
    assert forks[2]["v2"] == "fine 2"
    with pytest.raises(BackendError, match="branch 1"):
        forks[1]["v1"]
    with pytest.raises(BackendError, match="branch 1"):
        forks.join()
    assert state.text() == "start "
    state += gen("after")
    assert state["after"] == "fine 4"


def test_a_joined_branch_takes_no_more_text() -> None:
    @sgl.function
    def program(s: Any) -> None:
        forks = s.fork(2)
        forks += gen("x")
        forks.join()
        assert forks[0]["x"]
        with pytest.raises(StateClosed, match="joined"):
            forks[0].__iadd__("more")

    program.run(backend=MockBackend())


def test_a_backend_that_answers_nonsense() -> None:
    class Odd(MockBackend):
        async def generate(self, call: Any) -> Any:
            done = await super().generate(call)
            return type(done)((*done.texts, "extra"), done.meta)

        async def score(self, call: Any) -> Any:
            found = await super().score(call)
            return type(found)(found.scores[:1], found.meta)

    @sgl.function
    def program(s: Any, node: Any) -> None:
        s += node

    with pytest.raises(BackendError, match="2 texts instead of 1"):
        program.run(gen("x"), backend=Odd())["x"]
    with pytest.raises(BackendError, match="scored 1 of 2"):
        program.run(select("x", ["a", "b"]), backend=Odd())["x"]
    with pytest.raises(BackendError, match="no scored token"):
        program.run(select("x", ["a"]), backend=MockBackend(scores={"a": []}))["x"]


@pytest.mark.parametrize("way", ["run", "stream", "async"])
def test_errors_do_not_hold_the_state_alive(idle: Callable[[], int], way: str) -> None:
    @sgl.function
    def program(s: Any) -> None:
        s += gen("a")

    @sgl.function
    async def waits(s: Any) -> None:
        s += gen("a")

    backend = MockBackend(errors={0: OSError("x")})
    state = (waits if way == "async" else program).run(backend=backend, stream=way == "stream")
    kept = state.error()
    assert kept is not None
    kept = kept.with_traceback(None)
    watched = (weakref.ref(state), weakref.ref(state.core))
    del state
    idle()
    gc.collect()
    assert [ref() for ref in watched] == [None, None]
    assert kept.variable == "a"
    assert "x" in str(kept.__cause__)


def test_dropped_states_and_forks_leave_nothing_behind(idle: Callable[[], int]) -> None:
    @sgl.function
    def program(s: Any) -> None:
        s += "shared " + gen("a")
        forks = s.fork(20)
        forks += gen("b")

    mock = MockBackend(delay_s=0.01)
    refs = [weakref.ref(program.run(backend=mock).core) for _ in range(10)]
    assert idle() == 0
    assert len(mock.calls) == 10 + 200
    gc.collect()
    assert [ref() for ref in refs] == [None] * 10


def test_reading_on_the_languages_own_loop_is_refused_instead_of_hanging() -> None:
    @sgl.function
    def program(s: Any) -> None:
        s += gen("slow")

    go_on = threading.Event()

    async def reply(call: Any) -> str:
        while not go_on.is_set():
            await asyncio.sleep(0.002)
        return "late"

    slow = program.run(backend=MockBackend(reply))

    def script(call: Any) -> str:
        return str(slow["slow"])

    with pytest.raises(BackendError, match="own event loop"):
        program.run(backend=MockBackend(script))["slow"]
    go_on.set()
    assert slow["slow"] == "late"

    async def inner() -> None:
        background().run(asyncio.sleep(0))

    with pytest.raises(sgl.SglError, match="own event loop"):
        background().run(inner())


def test_a_raw_runtime_fault_is_still_a_backend_error() -> None:
    @sgl.function
    def program(s: Any) -> None:
        s += gen("a")

    with pytest.raises(BackendError, match="QueueFull: full"):
        program.run(backend=MockBackend(errors={0: QueueFull("full")}))["a"]
