"""Adapters as the scheduler knows them: a name, a number, a directory. Which are loaded, which requests may
run together, and the cache keys of their requests. The runner holds the weights.

A number is used once. So KV that was computed with an adapter is never used for another one, nor for one that
is loaded under the same name later.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from runtime.plan import Adapter, Runner
from runtime.protocol.control import no_adapters
from runtime.protocol.errors import AdapterError, ModelNotFound
from runtime.scheduler.requests.request import Request

OVERDUE_TICKS = 256
"""Steps a request waits before requests of other adapters wait for it."""
MAX_NAME = 200
KEY = "\0lora:"
"""What a cache key begins with that holds an adapter's number; keys of users hold no NUL."""


class AdapterRegistry:
    """store: None if adapters are not supported. per_batch: different ones in one step, at most. at_most: so
    many may be loaded; None: no limit. `loaded`: those that the store has already. active: whether there is a
    store. leaving: unloaded ones that live requests still have."""

    def __init__(
        self,
        store: Runner | None = None,
        loaded: Sequence[Adapter] = (),
        *,
        per_batch: int = 1,
        at_most: int | None = None,
    ) -> None:
        self._store, self._per_batch, self._at_most = store, per_batch, at_most
        self.active = store is not None
        self._named = {one.name: one for one in loaded}  # the last used one stands last
        self._numbers = itertools.count(1 + max((one.number for one in loaded), default=0))
        self.leaving: set[int] = set()
        self._live: Mapping[str, Request] = {}

    def following(self, live: Mapping[str, Request]) -> AdapterRegistry:
        """Itself, with the mapping of live requests, which it reads and does not change."""
        self._live = live
        return self

    @property
    def loaded(self) -> dict[str, str]:
        """Name -> directory, by name."""
        return {name: self._named[name].path for name in sorted(self._named)}

    def load(self, name: str, path: str, *, pinned: bool = False) -> None:
        """Raises AdapterError, and changes nothing: the name is in use, too many are loaded, or the files are
        wrong; BadRequest if adapters are not supported."""
        store = self._supported("lora_name")
        if not name or len(name) > MAX_NAME or not name.isprintable():
            raise AdapterError(
                f"must have 1 to {MAX_NAME} printable characters, got {name[:40]!r}", where="lora_name"
            )
        if name in self._named:
            raise AdapterError(
                f"an adapter {name!r} is loaded already", where="lora_name", hint="unload it first"
            )
        if not path:
            raise AdapterError("is empty", where="lora_path")
        if pinned and len(self._pinned) + 2 > self._per_batch:
            raise AdapterError(
                f"{len(self._pinned)} of max_loras_per_batch={self._per_batch} adapters are pinned, and one "
                "place must be left",
                where="pinned",
            )
        replaced = self._replaced()
        adapter = Adapter(next(self._numbers), name, path, pinned)
        store.load_adapter(adapter)
        if replaced is not None:
            self.unload(replaced)
        self._named[name] = adapter

    def _replaced(self) -> str | None:
        """The adapter that is unloaded for another one: the least recently used that no request has and that
        is not pinned. None if that is not necessary."""
        if self._at_most is None or len(self._named) < self._at_most:
            return None
        used = {request.adapter for request in self._live.values()}
        idle = [one.name for one in self._named.values() if not one.pinned and one.number not in used]
        if not idle:
            raise AdapterError(
                f"max_loaded_loras={self._at_most} adapters are loaded, and all are in use or pinned",
                where="lora_name",
                hint="unload one, or try again later",
            )
        return idle[0]

    def unload(self, name: str) -> None:
        """Running requests keep it. Raises ModelNotFound; BadRequest if adapters are not supported."""
        self._supported("lora_name")
        adapter = self._named.pop(name, None)
        if adapter is None:
            raise self._unknown(name, "lora_name")
        self.leaving.add(adapter.number)
        self.sweep()

    def sweep(self) -> None:
        """Have the store drop adapters that were unloaded and that no request has any more."""
        if self._store is None or not self.leaving:
            return
        used = {request.adapter for request in self._live.values()}
        for number in self.leaving - used:
            self.leaving.discard(number)
            self._store.unload_adapter(number)

    def key_of(self, name: str, key: str | None) -> tuple[int, str]:
        """The number of this adapter, and the cache key of a request with it and the extra key `key`. Raises
        ModelNotFound, BadRequest if adapters are not supported."""
        self._supported("lora_path")
        adapter = self._named.pop(name, None)
        if adapter is None:
            raise self._unknown(name, "lora_path")
        self._named[name] = adapter
        return adapter.number, f"{KEY}{adapter.number}" + ("" if key is None else f"\0{key}")

    def _supported(self, field: str) -> Runner:
        if self._store is None:
            raise no_adapters(field)
        return self._store

    def _unknown(self, name: str, field: str) -> ModelNotFound:
        known = ", ".join(sorted(self._named)[:8]) or "none"
        return ModelNotFound(
            f"no adapter {name[:MAX_NAME]!r} is loaded", where=field, hint=f"there are: {known}"
        )

    @property
    def _pinned(self) -> set[int]:
        return {one.number for one in self._named.values() if one.pinned}

    def for_round(self, running: Iterable[Request], waiting: Iterable[Request], tick: int) -> AdapterLimit:
        """For one round of admission."""
        return AdapterLimit(self._per_batch, self._pinned, running, waiting, tick)

    def state(self) -> dict[str, Any]:
        """Part of Scheduler.state()."""
        if self._store is None:
            return {}
        return {"lora_adapters": self.loaded, "num_loaded_loras": len(self._named)}


class AdapterLimit:
    """Which requests may be admitted: the running ones have at most `per_batch` different adapters, of which
    the pinned ones always count. A request that waited too long for that is next: until then no request of
    another adapter begins."""

    def __init__(
        self,
        per_batch: int,
        pinned: set[int],
        running: Iterable[Request],
        waiting: Iterable[Request],
        tick: int,
    ) -> None:
        self._per_batch, self._pinned = per_batch, pinned
        self._used = {request.adapter for request in running} - {0}
        overdue = [
            request
            for request in waiting
            if request.adapter
            and request.adapter not in self._used
            and tick - request.timing.queued_tick >= OVERDUE_TICKS
        ]
        self._next = min(overdue, key=lambda one: one.arrival).adapter if overdue else 0

    def allows(self, request: Request) -> bool:
        number = request.adapter
        if not number:
            return True
        if self._next not in (0, number):
            return False
        return number in self._used or len(self._used | self._pinned | {number}) <= self._per_batch

    def add(self, request: Request) -> None:
        """It was admitted."""
        if request.adapter:
            self._used.add(request.adapter)
            if request.adapter == self._next:
                self._next = 0
