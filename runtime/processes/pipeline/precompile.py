"""Constraints compiled before anybody generates with them: who asked, and what became of each.

Asks the grammars and looks again later; nothing here waits. It knows no requests and no mailbox.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass
from typing import Any

from runtime.grammar.base import Matcher
from runtime.grammar.manager import GrammarManager
from runtime.protocol.control import MAX_PRECOMPILED, PrecompileReq
from runtime.protocol.errors import BadRequest, DeadlineExceeded, RuntimeFault, UnsupportedConstraint

LOOK_S = 0.005
"""How often to look for answers while somebody waits for some and nothing else is to be done."""


@dataclass(frozen=True)
class _Asked:
    request: PrecompileReq
    until: float
    futures: list[Future[Matcher]]


class Precompiles:
    """Orders to compile ahead. One thread calls it."""

    def __init__(self, grammars: GrammarManager | None) -> None:
        self._grammars = grammars
        self._asked: list[_Asked] = []

    def __bool__(self) -> bool:
        return bool(self._asked)

    def add(self, request: PrecompileReq, now: float) -> None:
        """Raises BadRequest: too many at once, or a deadline that is none; UnsupportedConstraint: there is no
        grammar backend."""
        if self._grammars is None:
            raise UnsupportedConstraint("no grammar backend is loaded", where="constraints")
        if len(request.constraints) > MAX_PRECOMPILED:
            raise BadRequest(
                f"{len(request.constraints)} at once; at most {MAX_PRECOMPILED}", where="constraints"
            )
        if not 0 < request.timeout_s < float("inf"):
            raise BadRequest(
                f"must be a positive number of seconds, got {request.timeout_s}", where="timeout_s"
            )
        futures = [self._grammars.submit(constraint) for constraint in request.constraints]
        self._asked.append(_Asked(request, now + request.timeout_s, futures))

    def due(self, now: float) -> Iterator[tuple[PrecompileReq, dict[str, Any]]]:
        """Those that all is known of, or whose time is up, each once, with their answer."""
        for asked in list(self._asked):
            if now >= asked.until or all(future.done() for future in asked.futures):
                self._asked.remove(asked)
                yield asked.request, {"constraints": [_told(future) for future in asked.futures]}


def _told(future: Future[Matcher]) -> dict[str, Any]:
    """What became of one constraint. A compilation that is not done goes on, and is kept when it is."""
    try:
        origin = future.result(timeout=0).origin
    except RuntimeFault as fault:
        return {"ok": False, "error": fault.to_dict()}
    except (TimeoutError, CancelledError):
        late = DeadlineExceeded("not compiled yet; it goes on", where="timeout_s")
        return {"ok": False, "error": late.to_dict()}
    return {
        "ok": True,
        "backend": origin.backend,
        "exact": origin.exact,
        "checked": list(origin.checked),
        "ignored": list(origin.ignored),
        "why": origin.why,
        "compile_s": origin.compile_s,
        "cached": origin.cached,
    }
