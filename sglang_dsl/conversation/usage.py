"""What a program's calls cost: one record per call of the backend, shared by all forks of a run."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
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
    """Records of all calls of one run."""

    __slots__ = ("_records", "add")

    def __init__(self) -> None:
        # Without a lock: adding one and copying all are atomic.
        self._records: list[CallRecord] = []
        self.add = self._records.append

    def records(self) -> tuple[CallRecord, ...]:
        return tuple(self._records)

    def total(self) -> dict[str, int]:
        """calls, prompt_tokens, completion_tokens, cached_tokens, jumped_tokens."""
        return totals(self.records())


def totals(records: Sequence[CallRecord]) -> dict[str, int]:
    """calls of the backend, and of each of COUNTED the sum."""
    return {"calls": sum(one.kind != "tool" for one in records)} | {
        key: sum(r.count(key) for r in records) for key in COUNTED
    }


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
