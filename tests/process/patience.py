"""What keeps tests of real processes true on a machine that is slow, and stands still now and then: long
patience for what must happen, requests that are held where they are, and askings that no pause can spoil."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sized
from typing import TypeVar

import httpx

PATIENCE_S = 300.0
"""For what must happen, however slow the machine is."""
PROGRAM_S = 300.0
"""For a program that a test starts, and whose end it waits for."""
ASKINGS = 20
"""How often something is tried that a pause may spoil, each time anew."""

Pieces = TypeVar("Pieces", bound=Sized)
Headers = Mapping[str, str]


def until(true: Callable[[], object], told: Callable[[], object] = lambda: None) -> None:
    """Wait for it. Raises AssertionError, with what is `told` then, when it does not come true."""
    deadline = time.monotonic() + PATIENCE_S
    while not true():
        assert time.monotonic() < deadline, told()
        time.sleep(0.02)


def hold(url: str, headers: Headers | None = None) -> None:
    """From now on the server computes nothing, and whatever comes waits: no request ends before another has
    come, or before something else was done, however long this process is kept waiting in between."""
    _order(url, "/pause_generation", {"mode": "in_place"}, headers)


def go_on(url: str, headers: Headers | None = None) -> None:
    """It computes again."""
    _order(url, "/continue_generation", {}, headers)


@contextlib.contextmanager
def held(url: str, headers: Headers | None = None) -> Iterator[None]:
    """hold(), and go_on() in the end."""
    hold(url, headers)
    try:
        yield
    finally:
        go_on(url, headers)


def _order(url: str, path: str, body: Mapping[str, str], headers: Headers | None) -> None:
    httpx.post(f"{url}{path}", json=body, headers=headers, timeout=PATIENCE_S).raise_for_status()


def metrics(url: str) -> str:
    """What /metrics says. Where the scheduler does not answer soon, it goes without its part: asked again."""
    found: list[str] = []

    def whole() -> bool:
        found.append(httpx.get(f"{url}/metrics", timeout=PATIENCE_S).text)
        return "sglang_dsl:num_repairs_total" in found[-1]

    until(whole, lambda: found[-1])
    return found[-1]


def in_pieces(ask: Callable[[], Pieces], least: int = 2) -> Pieces:
    """The first of what `ask` gives that is in `least` pieces or more.

    Whatever is there when a reader looks again is told it as one piece: one that stands still while all is
    written gets a single one, and that is right. That twenty askings in a row are all cut so short shows that
    nothing is told before the end.
    """
    counts: list[int] = []
    while len(counts) < ASKINGS:
        found = ask()
        if len(found) >= least:
            return found
        counts.append(len(found))
    raise AssertionError(f"never {least} pieces, but {counts}")
