"""Adapters as the scheduler knows them: a name, a number, a directory. Which are loaded, which requests may
run together, and whose KV is whose. It knows no tensors: a store (plan.AdapterStore) holds the weights.

A number is given once. So KV that was computed with an adapter is found by no request of another one, nor of
one that is loaded under the same name later.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from runtime.plan import Adapter, AdapterStore
from runtime.protocol.control import no_adapters
from runtime.protocol.errors import AdapterError, ModelNotFound
from runtime.scheduler.requests.request import Request

OVERDUE_TICKS = 256
"""Steps a request waits before requests of other adapters wait for it."""
MAX_NAME = 200
KEY = "\0lora:"
"""What a cache key begins with that holds an adapter's number; keys of users hold no NUL."""


class AdapterRegistry:
    """store: None where adapters are not taken. per_batch: different ones in one step, at most. at_most: so
    many are loaded, at most; None: no limit. `loaded`: those that the store has already."""

    def __init__(
        self,
        store: AdapterStore | None = None,
        loaded: Sequence[Adapter] = (),
        *,
        per_batch: int = 1,
        at_most: int | None = None,
    ) -> None:
        self._store, self._per_batch, self._at_most = store, per_batch, at_most
        self._named = {one.name: one for one in loaded}  # who was used last stands last
        self._numbers = itertools.count(1 + max((one.number for one in loaded), default=0))
        self._leaving: set[int] = set()  # unloaded, and live requests have them still
        self._live: Mapping[str, Request] = {}

    def following(self, live: Mapping[str, Request]) -> AdapterRegistry:
        """Itself, going by these requests: all there are, whenever it is asked."""
        self._live = live
        return self

    @property
    def loaded(self) -> dict[str, str]:
        """Name -> directory, by name."""
        return {name: self._named[name].path for name in sorted(self._named)}

    def load(self, name: str, path: str, *, pinned: bool = False) -> None:
        """Raises AdapterError, and changes nothing: the name is taken, there is no room, or the files are
        wrong; BadRequest where none are taken."""
        store = self._given("lora_name")
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
        leaves = self._makes_room()
        adapter = Adapter(next(self._numbers), name, path, pinned)
        store.load_adapter(adapter)
        if leaves is not None:
            self.unload(leaves)
        self._named[name] = adapter

    def _makes_room(self) -> str | None:
        """Who is unloaded for another one: of those that no request has, not the pinned, the one that was
        used longest ago. None where there is room."""
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
        """No request finds it from now on; who has it keeps it to the end. Raises ModelNotFound, BadRequest
        where none are taken."""
        self._given("lora_name")
        adapter = self._named.pop(name, None)
        if adapter is None:
            raise self._unknown(name, "lora_name")
        self._leaving.add(adapter.number)
        self.sweep()

    def sweep(self) -> None:
        """Have the store forget what was unloaded and is in no use any more."""
        if self._store is None or not self._leaving:
            return
        used = {request.adapter for request in self._live.values()}
        for number in self._leaving - used:
            self._leaving.discard(number)
            self._store.unload_adapter(number)

    def key_of(self, name: str, key: str | None) -> tuple[int, str]:
        """The number of this adapter, and the key in the cache of a request that has it, and the extra key
        `key`. Raises ModelNotFound, BadRequest where none are taken."""
        self._given("lora_path")
        adapter = self._named.pop(name, None)
        if adapter is None:
            raise self._unknown(name, "lora_path")
        self._named[name] = adapter
        return adapter.number, f"{KEY}{adapter.number}" + ("" if key is None else f"\0{key}")

    def _given(self, where: str) -> AdapterStore:
        if self._store is None:
            raise no_adapters(where)
        return self._store

    def _unknown(self, name: str, where: str) -> ModelNotFound:
        known = ", ".join(sorted(self._named)[:8]) or "none"
        return ModelNotFound(
            f"no adapter {name[:MAX_NAME]!r} is loaded", where=where, hint=f"there are: {known}"
        )

    @property
    def _pinned(self) -> set[int]:
        return {one.number for one in self._named.values() if one.pinned}

    def places(self, running: Iterable[Request], waiting: Iterable[Request], tick: int) -> Places | None:
        """For one round of admission; None where there is nothing to share out."""
        return None if self._store is None else Places(self._per_batch, self._pinned, running, waiting, tick)

    def state(self) -> dict[str, Any]:
        """What the scheduler's state tells."""
        if self._store is None:
            return {}
        return {"lora_adapters": self.loaded, "num_loaded_loras": len(self._named)}


class Places:
    """Who may join the running requests: those have at most so many different adapters, of which the pinned
    ones always count. A request that waited too long for its adapter's place is the next to get one: until
    then no request of another adapter begins."""

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

    def has(self, request: Request) -> bool:
        """Whether there is one for it."""
        number = request.adapter
        if not number:
            return True
        if self._next not in (0, number):
            return False
        return number in self._used or len(self._used | self._pinned | {number}) <= self._per_batch

    def take(self, request: Request) -> None:
        """It was let in."""
        if request.adapter:
            self._used.add(request.adapter)
            if request.adapter == self._next:
                self._next = 0
