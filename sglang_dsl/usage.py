"""What a program's calls cost: one record per call of the backend, shared by all forks of a run."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Any

from sglang_dsl.ir import Source

COUNTED = ("prompt_tokens", "completion_tokens", "cached_tokens", "jumped_tokens")


@dataclass(frozen=True, slots=True)
class CallRecord:
    """One call. kind: gen or select. branch: () for the program itself, (2,) for its third fork, ..."""

    kind: str
    name: str | None
    branch: tuple[int, ...]
    seconds: float
    source: Source | None = None
    meta: dict[str, Any] = field(default_factory=dict)

    def count(self, key: str) -> int:
        return int(self.meta.get(key) or 0)


class Ledger:
    """Records of all calls of one run."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._records: list[CallRecord] = []

    def add(self, record: CallRecord) -> None:
        with self._lock:
            self._records.append(record)

    def records(self) -> tuple[CallRecord, ...]:
        with self._lock:
            return tuple(self._records)

    def total(self) -> dict[str, int]:
        """calls, prompt_tokens, completion_tokens, cached_tokens, jumped_tokens."""
        records = self.records()
        return {"calls": len(records)} | {key: sum(r.count(key) for r in records) for key in COUNTED}
