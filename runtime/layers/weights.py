"""Checkpoint: the safetensors files of a directory, read one tensor at a time and checked against the model.
Weights: the same tensors for layers, in one dtype and on one device.

Knows file formats and names; not what the tensors are for.
"""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, TypeAlias

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from tqdm import tqdm

from runtime.config.fields import Fields
from runtime.protocol.errors import ModelLoadError

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
LOADABLE = (torch.float32, torch.bfloat16, torch.float16)
SHOW_PROGRESS_FROM = 1 << 30  # bytes of weights
Shape: TypeAlias = Sequence[int]
Part: TypeAlias = range | None
"""Rows or columns to read; None: all."""
Types: TypeAlias = Sequence[torch.dtype]


class Checkpoint:
    """An open checkpoint; use as a context manager. Every error names file and tensor.

    take() reads one tensor; finish() checks that no unexpected tensors are left. `bytes_taken`: bytes of all
    tensors, or parts of tensors, read so far.
    """

    def __init__(self, directory: Path, *, progress: bool = True) -> None:
        """progress: show a progress bar if there is much to read."""
        self.directory, self.bytes_taken = directory, 0
        self._progress = progress
        self._stack = contextlib.ExitStack()
        self._files: dict[str, Any] = {}
        self._file_of: dict[str, str] = {}
        self._taken: set[str] = set()
        self._bar: tqdm | None = None
        try:
            self._open()
            self._show_progress()
        except BaseException:
            self._stack.close()
            raise

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def __contains__(self, name: str) -> bool:
        return name in self._file_of

    def _open(self) -> None:
        single, index = self.directory / SINGLE, self.directory / INDEX
        if single.is_file():
            names = self._open_file(SINGLE)
            self._file_of = dict.fromkeys(names, SINGLE)
        elif index.is_file():
            self._open_shards(Fields.read(index).child("weight_map"))
        else:
            raise ModelLoadError(
                f"holds neither {SINGLE} nor {INDEX}",
                where=str(self.directory),
                hint="weights are read from safetensors files only; pickled .bin files are refused",
            )

    def _show_progress(self) -> None:
        total = sum((self.directory / file).stat().st_size for file in self._files)
        if self._progress and total >= SHOW_PROGRESS_FROM:
            self._bar = self._stack.enter_context(
                tqdm(total=total, unit="B", unit_scale=True, desc=f"loading {self.directory.name}")
            )

    def _open_shards(self, weight_map: Fields) -> None:
        if not weight_map.values:
            raise weight_map.fail("names no tensors")
        shards: dict[str, set[str]] = {}
        for name in weight_map.values:
            file = weight_map.text(name)
            if Path(file).name != file:
                raise weight_map.fail(f"{name!r} points outside the directory: {file!r}")
            if file not in shards:
                if not (self.directory / file).is_file():
                    raise ModelLoadError(
                        f"the shard is missing; {INDEX} expects {name!r} in it",
                        where=str(self.directory / file),
                    )
                shards[file] = set(self._open_file(file))
            if name not in shards[file]:
                raise ModelLoadError(
                    f"lacks {name!r}, which {INDEX} expects in it", where=str(self.directory / file)
                )
            self._file_of[name] = file
        for file, names in shards.items():
            stray = sorted(names - set(weight_map.values))
            if stray:
                raise ModelLoadError(
                    f"holds {stray[0]!r}, which {INDEX} does not list", where=str(self.directory / file)
                )

    def _open_file(self, file: str) -> Iterable[str]:
        path = self.directory / file
        try:
            self._files[file] = self._stack.enter_context(safe_open(str(path), framework="pt", device="cpu"))
            return list(self._files[file].keys())
        except (SafetensorError, OSError) as error:
            raise ModelLoadError(
                f"is not a whole safetensors file: {error}",
                where=str(path),
                hint="truncated download? fetch it again",
            ) from error

    def path_of(self, name: str) -> str:
        return str(self.directory / self._file_of.get(name, ""))

    def shape_of(self, name: str) -> tuple[int, ...]:
        """Raises ModelLoadError if the tensor is missing or unreadable."""
        file = self._file_of.get(name)
        if file is None:
            raise ModelLoadError(f"the tensor {name!r} is missing", where=str(self.directory))
        try:
            return tuple(self._files[file].get_slice(name).get_shape())
        except SafetensorError as error:
            raise ModelLoadError(f"{name!r} cannot be read: {error}", where=self.path_of(name)) from error

    def taken(self, name: str) -> bool:
        return name in self._taken

    def skip(self, name: str) -> None:
        """Ignore the tensor, if it exists."""
        self._taken.add(name)

    def take(
        self, name: str, shape: Shape, rows: Part = None, columns: Part = None, types: Types = LOADABLE
    ) -> Tensor:
        """The tensor `name`, on the CPU, in the checkpoint's dtype. `rows`, `columns`: read only these (None:
        all). Raises ModelLoadError if it is missing or unreadable, or its shape is not `shape`, or its dtype
        is not one of `types` (default: plain floating point)."""
        if rows is None and columns is None:
            return self._read(name, shape, None, types)
        parts = (rows,) if columns is None else (rows, columns)
        return self._read(name, shape, tuple(map(as_slice, parts)), types)

    def entry(
        self, name: str, shape: Shape, entry: int, rows: Part = None, columns: Part = None,
        types: Types = LOADABLE,
    ) -> Tensor:  # fmt: skip
        """One entry of the first dimension of the tensor `name`, whose shape is `shape`, as with take():
        [rows, columns, all of further dimensions]."""
        parts = tuple(as_slice(part) for part in (rows, columns))[: len(shape) - 1]
        return self._read(name, shape, (slice(entry, entry + 1), *parts), types)[0]

    def _read(self, name: str, shape: Shape, part: tuple[slice, ...] | None, types: Types) -> Tensor:
        """One tensor of the checkpoint. part: a slice per dimension; None: all of it."""
        file, path = self._file_of.get(name), self.path_of(name)
        if file is None:
            raise ModelLoadError(f"the tensor {name!r} is missing", where=str(self.directory))
        try:
            stored = self._files[file].get_slice(name)
            stored_shape = tuple(stored.get_shape())
            if stored_shape != tuple(shape):
                raise ModelLoadError(
                    f"{name!r} has shape {list(stored_shape)}, config.json implies {list(shape)}", where=path
                )
            tensor: Tensor = self._files[file].get_tensor(name) if part is None else stored[part]
        except SafetensorError as error:
            raise ModelLoadError(f"{name!r} cannot be read: {error}", where=path) from error
        if tensor.dtype not in types:
            raise ModelLoadError(f"{name!r} has type {tensor.dtype}, which is not supported", where=path)
        self._taken.add(name)
        self.bytes_taken += tensor.nbytes
        if self._bar is not None:
            self._bar.update(tensor.nbytes)
        return tensor

    def finish(self, ignored: tuple[str, ...], beyond: tuple[str, ...] = ()) -> None:
        """Raise ModelLoadError if tensors are left whose name neither ends in one of `ignored` nor begins
        with one of `beyond`: these are weights of another model."""
        left = sorted(
            name
            for name in self._file_of
            if name not in self._taken and not name.endswith(ignored) and not name.startswith(beyond)
        )
        if left:
            some = ", ".join(repr(name) for name in left[:3]) + (" ..." if len(left) > 3 else "")
            raise ModelLoadError(
                f"holds {len(left)} tensors the model has no place for: {some}",
                where=self.path_of(left[0]),
                hint="does config.json belong to these weights?",
            )


