"""Ctrl-C at the prompt: whatever runs is stopped, with its requests, and the prompt comes back."""

from __future__ import annotations

import asyncio
import io
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from rich.console import Console

import sglang_dsl as sgl
from sglang_dsl.backends.base import Backend, Call, Completion, Delta
from sglang_dsl.console.backend_flag import BackendChoice, Opening
from sglang_dsl.console.front.screen import Screen
from sglang_dsl.console.front.terminal import Loop
from sglang_dsl.console.session.interrupts import held, stoppable
from sglang_dsl.console.session.session import Session
from sglang_dsl.errors import ProgramCancelled

FOREVER_S = 3600.0
PATIENCE_S = 300.0
PROGRAM = "@function\ndef f(s, x):\n    s += user(x) + assistant(gen('a'))\n"


def press() -> None:
    """Ctrl-C, from any thread."""
    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)


@pytest.fixture(autouse=True)
def _ctrl_c() -> Iterator[None]:
    """It does what it does in a shell: a suite that runs in the background may have it ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    signal.signal(signal.SIGINT, before)


class Hanging(sgl.MockBackend):
    """No call is answered; Ctrl-C is pressed when one arrives. `open` counts those that wait."""

    def __init__(self) -> None:
        super().__init__()
        self.open, self.came = 0, 0

    async def _hang(self) -> None:
        self.open += 1
        self.came += 1
        try:
            if self.came == 1:
                asyncio.get_running_loop().call_later(0.05, press)
            await asyncio.sleep(FOREVER_S)
        finally:
            self.open -= 1

    async def generate(self, call: Call) -> Any:
        await self._hang()

    async def stream(self, call: Call) -> Any:
        yield Delta("So: ")
        await self._hang()

    async def score(self, call: Any) -> Any:
        await self._hang()


def typed(session: Session, *lines: str) -> str:
    """What a prompt shows that is given these lines, and then the end of input."""
    out = io.StringIO()
    screen = Screen(Console(file=out, width=200), chat=False)
    left = iter(lines)

    def read() -> str:
        line = next(left, None)
        if line is None:
            raise EOFError
        return line

    before, sys.stdout = sys.stdout, out
    try:
        ended = Loop(session, screen, chat=False, stays=True).run(read)
    finally:
        sys.stdout = before
    assert ended == 0, out.getvalue()
    return out.getvalue()


def until(true: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize(
    "cell",
    [
        "f('Q')",
        "f.stream('Q')",
        "f('Q')['a']",
        "list(f.stream('Q').text_iter())",
        "x = f('Q')\ns += 'more'\nx.text()",
        "[f('Q'), f('R')][1].text()",
        "f.run_batch([{'x': 'Q'}, {'x': 'R'}])",
        "import asyncio\nasync def main():\n    return await (await f.arun('Q')).text()\nasyncio.run(main())",
        "s += user('Q') + assistant(gen('a'))",
        "s += gen()",
        "s += user('Q') + assistant(select('a', choices=['yes', 'no']))",
        "g = s.fork(2)\ng += user('Q') + assistant(gen('a'))\ng.join()",
        "g = s.fork(2)\ng += user('Q') + assistant(gen('a'))\ng",
    ],
)
def test_what_asks_the_model_is_stopped(cell: str) -> None:
    backend = Hanging()
    session = Session(Opening.of(BackendChoice("mock"), backend))
    shown = typed(session, PROGRAM, cell, "print('still', 'here')", "s += 'on'")
    assert "stopped" in shown
    assert "still here" in shown
    assert backend.came
    until(lambda: not backend.open)
    assert session.state.text().endswith("on")
    session.close()


def test_programs_of_earlier_cells_are_stopped_too_and_can_go_on() -> None:
    backend = Hanging()
    session = Session(Opening.of(BackendChoice("mock"), backend))
    typed(session, PROGRAM, "x = f('Q')", "import time; time.sleep(3600)")
    until(lambda: not backend.open)
    with pytest.raises(ProgramCancelled):
        session.names["x"].text()
    assert session.run("y = function(lambda s: s.__iadd__('a'))()").error is None
    session.stop()
    assert session.run("y += 'b'\ny.text()").value == "ab"
    session.close()


@pytest.mark.parametrize("tool", [False, True], ids=["function", "tool"])
def test_a_function_that_blocks_is_left(tool: bool) -> None:
    release = threading.Event()

    def block() -> str:
        """Block."""
        press()
        release.wait(FOREVER_S)
        return "late"

    calls = Completion(("",), {"tool_calls": [{"id": "1", "name": "block", "arguments": "{}"}]})
    session = Session(
        Opening.of(BackendChoice("mock"), sgl.MockBackend([calls, "ok"])), names={"block": block}
    )
    loop = "s += tools([block]) + user('Q')\nwith s.tool_loop():\n    s += assistant(gen('a'))"
    shown = typed(session, loop if tool else "block()", "1 + 1")
    release.set()
    assert "stopped" in shown
    assert "2" in shown
    session.close()


def test_a_model_that_still_loads_is_not_waited_for() -> None:
    release = threading.Event()

    class Slow(BackendChoice):
        def open(self) -> Backend:
            release.wait(FOREVER_S)
            return sgl.MockBackend()

    class Watching(Screen):
        def wait(self, what: str | None) -> None:
            if what is not None:
                press()

    session = Session(Opening(Slow("mock")))
    made = session.run("s += 'a'", Watching(Console(file=io.StringIO())))
    assert (made.stopped, made.kept) == (True, False)
    release.set()
    assert session.run("s += 'a'\ns.text()").value == "a"
    session.close()


def test_it_is_raised_only_where_it_stops_something() -> None:
    with held():
        press()  # it is heard, and kept
        with pytest.raises(KeyboardInterrupt):
            stoppable(lambda: pytest.fail("it came before"))
        with pytest.raises(KeyboardInterrupt):
            stoppable(press)
        assert stoppable(lambda: 1) == 1
        press()
        press()
        with pytest.raises(KeyboardInterrupt):  # what is being finished may hang
            press()
