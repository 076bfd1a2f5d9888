"""Access to the bytes of a KV pool, with or without torch: reads and writes slots and heads."""

from __future__ import annotations

import math
import mmap
import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, Literal, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from runtime.plan import Run
from runtime.protocol.errors import TransferError

Array: TypeAlias = npt.NDArray[Any]
Order: TypeAlias = Literal["token", "head"]
"""The order of KV in a piece: "token": [tokens, layers, 2, heads, width]; "head": [layers, 2, heads, tokens,
width]. Each pool prefers the one that is closer to its own."""


class KVLayout(msgspec.Struct, frozen=True):
    """The KV that a pool keeps of each token. Both sides of a transfer exchange theirs, which must be
    compatible.

    layers       of the model
    total_heads  key heads of the whole model
    head_bytes   of one key head of one token: head_dim times the size of a number
    dtype        of the numbers, as torch calls it
    first, heads which key heads the pool has: `heads` from `first` on; of one rank maybe not all
    order        the preferred order of pieces
    """

    layers: int
    total_heads: int
    head_bytes: int
    dtype: str
    first: int = 0
    heads: int = 0
    order: Order = "token"

    @property
    def span(self) -> range:
        return range(self.first, self.first + self.heads)

    def token_bytes(self, heads: int) -> int:
        """Of one token, in so many of its key heads and their value heads."""
        return self.layers * 2 * heads * self.head_bytes

    def check(self, other: KVLayout) -> None:
        """Raise TransferError, naming what differs, unless KV of `other` can be used here."""
        for name in ("layers", "total_heads", "head_bytes", "dtype", "first", "heads"):
            mine, theirs = getattr(self, name), getattr(other, name)
            if mine != theirs:
                raise TransferError(
                    f"the other engine's KV has {name} {theirs}, this one's {mine}",
                    where="KV layout",
                    hint="start both sides with the same model and dtype",
                )


class KVMapping(msgspec.Struct, frozen=True):
    """The layout of a pool in shared memory. strides: bytes to the next slot, layer, head (key heads before
    value heads); size: of the whole."""

    layout: KVLayout
    slots: int
    strides: tuple[int, int, int]
    size: int


class KVMemory(ABC):
    """A pool, as bytes. Heads are counted in the whole model. Any thread may call it; calls on other slots
    may run at the same time. file, mapping: where it lies, if other processes can map it."""

    layout: KVLayout
    slots: int
    file: int | None
    mapping: KVMapping | None

    @abstractmethod
    def read(self, runs: Sequence[Run], heads: range, order: Order) -> memoryview:
        """A copy of the KV in `runs`. Raises TransferError for slots or heads outside of this pool."""

    @abstractmethod
    def write(self, runs: Sequence[Run], heads: range, order: Order, data: memoryview) -> None:
        """Raises TransferError as read() does, and if `data` has another size."""


class ArrayMemory(KVMemory):
    """Over an array of bytes [slots, layers, 2 * heads, head_bytes] with any strides: key heads before value
    heads. The caller closes the file."""

    def __init__(
        self, array: Array, layout: KVLayout, file: int | None = None, mapping: KVMapping | None = None
    ) -> None:
        self.slots, layers, heads, width = array.shape
        if (layers, heads, width) != (layout.layers, 2 * layout.heads, layout.head_bytes):
            raise ValueError(f"an array of shape {array.shape} for {layout}")
        self.layout, self.file, self.mapping = layout, file, mapping
        # [slots, layers, 2, heads, width]; splitting an axis never copies.
        self.view = array.reshape(self.slots, layers, 2, layout.heads, width)
        if not np.may_share_memory(self.view, array):
            raise ValueError("the array cannot be split into keys and values where it lies")

    @property
    def address(self) -> tuple[int, KVMapping]:
        """Its address in this process, and its layout there."""
        shape, strides = self.view.shape, self.view.strides
        slot, layer, kind, _, _ = strides
        head = kind // self.layout.heads  # of one head alone the step to the next may be anything
        size = 1 + sum((count - 1) * stride for count, stride in zip(shape, strides))
        mapping = KVMapping(self.layout, self.slots, (slot, layer, head), size)
        return int(self.view.__array_interface__["data"][0]), mapping

    @classmethod
    def map(cls, file: int, mapping: KVMapping, *, write: bool = True) -> ArrayMemory:
        """The pool in `file`. Raises TransferError if another process's `mapping` does not fit it."""
        layout, (a, b, c) = mapping.layout, mapping.strides
        shape = (mapping.slots, layout.layers, 2 * layout.heads, layout.head_bytes)
        last = sum((count - 1) * stride for count, stride in zip(shape, (a, b, c, 1)))
        sound = min(*shape, a, b, c) > 0 and last < mapping.size <= os.fstat(file).st_size
        if not sound:
            raise TransferError("the KV pool is not as it is described", where="shared memory")
        access = mmap.ACCESS_WRITE if write else mmap.ACCESS_READ
        data = mmap.mmap(file, mapping.size, access=access)
        array = np.ndarray(shape, dtype=np.uint8, buffer=data, strides=(a, b, c, 1))
        return cls(array, layout, file, mapping)

    def parts(self, runs: Sequence[Run], heads: range) -> list[Array]:
        """Views [tokens, layers, 2, heads, width] of these slots. Raises TransferError."""
        check_slots(self.layout, self.slots, runs, heads)
        first = heads.start - self.layout.first
        selected = self.view[:, :, :, first : first + len(heads)]
        return [selected[run.start : run.start + run.length] for run in runs]

    def read(self, runs: Sequence[Run], heads: range, order: Order) -> memoryview:
        parts = self.parts(runs, heads)
        piece = np.empty(size_of(self.layout, runs, heads), dtype=np.uint8)
        _copy(parts, as_tokens(piece, self.layout, len(heads), order), into=True)
        return piece.data

    def write(self, runs: Sequence[Run], heads: range, order: Order, data: memoryview) -> None:
        parts = self.parts(runs, heads)
        check_size(self.layout, runs, heads, data)
        piece = np.frombuffer(data, dtype=np.uint8)
        _copy(parts, as_tokens(piece, self.layout, len(heads), order), into=False)