class RandomWeights(Checkpoint):
    """Small random numbers instead of a checkpoint's tensors, for measurements without weights. They are
    created on `device` and depend only on the tensor's name and the kind of device."""

    def __init__(self, directory: Path, device: torch.device) -> None:
        self._device = device
        super().__init__(directory, progress=False)

    def _open(self) -> None:
        """Reads no file."""

    def shape_of(self, name: str) -> tuple[int, ...]:
        raise ModelLoadError(
            f"the shape of {name!r} is not known without weights",
            where=str(self.directory),
            hint="leave load_format='dummy' out",
        )

    def _read(self, name: str, shape: Shape, part: tuple[slice, ...] | None, types: Types) -> Tensor:
        """The weights of norms are around 1. Raises ModelLoadError if `types` are quantised."""
        if torch.float32 not in types:
            raise ModelLoadError(
                f"{name!r} holds quantised numbers, for which there are no random ones",
                where=str(self.directory),
                hint="leave load_format='dummy' out",
            )
        dice = torch.Generator(self._device).manual_seed(zlib.crc32(name.encode()))
        tensor = torch.randn(tuple(shape), generator=dice, device=self._device).mul_(0.02)
        if len(shape) == 1 and not name.endswith("bias"):
            tensor += 1.0
        self._taken.add(name)
        return tensor if part is None else tensor[part]


class Weights:
    """Tensors of a checkpoint as `dtype` on `device`.

    `prefix`: put before each name that the checkpoint does not have as it is. `within`: replaces `model.` at
    the start of a name. `transposed`: suffixes of matrices that are stored as [inputs, outputs].
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        dtype: torch.dtype,
        device: torch.device,
        prefix: str = "",
        transposed: tuple[str, ...] = (),
        within: str = "",
    ) -> None:
        self.dtype, self.device, self._within = dtype, device, within
        self.checkpoint, self._prefix, self._transposed = checkpoint, prefix, transposed

    def __contains__(self, name: str) -> bool:
        return self._named(name) in self.checkpoint

    def take(
        self, name: str, shape: Shape, rows: Part = None, columns: Part = None, types: Types = LOADABLE
    ) -> Tensor:
        """The tensor in its stored dtype: see Checkpoint.take."""
        if name.endswith(self._transposed):
            shape = tuple(shape)[::-1]
            return self.checkpoint.take(self._named(name), shape, columns, rows, types).t()
        return self.checkpoint.take(self._named(name), shape, rows, columns, types)

    def shape_of(self, name: str) -> tuple[int, ...]:
        return self.checkpoint.shape_of(self._named(name))

    def taken(self, name: str) -> bool:
        """Whether it was read or skipped before."""
        return self.checkpoint.taken(self._named(name))

    def skip(self, *names: str) -> None:
        """Ignore these tensors, if they exist."""
        for name in names:
            self.checkpoint.skip(self._named(name))

    def entry(
        self, name: str, shape: Shape, entry: int, rows: Part = None, columns: Part = None,
        types: Types = LOADABLE,
    ) -> Tensor:  # fmt: skip
        """In its stored dtype: see Checkpoint.entry."""
        return self.checkpoint.entry(self._named(name), shape, entry, rows, columns, types)

    def tensor(self, name: str, shape: Shape, rows: Part = None) -> Tensor:
        """A copy in `dtype` on `device`. Raises ModelLoadError as take() does."""
        return self.take(name, shape, rows).to(self.device, self.dtype, copy=True)

    def path_of(self, name: str) -> str:
        return self.checkpoint.path_of(self._named(name))

    def _named(self, name: str) -> str:
        if name in self.checkpoint:
            return name
        if self._within and name.startswith("model."):
            return self._within + name.removeprefix("model.")
        return self._prefix + name


def as_slice(indices: Part) -> slice:
    return slice(None) if indices is None else slice(indices.start, indices.stop)
