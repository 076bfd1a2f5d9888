"""What an adapter of an engine is, and how it is served: in a process, and usually an environment, of its
own.

An adapter's file is run by that environment's Python: `<python> openvino_peer.py <folder> <precision>
<threads>`. It answers lines of JSON on stdin with lines of JSON; what the engine prints goes to stderr.
Nothing but the standard library is imported here, since each environment holds its engine alone.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol


class Unsupported(Exception):
    """The engine is here, but does not do what is asked: a precision, a kind of call. In one line."""


class Adapter(Protocol):
    """One engine, loaded, at the setting its users would choose.

    version  of the engine, and the settings that matter, for the report
    shares   whether requests that begin alike compute that begin once
    """

    version: str
    shares: bool

    def run(self, prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
        """Continues each prompt, all given at once, by exactly `new_tokens` greedy tokens."""

    def forget(self) -> None:
        """Empties the cache of prefixes. What keeps nothing between calls does nothing."""


class Batching(Adapter, Protocol):
    """What can also take calls while others run, as programs make them."""

    def add(self, number: int, prompt: str, new_tokens: int, regex: str | None) -> None:
        """One call; with `regex` the reply must match it, else it has exactly `new_tokens` tokens."""

    def step(self) -> dict[int, str]:
        """Computes for a while; the replies that are complete by now."""


def common_begin(prompts: list[list[int]]) -> int:
    """How many tokens all of several prompts begin with, their last ones aside; of one prompt none."""
    if len(prompts) < 2:
        return 0
    shortest = min(map(len, prompts)) - 1
    return next((n for n in range(shortest) if len({prompt[n] for prompt in prompts}) > 1), shortest)


Make = Callable[[Path, str, int], Adapter]


def serve(make: Make) -> None:
    """Answers until stdin ends. The first line tells the version, or why there is no engine."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    folder, precision, threads = sys.argv[1:4]

    def answer(**words: Any) -> None:
        print(json.dumps(words), file=answers, flush=True)

    try:
        adapter = make(Path(folder), precision, int(threads))
    except (ImportError, Unsupported) as error:
        return answer(missing=f"{error}".splitlines()[0] if f"{error}" else type(error).__name__)
    answer(version=adapter.version, shares=adapter.shares)
    for line in sys.stdin:
        asked = json.loads(line)
        try:
            answer(**_obey(adapter, asked))
        except Unsupported as error:
            answer(missing=str(error))
    return None


def _obey(adapter: Any, asked: dict[str, Any]) -> dict[str, Any]:
    if asked["do"] == "forget":
        adapter.forget()
        return {}
    if asked["do"] == "run":
        return {"ids": adapter.run(asked["prompts"], asked["new_tokens"])}
    if asked["do"] == "program" and hasattr(adapter, "program"):
        return {"texts": adapter.program(asked["name"], asked["items"])}
    if not hasattr(adapter, "step"):
        raise Unsupported("takes no calls while others run")
    for call in asked["calls"]:
        adapter.add(*call)
    replies: dict[int, str] = {}
    while asked["waiting"] and not replies:
        replies = adapter.step()
    return {"replies": list(replies.items())}