class JoinedMemory(KVMemory):
    """The pools of the ranks that share a model as one pool with all heads, so that a transfer need not know
    the number of ranks. `parts`: each rank's pool, with the same slots. A head that several ranks have is
    read from the first of them, and written to all. It has no file."""

    def __init__(self, parts: Sequence[ArrayMemory]) -> None:
        """Raises TransferError if no rank has some head, ValueError for pools that do not belong together."""
        one = parts[0].layout
        self.slots = parts[0].slots
        self.layout: KVLayout = msgspec.structs.replace(one, first=0, heads=one.total_heads)
        for part in parts:
            alike = msgspec.structs.replace(part.layout, first=one.first, heads=one.heads)
            if part.slots != self.slots or alike != one:
                raise ValueError(f"pools that differ: {part.slots} slots, {part.layout}; {self.slots}, {one}")
        self.file: int | None = None
        self.mapping: KVMapping | None = None
        self._parts = tuple(parts)
        self._have = [part.layout.span for part in parts]
        share(self.layout.span, self._have)

    def read(self, runs: Sequence[Run], heads: range, order: Order) -> memoryview:
        check_slots(self.layout, self.slots, runs, heads)
        piece = np.empty(size_of(self.layout, runs, heads), dtype=np.uint8)
        tokens = as_tokens(piece, self.layout, len(heads), order)
        for index, mine in share(heads, self._have):
            first = mine.start - heads.start
            part = tokens[:, :, :, first : first + len(mine)]
            _copy(self._parts[index].parts(runs, mine), part, into=True)
        return piece.data

    def write(self, runs: Sequence[Run], heads: range, order: Order, data: memoryview) -> None:
        check_slots(self.layout, self.slots, runs, heads)
        check_size(self.layout, runs, heads, data)
        tokens = as_tokens(np.frombuffer(data, dtype=np.uint8), self.layout, len(heads), order)
        for rank, have in zip(self._parts, self._have):
            mine = range(max(heads.start, have.start), min(heads.stop, have.stop))
            if len(mine):
                first = mine.start - heads.start
                part = tokens[:, :, :, first : first + len(mine)]
                _copy(rank.parts(runs, mine), part, into=False)


def as_tokens(piece: Array, layout: KVLayout, heads: int, order: Order) -> Array:
    """A piece's bytes as [tokens, layers, 2, heads, width]."""
    if order == "token":
        return piece.reshape(-1, layout.layers, 2, heads, layout.head_bytes)
    return piece.reshape(layout.layers, 2, heads, -1, layout.head_bytes).transpose(3, 0, 1, 2, 4)


def tokens_of(runs: Sequence[Run]) -> int:
    return sum(run.length for run in runs)


def size_of(layout: KVLayout, runs: Sequence[Run], heads: range) -> int:
    return tokens_of(runs) * layout.token_bytes(len(heads))


def check_slots(layout: KVLayout, slots: int, runs: Sequence[Run], heads: range) -> None:
    """Raise TransferError for heads or slots outside of this pool."""
    if not len(heads) or heads.step != 1 or heads.start not in layout.span or heads[-1] not in layout.span:
        raise TransferError(f"heads {heads} asked for, there are {layout.span}", where="KV pool")
    for run in runs:
        if run.length < 1 or run.start < 0 or run.start + run.length > slots:
            raise TransferError(f"{run} is not within {slots} slots", where="KV pool")


def check_size(layout: KVLayout, runs: Sequence[Run], heads: range, data: memoryview) -> None:
    size = size_of(layout, runs, heads)
    if data.nbytes != size:
        raise TransferError(f"{data.nbytes} bytes for slots of {size}", where="KV pool")


def share(want: range, have: Sequence[range]) -> list[tuple[int, range]]:
    """Which rank provides which of the heads `want`: (index into `have`, heads), each head once. Of ranks
    with the same heads the first is taken. Raises TransferError for a head that no rank has."""
    shares: list[tuple[int, range]] = []
    head = want.start
    while head < want.stop:
        index = next((at for at, one in enumerate(have) if head in one), None)
        if index is None:
            raise TransferError(f"no rank has head {head}", where="KV layout")
        stop = min(want.stop, have[index].stop)
        shares.append((index, range(head, stop)))
        head = stop
    return shares


