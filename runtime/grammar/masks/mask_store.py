"""MaskStore: tables of masks kept in a folder, so that a new process need not make them again.

A file is named by the digest of vocabulary and content; it begins with a mark, the version of the format and
a digest of the rest, which is a list of arrays (dtype, shape, bytes). What is not whole, or of another
version, counts as absent and is written anew. Files are written beside and renamed, so that several processes
can share a folder; the oldest go when the folder grows beyond its bound. It does not know what is in the
arrays.
"""

from __future__ import annotations

import hashlib
import os
import struct
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from runtime.protocol.errors import BadRequest
from runtime.protocol.vocabulary import Vocabulary

_MARK = b"SGMASKS\x01"
_SUFFIX = ".masks"
_DTYPES = {b"i1": np.int8, b"i4": np.int32, b"i8": np.int64, b"u4": np.uint32}
_CODES = {np.dtype(kind): code for code, kind in _DTYPES.items()}
_HEAD = struct.Struct("<8s20s")
_ARRAY = struct.Struct("<2sBQQ")

Array = npt.NDArray[np.generic]


def vocabulary_digest(vocabulary: Vocabulary) -> bytes:
    """20 bytes that tell vocabularies apart: their tokens, special ids and ends."""
    digest = hashlib.blake2b(digest_size=20)
    lengths = np.fromiter(map(len, vocabulary.tokens), dtype="<i8", count=len(vocabulary))
    digest.update(lengths.tobytes())
    digest.update(b"".join(vocabulary.tokens))
    for ids in (vocabulary.special, vocabulary.eos):
        digest.update(struct.pack("<q", len(ids)) + np.array(sorted(ids), dtype="<i8").tobytes())
    return digest.digest()


class MaskStore:
    """The tables of one vocabulary in `folder`, which is made where it is not there. Raises BadRequest where
    that cannot be done."""

    def __init__(
        self, folder: str | os.PathLike[str], vocabulary: Vocabulary, limit_bytes: int = 1 << 30
    ) -> None:
        self._folder, self._limit = Path(folder), limit_bytes
        self._vocabulary = vocabulary_digest(vocabulary)
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            text = f"the folder {str(folder)!r} cannot be made: {error.strerror}"
            raise BadRequest(text, where="grammar_cache_dir") from None

    def path(self, key: bytes) -> Path:
        name = hashlib.blake2b(self._vocabulary + key, digest_size=20).hexdigest()
        return self._folder / f"{name}{_SUFFIX}"

    def load(self, key: bytes) -> tuple[Array, ...] | None:
        """The arrays saved under `key`, read only; None where there are none, or no whole ones."""
        path = self.path(key)
        try:
            data = path.read_bytes()
        except OSError:
            return None
        arrays = _unpacked(data)
        if arrays is not None:
            try:
                os.utime(path)
            except OSError:
                return arrays
        return arrays

    def save(self, key: bytes, arrays: Sequence[Array]) -> None:
        """Keep `arrays`. A folder that cannot be written to is left alone: the tables are only remade."""
        data = _packed(arrays)
        if len(data) > self._limit:
            return
        try:
            handle, name = tempfile.mkstemp(dir=self._folder, suffix=".part")
            try:
                with os.fdopen(handle, "wb") as file:
                    file.write(data)
                os.replace(name, self.path(key))
            except OSError:
                Path(name).unlink(missing_ok=True)
                return
            self._shrink()
        except OSError:
            return

    def _shrink(self) -> None:
        """Remove the files unused for the longest while they take more than the bound."""
        files = []
        for path in self._folder.glob(f"*{_SUFFIX}"):
            try:
                status = path.stat()
            except FileNotFoundError:
                continue  # another process was faster
            files.append((status.st_mtime_ns, status.st_size, path))
        held = sum(size for _, size, _ in files)
        for _, size, path in sorted(files):
            if held <= self._limit:
                return
            path.unlink(missing_ok=True)
            held -= size


def _packed(arrays: Sequence[Array]) -> bytes:
    parts = [struct.pack("<B", len(arrays))]
    for array in arrays:
        rows, columns = (array.shape[0], 0) if array.ndim == 1 else array.shape
        parts.append(_ARRAY.pack(_CODES[array.dtype], array.ndim, rows, columns))
        parts.append(np.ascontiguousarray(array).tobytes())
    body = b"".join(parts)
    return _HEAD.pack(_MARK, hashlib.blake2b(body, digest_size=20).digest()) + body


def _unpacked(data: bytes) -> tuple[Array, ...] | None:
    if len(data) <= _HEAD.size:
        return None
    mark, digest = _HEAD.unpack_from(data)
    body = memoryview(data)[_HEAD.size :]
    if mark != _MARK or hashlib.blake2b(body, digest_size=20).digest() != digest:
        return None
    arrays: list[Array] = []
    at = 1
    for _ in range(body[0]):
        if at + _ARRAY.size > len(body):
            return None
        code, ndim, rows, columns = _ARRAY.unpack_from(body, at)
        at += _ARRAY.size
        kind = _DTYPES.get(code)
        if kind is None or ndim not in (1, 2):
            return None
        shape = (rows,) if ndim == 1 else (rows, columns)
        count = rows if ndim == 1 else rows * columns
        size = count * np.dtype(kind).itemsize
        if at + size > len(body):
            return None
        arrays.append(np.frombuffer(body, dtype=kind, count=count, offset=at).reshape(shape))
        at += size
    return tuple(arrays) if at == len(body) else None
