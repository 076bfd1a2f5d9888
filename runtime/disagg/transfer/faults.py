"""Fault injection for transfers, at random. Part of the test kit; servers read the environment variable
SGLANG_DSL_TRANSFER_FAULTS, such as "corrupt=0.01,cut=0.001,seed=3".
"""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Final

from runtime.protocol.errors import BadRequest

VARIABLE: Final = "SGLANG_DSL_TRANSFER_FAULTS"


@dataclass(frozen=True)
class FaultRates:
    """Chances, 0 to 1. corrupt: a piece of KV is damaged on its way; cut: all connections to the other side
    break while KV is sent; fail: a transfer fails on the prefill side; lose: metadata never leave; delay:
    they leave `delay_s` seconds later; damage: they are damaged."""

    corrupt: float = 0.0
    cut: float = 0.0
    fail: float = 0.0
    lose: float = 0.0
    delay: float = 0.0
    damage: float = 0.0
    delay_s: float = 0.05
    seed: int = 0

    @classmethod
    def parse(cls, text: str) -> FaultRates:
        """`name=value,...`. Raises BadRequest."""
        known = {field.name: field.type for field in fields(cls)}
        rates: dict[str, float] = {}
        for part in filter(None, text.split(",")):
            name, _, value = part.partition("=")
            try:
                number = float(value)
            except ValueError:
                number = -1.0
            if name not in known or number < 0 or (number > 1 and name not in ("delay_s", "seed")):
                raise BadRequest(
                    f"{part!r} is no chance of a fault", where=VARIABLE, hint=f"known: {', '.join(known)}"
                )
            rates[name] = number
        return cls(**{**rates, "seed": int(rates.get("seed", 0))})  # type: ignore[arg-type]


class Faults:
    """Draws faults; any thread may call it. counts: how often each kind happened."""

    def __init__(self, rates: FaultRates) -> None:
        self.rates = rates
        self.counts: dict[str, int] = {}
        self._random = random.Random(rates.seed)
        self._lock = threading.Lock()

    @classmethod
    def of_environment(cls, environment: Mapping[str, str] = os.environ) -> Faults | None:
        """Raises BadRequest."""
        text = environment.get(VARIABLE, "")
        return cls(FaultRates.parse(text)) if text else None

    def on_piece(self, data: memoryview) -> memoryview:
        """The bytes that are sent instead."""
        if not self.happens("corrupt"):
            return data
        damaged = bytearray(data)
        with self._lock:
            damaged[self._random.randrange(len(damaged))] ^= 1 << self._random.randrange(8)
        return memoryview(damaged)

    def on_row(self, row: bytes) -> bytes | None:
        """The metadata that are sent instead; None: none."""
        if self.happens("lose"):
            return None
        if not self.happens("damage"):
            return row
        damaged = bytearray(row)
        with self._lock:
            damaged[self._random.randrange(8, len(damaged))] ^= 1 << self._random.randrange(8)
        return bytes(damaged)

    def happens(self, kind: str) -> bool:
        rate: float = getattr(self.rates, kind)
        if not rate:
            return False
        with self._lock:
            if self._random.random() >= rate:
                return False
            self.counts[kind] = self.counts.get(kind, 0) + 1
            return True
