"""The bytes of a pool of tensors: the same through KVMemory as through the pool, in each layout and dtype."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch
from msgspec.structs import replace

from runtime.attention.pool import HeadMajorPool, KVPool, KVShape, PageMajorPool
from runtime.disagg.transfer.memory import ArrayMemory, KVMemory, Order
from runtime.engine.kv_memory import TensorMemory, pool_memory
from runtime.plan import Run
from runtime.protocol.errors import TransferError

RUNS = [Run(20, 3), Run(2, 5), Run(9, 1)]
SLOTS = [20, 21, 22, 2, 3, 4, 5, 6, 9]
DEVICES = [
    "cpu",
    pytest.param(
        "cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]
    ),
]


@pytest.fixture
def file() -> Iterator[int]:
    made = os.memfd_create("kv")
    yield made
    os.close(made)


def make(kind: type[KVPool], dtype: torch.dtype, device: str, file: int | None = None) -> KVPool:
    pool = kind(KVShape(2, 3, 8, dtype, torch.device(device), file), 32)  # type: ignore[call-arg,arg-type]
    pool.kv.copy_(torch.randn(pool.kv.shape))
    return pool


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("order", ["token", "head"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kinds", [(HeadMajorPool, PageMajorPool), (PageMajorPool, HeadMajorPool)])
def test_it_is_the_pool(
    kinds: tuple[type[KVPool], type[KVPool]], dtype: torch.dtype, order: Order, device: str
) -> None:
    source, target = (make(kind, dtype, device) for kind in kinds)
    before = target.kv.clone()
    there, here = pool_memory(source), pool_memory(target)
    assert there.layout.order != here.layout.order
    here.layout.check(there.layout)
    there_runs = [Run(11, 9)]
    here.write(there_runs, range(3), order, there.read(RUNS, range(3), order))
    assert torch.equal(target.kv[11:20], source.kv[SLOTS])
    assert torch.equal(target.kv[:11], before[:11])
    assert torch.equal(target.kv[20:], before[20:])
    # one head alone, from a pool that has only that one
    part = pool_memory(
        PageMajorPool(KVShape(2, 1, 8, dtype, torch.device(device)), 32), first=1, total_heads=3
    )
    part.write([Run(0, 9)], range(1, 2), order, there.read(RUNS, range(1, 2), order))
    here.write([Run(0, 9)], range(1, 2), order, part.read([Run(0, 9)], range(1, 2), order))
    assert torch.equal(target.kv[:9, :, [1, 4]], source.kv[SLOTS][:, :, [1, 4]])
    assert torch.equal(target.kv[:9, :, [0, 2, 3, 5]], before[:9, :, [0, 2, 3, 5]])
    for memory in (there, here):
        assert isinstance(memory, TensorMemory if device == "cuda" else ArrayMemory)
        with pytest.raises(TransferError):
            memory.read([Run(31, 2)], range(3), order)


@pytest.mark.parametrize("order", ["token", "head"])
@pytest.mark.parametrize("kind", [HeadMajorPool, PageMajorPool])
def test_tensors_of_a_device_are_read_and_written_alike(kind: type[KVPool], order: Order) -> None:
    """What is for devices does the same on the CPU."""
    pool = make(kind, torch.bfloat16, "cpu")
    plain = pool_memory(pool)
    device = TensorMemory(pool.kv.view(torch.uint8), plain.layout)
    for heads in (range(3), range(1, 2)):
        assert device.read(RUNS, heads, order) == plain.read(RUNS, heads, order)
        data = torch.randint(256, (len(plain.read(RUNS, heads, order)),), dtype=torch.uint8).numpy().data
        before = pool.kv.clone()
        device.write(RUNS, heads, order, data)
        assert plain.read(RUNS, heads, order) == data
        rest = [slot for slot in range(32) if slot not in SLOTS]
        assert torch.equal(pool.kv[rest].view(torch.uint8), before[rest].view(torch.uint8))
    with pytest.raises(TransferError, match="bytes for slots"):
        device.write(RUNS, range(3), order, memoryview(b"x"))


@pytest.mark.parametrize("kind", [HeadMajorPool, PageMajorPool])
def test_it_is_mapped_a_second_time(kind: type[KVPool], file: int) -> None:
    pool = make(kind, torch.float32, "cpu", file)
    memory = pool_memory(pool, file)
    assert memory.mapping is not None
    twin: KVMemory = ArrayMemory.map(file, memory.mapping)
    assert twin.read(RUNS, range(3), "token") == memory.read(RUNS, range(3), "token")
    twin.write([Run(25, 5)], range(3), "token", twin.read([Run(2, 5)], range(3), "token"))
    assert torch.equal(pool.kv[25:30], pool.kv[2:7])
    reader = ArrayMemory.map(file, memory.mapping, write=False)
    with pytest.raises(ValueError, match="read-only"):
        reader.write([Run(0, 1)], range(3), "token", twin.read([Run(2, 1)], range(3), "token"))
    for bad in ({"slots": 33}, {"size": memory.mapping.size * 2}, {"strides": (1 << 40, 8, 8)}):
        with pytest.raises(TransferError, match="not as it is described"):
            ArrayMemory.map(file, replace(memory.mapping, **bad))
