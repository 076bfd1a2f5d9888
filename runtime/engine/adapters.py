"""Adapters: the LoRA adapters of a runner. Loaded adapters are kept in host memory; those of the last passes
also in a few slots on the device. A new adapter replaces the least recently used one.

It knows rows and their adapters' numbers; not names, requests or permissions.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from pathlib import Path

import torch

from runtime.config.runner import RunnerConfig
from runtime.layers.linear import Projection
from runtime.layers.lora.linear import Adapted, AdaptedLinear, Factors
from runtime.layers.lora.peft import Target, plain, read
from runtime.plan import Adapter, Row
from runtime.protocol.errors import AdapterError, InternalFault


class Adapters:
    """slots: how many different adapters a pass may have. All methods are called between passes."""

    def __init__(self, method: Adapted, slots: int, max_rank: int | None = None) -> None:
        self._method, self._max_rank = method, max_rank
        self._loaded: dict[int, dict[Projection, Factors]] = {}
        self._pinned: set[int] = set()
        self._slots: list[int | None] = [None] * slots  # the adapter in each slot
        self._used = [0] * slots  # the last pass that used it, counting passes with adapters
        self._passes = itertools.count(1)
        self._targets: dict[str, list[Target]] = {}
        for linear in method.linears:
            for part in linear.parts:
                self._targets.setdefault(plain(part.name), []).append(
                    Target(part, linear.inputs, linear.local)
                )

    @classmethod
    def of(cls, method: Adapted, config: RunnerConfig) -> Adapters:
        """With the adapters of the config. Raises AdapterError."""
        loaded = cls(method, config.max_loras_per_batch, config.max_lora_rank)
        for adapter in config.adapters:
            loaded.load(adapter)
        return loaded

    def __contains__(self, number: object) -> bool:
        return number in self._loaded

    def load(self, adapter: Adapter) -> None:
        """Read it, and reserve memory for it on the device. Raises AdapterError, and changes nothing then."""
        if adapter.number in self._loaded:
            raise InternalFault(f"the adapter {adapter.number} is loaded already", where="adapters")
        with torch.inference_mode():
            factors = self._read(adapter)
            try:
                for linear in self._method.linears:
                    ranks = [one.rank for one in _of(linear, factors) if one is not None]
                    if ranks:
                        linear.reserve(len(self._slots), max(ranks))
            except (RuntimeError, MemoryError) as error:
                raise AdapterError(
                    f"there is no memory for it: {error}",
                    where=adapter.path,
                    hint="start the engine with fewer max_loras_per_batch",
                ) from error
        self._loaded[adapter.number] = factors
        if adapter.pinned:
            self._pinned.add(adapter.number)

    def _read(self, adapter: Adapter) -> dict[Projection, Factors]:
        directory = Path(os.path.expanduser(adapter.path))
        if not self._method.linears:
            raise AdapterError("the model has no matrices that can be adapted", where=adapter.path)
        like = self._method.linears[0].like
        return read(directory, self._targets, like.dtype, self._max_rank)

    def unload(self, number: int) -> None:
        """Forget it, if it is loaded. No row may refer to it from now on."""
        self._loaded.pop(number, None)
        self._pinned.discard(number)
        self._slots = [None if one == number else one for one in self._slots]

    def use(self, rows: Sequence[Row]) -> bool:
        """Prepare the next pass. Returns whether any row has an adapter. Raises InternalFault if one is not
        loaded, or if there are more than slots."""
        needed = list(dict.fromkeys(row.adapter for row in rows if row.adapter))
        active = self._method.active
        active.none()
        if not needed:
            return False
        now = next(self._passes)
        for number in needed:
            if number in self._slots:
                self._used[self._slots.index(number)] = now
        for number in needed:
            if number not in self._slots:
                self._put(number, now)
        chosen = [self._slots.index(row.adapter) if row.adapter else -1 for row in rows]
        active.some([len(row.tokens) for row in rows], chosen, self._method.linears[0].like)
        return True

    def _put(self, number: int, now: int) -> None:
        factors = self._loaded.get(number)
        if factors is None:
            raise InternalFault(f"the adapter {number} is not loaded", where="step plan")
        free = [
            slot
            for slot, owner in enumerate(self._slots)
            if owner is None or (owner not in self._pinned and self._used[slot] < now)
        ]
        if not free:
            raise InternalFault(
                f"a pass may have {len(self._slots)} adapters, it has more", where="step plan"
            )
        slot = min(free, key=lambda one: (self._slots[one] is not None, self._used[one]))
        for linear in self._method.linears:
            linear.put(slot, _of(linear, factors))
        self._slots[slot], self._used[slot] = number, now


def _of(linear: AdaptedLinear, factors: dict[Projection, Factors]) -> list[Factors | None]:
    return [factors.get(part) for part in linear.parts]
