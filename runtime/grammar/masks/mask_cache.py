"""A bounded cache of masks by key. Knows no automaton."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

from runtime.plan import TokenMask

_Kept = TypeVar("_Kept")


class Cache(Generic[_Kept]):
    """Masks by key, the longest unused dropped first when they take more than `limit_bytes`; `size` tells
    what one takes. Thread-safe."""

    def __init__(self, size: Callable[[_Kept], int], limit_bytes: int = 256 << 20) -> None:
        self._size, self._limit, self._held = size, limit_bytes, 0
        self._masks: OrderedDict[Hashable, _Kept] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: Hashable, make: Callable[[], _Kept]) -> _Kept:
        with self._lock:
            mask = self._masks.get(key)
            if mask is not None:
                self._masks.move_to_end(key)
                return mask
        mask = make()  # outside of the lock: two threads may make the same one, which is harmless
        with self._lock:
            if key not in self._masks:
                self._masks[key] = mask
                self._held += self._size(mask)
            while self._held > self._limit and len(self._masks) > 1:
                self._held -= self._size(self._masks.popitem(last=False)[1])
        return mask


class MaskCache(Cache[TokenMask]):
    def __init__(self, limit_bytes: int = 256 << 20) -> None:
        super().__init__(_size, limit_bytes)


def _size(mask: TokenMask) -> int:
    return int(mask.bits.nbytes) + (0 if mask.allowed is None else int(mask.allowed.nbytes)) + 400
