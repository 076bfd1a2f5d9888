"""Memory in huge pages is memory like any other: any type and size, and the system's again when it goes."""

from __future__ import annotations

import errno
import mmap
from typing import Any

import psutil
import pytest
import torch

from runtime.kernels.native import panels
from runtime.kernels.native.panels import HUGE, empty

SIZES = [(0,), (3, 5), (HUGE // 4 - 1,), (HUGE // 4,), (700, 1024), (3, HUGE // 2)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
@pytest.mark.parametrize("size", SIZES)
def test_any_size_and_type(size: tuple[int, ...], dtype: torch.dtype) -> None:
    made = empty(size, dtype)
    assert (made.shape, made.dtype) == (size, dtype)
    assert made.is_contiguous()
    numbers = torch.arange(made.numel()).view(size).to(dtype)
    assert torch.equal(made.copy_(numbers), numbers)


@pytest.mark.skipif(not panels._CAN_ASK, reason="this system has no huge pages to ask for")
def test_large_ones_begin_at_a_huge_page() -> None:
    assert empty((HUGE,), torch.int8).data_ptr() % HUGE == 0


def test_it_goes_when_it_is_dropped() -> None:
    process, size = psutil.Process(), 64 << 20
    made = empty((size,), torch.int8).fill_(1)
    rows = made.view(64, -1)[3:5]
    del made
    full = process.memory_info().rss
    assert rows.sum() == rows.numel()  # a view keeps all of it
    del rows
    assert process.memory_info().rss < full - 0.9 * size


@pytest.mark.parametrize("refused", ["room", "pages"])
def test_without_huge_pages_it_is_ordinary_memory(monkeypatch: pytest.MonkeyPatch, refused: str) -> None:
    def no_room(*given: Any, **words: Any) -> Any:
        raise OSError(errno.ENOMEM, "no room")

    class Refusing(mmap.mmap):
        def madvise(self, *given: int) -> None:
            raise OSError(errno.EINVAL, "no such pages")

    monkeypatch.setattr(panels.mmap, "mmap", no_room if refused == "room" else Refusing)
    made = empty((HUGE,), torch.int8)
    assert made.fill_(7).sum(dtype=torch.int64) == 7 * HUGE
