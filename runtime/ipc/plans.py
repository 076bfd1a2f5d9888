"""Plans, masks and results as structs for a runner in another process. Sends nothing itself.

A sequence's parameters and prompt are sent once, and of its output only new ids. Masks are in memory that
both processes map; if a mask lists its ids, only the list is sent.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Collection, Mapping, Sequence
from types import GenericAlias
from typing import Any, Final, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from runtime.plan import Adapter, Image, Row, StepPlan, StepResult, TokenMask
from runtime.protocol.control import VERBS, MemoryPart
from runtime.protocol.errors import WireError
from runtime.protocol.sampling import SamplingParams

Bytes: TypeAlias = npt.NDArray[np.uint8]
_ALIGNED = 64
_SMALLEST = 1 << 16
_LEFT_OUT: Final = SamplingParams()  # encoded as one byte


class Change(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """The changes of a sequence; None: unchanged. output: (earlier ids that stay, the ids after them)."""

    seq: int
    sampling: SamplingParams | None
    prompt: list[int] | None
    output: tuple[int, list[int]] | None


class Launch(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """Run this plan. `sampling`, `prompt` and `output` of its rows are in `changes`, or in earlier ones.
    `at_once`: no masks will follow; send the result as soon as it is ready."""

    number: int
    plan: StepPlan
    changes: tuple[Change, ...]
    at_once: bool


class MaskPosition(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """The position of a row's mask in the shared memory: byte offsets and sizes of `bits` (uint32) and
    `allowed` (int64 ids); -1: not sent. The later ones of a row are the masks after its drafts."""

    row: int
    bits: int
    bits_size: int
    allowed: int
    ids: int


class Finish(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """Sample with these masks. size: the number of bytes to map."""

    number: int
    masks: tuple[MaskPosition, ...]
    size: int


class Call(msgspec.Struct, frozen=True, array_like=True):
    """Call the runner's method `name` (see CALLS). answered: by Done or Failure."""

    name: str
    args: msgspec.Raw
    answered: bool = True


CALLS: Final[Mapping[str, Any]] = {
    "verify": tuple[SamplingParams, str | None],
    "load_adapter": tuple[Adapter],
    "unload_adapter": tuple[int],
    "load_images": tuple[tuple[Image, ...]],
    "drop_images": tuple[tuple[int, ...]],
    "update_weights": tuple[str],
    "release_memory": tuple[tuple[MemoryPart, ...]],
    "restore_memory": tuple[tuple[MemoryPart, ...], str],
    "start_profile": tuple[str | None, int | None],
    "stop_profile": tuple[()],
    **{verb.name: GenericAlias(tuple, verb.request) for verb in VERBS.values() if verb.by == "runner"},
}
"""The methods that can be called, with the types of their arguments. verify: the parameters, and the module
of their logit processor."""
_ENCODER: Final = msgspec.msgpack.Encoder()


def call(name: str, *args: Any, answered: bool = True) -> Call:
    """Raises WireError for an argument that cannot be encoded."""
    try:
        return Call(name, msgspec.Raw(_ENCODER.encode(args)), answered)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise WireError(f"a {name} cannot be written: {error}", where=name) from error


def arguments_of(order: Call) -> Any:
    """The arguments, converted to their types. Raises WireError for an unknown name, or another type."""
    if order.name not in CALLS:
        raise WireError(f"unknown call {order.name[:80]!r}", where="name")
    try:
        return msgspec.msgpack.decode(order.args, type=CALLS[order.name])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise WireError(f"not a {order.name}: {error}", where=order.name) from error