def cut(runs: Sequence[Run], first: int, count: int) -> list[Run]:
    """The slots of `count` tokens of `runs`, from the `first` on."""
    part: list[Run] = []
    for start, length in runs:
        skip, first = min(first, length), max(0, first - length)
        take = min(length - skip, count)
        if take > 0:
            part.append(Run(start + skip, take))
            count -= take
    if count:
        raise ValueError(f"{count} tokens beyond the end of {runs}")
    return part


def spots(mapping: KVMapping, runs: Sequence[Run], heads: range) -> Array:
    """Where a pool keeps the KV of `runs`: [pieces, 2] int64, offset and bytes, in the pool's preferred
    order. Raises TransferError for slots or heads outside of this pool."""
    layout = mapping.layout
    check_slots(layout, mapping.slots, runs, heads)
    slot, layer, head = mapping.strides
    width, first = layout.head_bytes, heads.start - layout.first
    layers = np.arange(layout.layers)[:, None, None] * layer
    kinds = np.arange(2)[:, None] * (layout.heads * head)
    each = (layers + kinds + (first + np.arange(len(heads))) * head).reshape(-1)  # of a token's first slot
    starts = np.array([run.start for run in runs]) * slot
    counts = np.array([run.length for run in runs])
    whole = len(heads) == layout.heads and head == width and layer == 2 * layout.heads * width
    if layout.order == "token" and whole and slot == layout.layers * layer:
        return np.stack([starts, counts * slot], axis=1)
    if layout.order == "token":
        slots = np.concatenate([np.arange(run.start, run.start + run.length) for run in runs]) * slot
        offsets = (slots[:, None] + each).reshape(-1)
        return np.stack([offsets, np.full(len(offsets), width)], axis=1)
    if slot != width:
        raise TransferError("tokens of one head do not lie side by side", where="KV pool")
    offsets = (each[:, None] + starts).reshape(-1)
    return np.stack([offsets, np.tile(counts * width, len(each))], axis=1)


def copy_between(
    source: ArrayMemory, there: Sequence[Run], target: ArrayMemory, here: Sequence[Run], heads: range
) -> None:
    """The KV in `there` of `source`, to as many slots `here` of `target`. Raises TransferError."""
    if tokens_of(there) != tokens_of(here):
        raise TransferError(f"KV of {tokens_of(there)} tokens for {tokens_of(here)}", where="KV pool")
    pairs = list(zip(*_alike(there, here)))
    for one, other in zip(
        source.parts([pair[0] for pair in pairs], heads), target.parts([pair[1] for pair in pairs], heads)
    ):
        np.copyto(*(_widen(other, one) or (other, one)))


def _alike(one: Sequence[Run], other: Sequence[Run]) -> tuple[list[Run], list[Run]]:
    """The same slots, in runs of the same lengths."""
    ends = sorted({*accumulate(run.length for run in one), *accumulate(run.length for run in other)})
    lengths = [end - begin for begin, end in zip([0, *ends], ends)]
    starts = [0, *ends][:-1]
    first, second = (
        [run for start, length in zip(starts, lengths) for run in cut(runs, start, length)]
        for runs in (one, other)
    )
    return first, second


def make_memory(slots: int, layout: KVLayout, *, file: int | None = None) -> ArrayMemory:
    """A pool of zeros of its own, in the layout's order, in `file` if given: for tests and measurements."""
    heads, width = 2 * layout.heads, layout.head_bytes
    if file is not None:
        strides = (layout.layers * heads * width, heads * width, width)
        if layout.order == "head":
            strides = (width, heads * slots * width, slots * width)
        mapping = KVMapping(layout, slots, strides, slots * layout.layers * heads * width)
        os.ftruncate(file, mapping.size)
        return ArrayMemory.map(file, mapping)
    if layout.order == "token":
        return ArrayMemory(np.zeros((slots, layout.layers, heads, width), dtype=np.uint8), layout)
    lying = np.zeros((layout.layers, heads, slots, width), dtype=np.uint8)
    return ArrayMemory(lying.transpose(2, 0, 1, 3), layout)


def _copy(parts: Sequence[Array], tokens: Array, *, into: bool) -> None:
    """Between a pool's parts and a piece, `into` the piece or out of it."""
    at = 0
    for part in parts:
        beside = tokens[at : at + len(part)]
        at += len(part)
        target, source = (beside, part) if into else (part, beside)
        wide = _widen(target, source)
        np.copyto(*(wide or (target, source)))


def _widen(target: Array, source: Array) -> tuple[Array, Array] | None:
    """Both as eight-byte numbers where their last axis allows it: fewer steps of the same copy."""
    if target.shape[-1] % 8 or math.gcd(*target.strides[:-1], *source.strides[:-1]) % 8:
        return None
    if target.strides[-1] != 1 or source.strides[-1] != 1:
        return None
    return target.view(np.uint64), source.view(np.uint64)
