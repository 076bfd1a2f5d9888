"""Adapters: the LoRA adapters of a runner. Those loaded are kept in host memory; those that the last passes
used also in places on the device, of which there are few. Who is needed takes the place of the one that was
not used for longest.

It knows rows and their adapters' numbers; not names, requests or who may load what.
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
    """places: how many different adapters a pass may have. Each verb is called between passes."""

    def __init__(self, method: Adapted, places: int, max_rank: int | None = None) -> None:
        self._method, self._max_rank = method, max_rank
        self._loaded: dict[int, dict[Projection, Factors]] = {}
        self._pinned: set[int] = set()
        self._places: list[int | None] = [None] * places  # whose it is
        self._used = [0] * places  # when, counted in passes with adapters
        self._passes = itertools.count(1)
        self._targets: dict[str, list[Target]] = {}
        for linear in method.linears:
            for part in linear.parts:
                self._targets.setdefault(plain(part.name), []).append(Target(part, linear.inputs, linear.own))

    @classmethod
    def of(cls, method: Adapted, config: RunnerConfig) -> Adapters:
        """With those of the config. Raises AdapterError."""
        made = cls(method, config.max_loras_per_batch, config.max_lora_rank)
        for adapter in config.adapters:
            made.load(adapter)
        return made

    def __contains__(self, number: object) -> bool:
        return number in self._loaded

    def load(self, adapter: Adapter) -> None:
        """Read it, and have room for it on the device. Raises AdapterError; nothing has changed then."""
        if adapter.number in self._loaded:
            raise InternalFault(f"the adapter {adapter.number} is loaded already", where="adapters")
        with torch.inference_mode():
            found = self._read(adapter)
            try:
                for linear in self._method.linears:
                    ranks = [one.rank for one in _of(linear, found) if one is not None]
                    if ranks:
                        linear.reserve(len(self._places), max(ranks))
            except (RuntimeError, MemoryError) as error:
                raise AdapterError(
                    f"there is no memory for it: {error}",
                    where=adapter.path,
                    hint="start the engine with fewer max_loras_per_batch",
                ) from error
        self._loaded[adapter.number] = found
        if adapter.pinned:
            self._pinned.add(adapter.number)

    def _read(self, adapter: Adapter) -> dict[Projection, Factors]:
        directory = Path(os.path.expanduser(adapter.path))
        if not self._method.linears:
            raise AdapterError("the model has no matrices that can be adapted", where=adapter.path)
        like = self._method.linears[0].like
        return read(directory, self._targets, like.dtype, self._max_rank)

    def unload(self, number: int) -> None:
        """Forget it; nothing happens where it is not loaded. No row may name it from now on."""
        self._loaded.pop(number, None)
        self._pinned.discard(number)
        self._places = [None if one == number else one for one in self._places]

    def use(self, rows: Sequence[Row]) -> bool:
        """Prepare the next pass; whether any of its rows has an adapter. Raises InternalFault for one that is
        not loaded, and for more than there are places."""
        wanted = list(dict.fromkeys(row.adapter for row in rows if row.adapter))
        active = self._method.active
        active.none()
        if not wanted:
            return False
        now = next(self._passes)
        for number in wanted:
            if number in self._places:
                self._used[self._places.index(number)] = now
        for number in wanted:
            if number not in self._places:
                self._put(number, now)
        chosen = [self._places.index(row.adapter) if row.adapter else -1 for row in rows]
        active.some([len(row.tokens) for row in rows], chosen, self._method.linears[0].like)
        return True

    def _put(self, number: int, now: int) -> None:
        found = self._loaded.get(number)
        if found is None:
            raise InternalFault(f"the adapter {number} is not loaded", where="step plan")
        free = [
            place
            for place, owner in enumerate(self._places)
            if owner is None or (owner not in self._pinned and self._used[place] < now)
        ]
        if not free:
            raise InternalFault(
                f"a pass may have {len(self._places)} adapters, it has more", where="step plan"
            )
        place = min(free, key=lambda one: (self._places[one] is not None, self._used[one]))
        for linear in self._method.linears:
            linear.put(place, _of(linear, found))
        self._places[place], self._used[place] = number, now


def _of(linear: AdaptedLinear, found: dict[Projection, Factors]) -> list[Factors | None]:
    return [found.get(part) for part in linear.parts]