class Result(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """The result of the plan with this number."""

    number: int
    result: StepResult


class Failure(msgspec.Struct, frozen=True, array_like=True):
    """The error of a plan, or of a call (number -1). error: RuntimeFault.to_dict()."""

    number: int
    error: dict[str, Any]


class Done(msgspec.Struct, frozen=True, array_like=True):
    """The answer to calls."""

    data: dict[str, Any] = {}


Order: TypeAlias = Launch | Finish | Call
Answer: TypeAlias = Result | Failure | Done
ORDERS: Final[tuple[type[msgspec.Struct], ...]] = (Launch, Finish, Call)
ANSWERS: Final[tuple[type[msgspec.Struct], ...]] = (Result, Failure, Done)


class _Sequence:
    """The parts of a sequence that both sides keep."""

    __slots__ = ("output", "prompt", "sampling")

    def __init__(self) -> None:
        self.sampling = _LEFT_OUT
        self.prompt: list[int] = []
        self.output: list[int] = []


class PlanWriter:
    """Plans -> Launch. Every result must be sent, in this order."""

    def __init__(self) -> None:
        self._known: dict[int, _Sequence] = {}
        self._number = 0

    def write(self, plan: StepPlan, *, at_once: bool) -> Launch:
        for seq in plan.released:
            self._known.pop(seq, None)
        self._number += 1
        changes = tuple([change for row in plan.rows if (change := self._change(row)) is not None])
        rows = tuple([replace(row, sampling=_LEFT_OUT, prompt=(), output=()) for row in plan.rows])
        return Launch(self._number, StepPlan(rows, plan.segments, plan.released), changes, at_once)

    def forget(self, plan: StepPlan) -> None:
        """The plan was not sent: send its sequences in full the next time."""
        for row in plan.rows:
            self._known.pop(row.seq, None)

    def _change(self, row: Row) -> Change | None:
        known = self._known.get(row.seq)
        fresh = known is None  # send everything: the other side may have older data
        if known is None:
            known = self._known[row.seq] = _Sequence()
        sampling = prompt = output = None
        if known.sampling is not row.sampling:
            known.sampling = sampling = row.sampling
        if row.prompt or known.prompt or fresh:
            prompt_ids = row.prompt if type(row.prompt) is list else list(row.prompt)
            if prompt_ids != known.prompt or fresh:
                known.prompt = prompt = list(prompt_ids)
        if row.output or known.output or fresh:
            output = _change(known.output, row.output)
            del known.output[output[0] :]
            known.output += output[1]
        if sampling is None and prompt is None and output is None:
            return None
        return Change(row.seq, sampling, prompt, output)


def _change(before: list[int], after: Sequence[int]) -> tuple[int, list[int]]:
    """How many ids of `before` stay, and the ids that follow them."""
    now = list(after)
    keep = len(before)
    if now[:keep] != before:
        keep = next(
            (at for at, (one, other) in enumerate(zip(before, now)) if one != other), min(keep, len(now))
        )
    return keep, now[keep:]


class PlanReader:
    """Launch -> plans; all of one writer, in order."""

    def __init__(self) -> None:
        self._known: dict[int, _Sequence] = {}

    def read(self, order: Launch) -> StepPlan:
        plan = order.plan
        for seq in plan.released:
            self._known.pop(seq, None)
        for change in order.changes:
            known = self._known.setdefault(change.seq, _Sequence())
            if change.sampling is not None:
                known.sampling = change.sampling
            if change.prompt is not None:
                known.prompt = change.prompt
            if change.output is not None:
                keep, more = change.output
                del known.output[keep:]
                known.output += more
        return StepPlan(tuple([self._row(row) for row in plan.rows]), plan.segments, plan.released)

    def _row(self, row: Row) -> Row:
        known = self._known[row.seq]
        return replace(row, sampling=known.sampling, prompt=known.prompt, output=known.output)


class MaskWriter:
    """Writes masks to anonymous shared memory, which begins with a number that the other side writes."""

    def __init__(self) -> None:
        self.file = os.memfd_create("masks")
        self._grow(_SMALLEST)

    @property
    def size(self) -> int:
        return len(self._bytes)

    @property
    def ended(self) -> int:
        """The number of the plan whose pass ended last."""
        return int(self._ended[0])

    def write(self, masks: Mapping[int, TokenMask], whole: Collection[int] = ()) -> tuple[MaskPosition, ...]:
        """The positions of the masks. whole: rows whose bits are sent even if the mask lists its ids."""
        arrays: list[npt.NDArray[Any]] = []
        offsets: dict[int, int] = {}
        end = _ALIGNED
        locations: list[MaskPosition] = []

        def put(array: Any, kind: type[np.generic]) -> tuple[int, int]:
            nonlocal end
            at = offsets.get(id(array))
            if at is None:
                at = offsets[id(array)] = end
                arrays.append(np.ascontiguousarray(array, dtype=kind))
                end += _padded_size(arrays[-1])
            return at, len(array)

        for row, mask in [(row, one) for row, first in masks.items() for one in (first, *first.behind)]:
            bits = allowed = (-1, 0)
            if mask.allowed is not None:
                allowed = put(mask.allowed, np.int64)
            if mask.allowed is None or row in whole:
                bits = put(mask.bits, np.uint32)
            locations.append(MaskPosition(row, *bits, *allowed))
        if end > self.size:
            self._grow(end)
        at = _ALIGNED
        for array in arrays:
            self._bytes[at : at + array.nbytes] = array.view(np.uint8)
            at += _padded_size(array)
        return tuple(locations)

    def close(self) -> None:
        os.close(self.file)

    def _grow(self, size: int) -> None:
        size = 1 << (size - 1).bit_length()
        os.ftruncate(self.file, size)
        self._bytes: Bytes = np.frombuffer(mmap.mmap(self.file, size), dtype=np.uint8)
        self._ended = self._bytes[:8].view(np.int64)


def _padded_size(array: npt.NDArray[Any]) -> int:
    """Bytes from an array's offset to the next one; also for an empty array, so that offsets are unique."""
    return max(1, -(-array.nbytes // _ALIGNED)) * _ALIGNED


class MaskReader:
    """The other side of the same memory. The masks are views, valid until the next ones are written."""

    def __init__(self, file: int) -> None:
        self._file = file
        self._map(_SMALLEST)

    def tell_ended(self, number: int) -> None:
        """The pass of this plan has ended."""
        self._ended[0] = number

    def read(self, order: Finish) -> dict[int, TokenMask]:
        """Masks by row. `bits` is None if they were not sent. Rows that share an array share it here too."""
        if order.size > len(self._bytes):
            self._map(order.size)
        seen: dict[int, npt.NDArray[Any]] = {}

        def get(at: int, count: int, kind: type[np.generic]) -> npt.NDArray[Any] | None:
            if at < 0:
                return None
            if at not in seen:
                seen[at] = np.frombuffer(self._bytes, dtype=kind, count=count, offset=at)
            return seen[at]

        masks: dict[int, TokenMask] = {}
        behind: dict[int, list[TokenMask]] = {}
        for one in order.masks:
            mask = TokenMask(get(one.bits, one.bits_size, np.uint32), get(one.allowed, one.ids, np.int64))
            if one.row in masks:
                behind.setdefault(one.row, []).append(mask)
            else:
                masks[one.row] = mask
        for row, more in behind.items():
            masks[row] = masks[row]._replace(behind=tuple(more))
        return masks

    def _map(self, size: int) -> None:
        self._bytes: Bytes = np.frombuffer(mmap.mmap(self._file, size), dtype=np.uint8)
        self._ended = self._bytes[:8].view(np.int64)
