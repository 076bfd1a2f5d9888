"""Group: the ranks that compute one model together, and their collective operations: gloo on the CPU, NCCL on
GPUs. Each rank makes the same calls in the same order.
"""

from __future__ import annotations

import re
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from runtime.protocol.errors import EngineDead, ModelLoadError

_SOURCE = re.compile(r"^\[[^\]]*\] *")  # the source line in the library


class Group:
    """Rank `rank` of `size`. sum_, gather and least wait for the other ranks. They raise EngineDead if one
    died, or on the CPU if one takes too long; on GPUs the sender of the plan has the deadline."""

    def __init__(self, rank: int = 0, size: int = 1, *, device: torch.device | None = None) -> None:
        self.rank, self.size = rank, size
        self._device = device or torch.device("cpu")
        self._limit: timedelta | None = None

    @classmethod
    def join(cls, rank: int, size: int, file: str, device: torch.device, timeout_s: float) -> Group:
        """Meet the other ranks, which all name the same new `file`, within timeout_s; until limit() is
        called, each operation may take as long. Raises EngineDead, and ModelLoadError if torch lacks the
        backend."""
        group = cls(rank, size, device=device)
        if size == 1:
            return group
        backend = "nccl" if device.type == "cuda" else "gloo"
        if not (dist.is_available() and dist.is_backend_available(backend)):
            raise ModelLoadError(f"this torch has no {backend}", where="tp_size", hint="leave it out")
        if device.type == "cuda":
            torch.cuda.set_device(device)
        try:
            dist.init_process_group(
                backend,
                store=dist.FileStore(file, size),
                rank=rank,
                world_size=size,
                timeout=timedelta(seconds=timeout_s),
            )
        except RuntimeError as error:
            raise group._alone(error) from error
        return group

    def limit(self, wait_s: float) -> None:
        """How long a verb waits for the others from now on."""
        self._limit = timedelta(seconds=wait_s)

    def sum_(self, x: Tensor) -> Tensor:
        """The sum of all ranks' x, which all have one shape; in place where x lies in memory as it is."""
        if self.size == 1:
            return x
        x = x.contiguous()
        self._wait(lambda: dist.all_reduce(x, async_op=True))
        return x

    def gather(self, x: Tensor) -> Tensor:
        """[rows, n] of each rank -> [rows, size * n] on all, in the order of ranks."""
        if self.size == 1:
            return x
        x = x.contiguous()
        parts = [torch.empty_like(x) for _ in range(self.size)]
        self._wait(lambda: dist.all_gather(parts, x, async_op=True))
        return torch.cat(parts, -1)

    def least(self, value: int) -> int:
        if self.size == 1:
            return value
        lowest = torch.tensor([value], dtype=torch.int64, device=self._device)
        self._wait(lambda: dist.all_reduce(lowest, op=dist.ReduceOp.MIN, async_op=True))
        return int(lowest.item())

    def _wait(self, begin: Any) -> None:
        try:
            work = begin()
            if self._limit is None or self._device.type == "cuda":
                work.wait()  # on a GPU a limit would make the CPU wait for every product
            else:
                work.wait(self._limit)
        except RuntimeError as error:
            raise self._alone(error) from error

    def _alone(self, error: RuntimeError) -> EngineDead:
        reason = _SOURCE.sub("", str(error).split("\n", 1)[0].split(". ", 1)[0])[:200]
        return EngineDead(f"rank {self.rank} of {self.size} lost the others: {reason}", where="runner")


ALONE = Group()
