"""Threads: how many CPU threads share one tensor operation. Knows no requests, and no other process.

Waking a thread and waiting for it costs an operation about ten microseconds, as much as a whole small
product. So small passes are computed by one thread, which leaves the other cores to other processes.
"""

from __future__ import annotations

from concurrent.futures import Executor, Future
from dataclasses import dataclass
from typing import Any

import torch

from runtime.models.decoder import Decoder

SHARED = 8_000_000
"""A layer uses several threads if its widest product has at least this many multiplications. Measured with
two threads: at 4 million one thread is 25 % faster, at 6 million two are 10 % faster, at 29 million 40 %."""


@dataclass(slots=True)
class Threads:
    """most: torch's default. width: elements of the widest matrix of a layer."""

    most: int
    width: int
    now: int

    @classmethod
    def of(cls, decoder: Decoder) -> Threads | None:
        """None if there is nothing to choose."""
        most, spec, shard = torch.get_num_threads(), decoder.spec, decoder.shard
        if decoder.device.type != "cpu" or most == 1:
            return None
        widest = max(len(shard.ffn(spec)), len(shard.heads(spec)) * spec.head_dim)
        return cls(most, spec.hidden_size * widest, most)

    def use_for(self, tokens: int) -> None:
        """Set the number of threads for a pass of `tokens` tokens. Called by the thread that computes."""
        count = self.most if tokens * self.width >= SHARED else 1
        if count != self.now:
            torch.set_num_threads(count)
            self.now = count


class Ended(Future[Any]):
    """A completed call. It has none of a Future's locks, which would cost more than reading the result."""

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
    """Runs functions at once, in the caller's thread."""

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        try:
            return Ended(fn(*args, **kwargs), None)
        except Exception as error:  # noqa: BLE001 - raised again by result()
            return Ended(None, error)
