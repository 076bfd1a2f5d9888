"""Fault injection for transfers, at random. Part of the test kit; servers read the environment variable
SGLANG_DSL_TRANSFER_FAULTS, such as "corrupt=0.01,cut=0.001,seed=3".
"""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Mapping
from typing import Annotated, Final

import msgspec

from runtime.protocol.errors import BadRequest

VARIABLE: Final = "SGLANG_DSL_TRANSFER_FAULTS"


Chance = Annotated[float, msgspec.Meta(ge=0, le=1)]


class FaultRates(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Chances, 0 to 1. corrupt: a piece of KV is damaged on its way; cut: all connections to the other side
    break while KV is sent; fail: a transfer fails on the prefill side; lose: metadata never leave; delay:
    they leave `delay_s` seconds later; damage: they are damaged."""

    corrupt: Chance = 0.0
    cut: Chance = 0.0
    fail: Chance = 0.0
    lose: Chance = 0.0
    delay: Chance = 0.0
    damage: Chance = 0.0
    delay_s: Annotated[float, msgspec.Meta(ge=0)] = 0.05
    seed: int = 0

    @classmethod
    def parse(cls, text: str) -> FaultRates:
        """`name=value,...`. Raises BadRequest."""
        pairs = [part.partition("=") for part in text.split(",") if part]
        try:
            return msgspec.convert({name: value for name, _, value in pairs}, cls, strict=False)
        except msgspec.ValidationError as error:
            known = ", ".join(cls.__struct_fields__)
            raise BadRequest(
                f"{text!r} is no chance of a fault: {error}", where=VARIABLE, hint=f"known: {known}"
            ) from error


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
