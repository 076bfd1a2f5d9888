"""What a program's calls cost: one record per call of the backend, shared by all forks of a run."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from sglang_dsl.ir import Source

COUNTED = ("prompt_tokens", "completion_tokens", "cached_tokens", "jumped_tokens")


class CallRecord(msgspec.Struct, frozen=True, gc=False):
    """One call. kind: gen, select or tool. branch: () for the program itself, (2,) for its third fork, ...
    seconds: in all; first_token_s: to the first piece of a stream. replayed: answered from a record. began:
    when, on time.monotonic()'s clock; None: not known."""

    kind: str
    name: str | None
    branch: tuple[int, ...]
    seconds: float
    source: Source | None = None
    meta: dict[str, Any] = {}
    first_token_s: float | None = None
    replayed: bool = False
    began: float | None = None

    def count(self, key: str) -> int:
        return int(self.meta.get(key) or 0)


class Ledger:
    """Records of all calls of one run. `outer`: of the run that called its program, which counts them too."""

    __slots__ = ("_called", "_outer", "_records", "add")

    def __init__(self, outer: Ledger | None = None) -> None:
        # Without a lock: adding one and copying all are atomic.
        self._records: list[CallRecord] = []
        self._outer = outer
        self._called = _NO_CALLS
        self.add: Callable[[CallRecord], None] = self._records.append if outer is None else self._add

    def _add(self, record: CallRecord) -> None:
        """All calls are recorded on one event loop: there is one writer."""
        self._records.append(record)
        counts = totals((record,))
        above = self._outer
        while above is not None:
            # Replaced, not changed: a reader has all of a call or nothing.
            above._called = {key: count + counts[key] for key, count in above._called.items()}
            above = above._outer

    def records(self) -> tuple[CallRecord, ...]:
        return tuple(self._records)

    @property
    def called(self) -> Mapping[str, int]:
        """Sums over the calls of the programs that this run called, at any depth."""
        return self._called

    def total(self) -> dict[str, int]:
        """calls, prompt_tokens, completion_tokens, cached_tokens, jumped_tokens; called programs included."""
        return totals(self.records(), self._called)


def totals(records: Sequence[CallRecord], called: Mapping[str, int] | None = None) -> dict[str, int]:
    """calls of the backend, and of each of COUNTED the sum; `called`: sums to add to these."""
    own = {"calls": sum(one.kind != "tool" for one in records)} | {
        key: sum(r.count(key) for r in records) for key in COUNTED
    }
    return own if not called else {key: count + called[key] for key, count in own.items()}


_NO_CALLS: Mapping[str, int] = totals(())


class TokenUsage:
    """Tokens that a backend was charged for since the last reset; safe from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.prompt_tokens = self.completion_tokens = 0

    def add(self, prompt_tokens: int, completion_tokens: int) -> None:
        with self._lock:
            self.prompt_tokens += prompt_tokens
            self.completion_tokens += completion_tokens

    def count(self, meta: Mapping[str, Any]) -> None:
        """Add what a call's meta tells."""
        self.add(int(meta.get("prompt_tokens") or 0), int(meta.get("completion_tokens") or 0))

    def reset(self) -> None:
        """Count from 0 again."""
        with self._lock:
            self.prompt_tokens = self.completion_tokens = 0

    def __repr__(self) -> str:
        return f"TokenUsage(prompt_tokens={self.prompt_tokens}, completion_tokens={self.completion_tokens})"
