"""Threads: how many CPU threads share one tensor operation. Knows no requests, and no other process.

To wake a thread and to wait for it costs an operation some ten microseconds, as much as a small product takes
alone. So small passes are computed by one thread, which leaves the other cores to whoever else computes.
"""

from __future__ import annotations

from concurrent.futures import Executor, Future
from dataclasses import dataclass
from typing import Any

import torch

from runtime.models.decoder import Decoder

SHARED = 8_000_000
"""Multiplications of a layer's widest product from which on it is shared out. Measured with two threads: at
4 million one is a quarter faster, at 6 million two are by a tenth, at 29 million by four tenths."""


@dataclass(slots=True)
class Threads:
    """most: what torch chose. width: elements of the widest matrix of a layer."""

    most: int
    width: int
    now: int

    @classmethod
    def of(cls, decoder: Decoder) -> Threads | None:
        """None where there is nothing to choose."""
        most, spec, shard = torch.get_num_threads(), decoder.spec, decoder.shard
        if decoder.device.type != "cpu" or most == 1:
            return None
        widest = max(len(shard.ffn(spec)), len(shard.heads(spec)) * spec.head_dim)
        return cls(most, spec.hidden_size * widest, most)

    def use_for(self, tokens: int) -> None:
        """Choose for a pass of so many tokens. The thread that calls it is the one that computes."""
        wanted = self.most if tokens * self.width >= SHARED else 1
        if wanted != self.now:
            torch.set_num_threads(wanted)
            self.now = wanted


class Ended(Future[Any]):
    """A call that has ended. It has none of the locks for those who wait, which cost more than a look at
    it."""

    def __init__(self, result: Any, error: Exception | None) -> None:
        self._ended = (result, error)

    def result(self, timeout: float | None = None) -> Any:
        result, error = self._ended
        if error is not None:
            raise error
        return result

    def done(self) -> bool:
        return True


class Here(Executor):
    """Runs what it is given at once, in the caller's thread."""

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        try:
            return Ended(fn(*args, **kwargs), None)
        except Exception as error:  # noqa: BLE001 - whoever asks for the result gets it
            return Ended(None, error)
