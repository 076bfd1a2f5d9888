"""MaskStore: tables of masks kept in a folder, so that a new process need not compute them again.

A file is named by the digest of vocabulary and content, and begins with a digest of the rest, which is
numpy's .npz; a damaged one counts as absent. Files are renamed into place: processes can share a folder.
"""

from __future__ import annotations

import hashlib
import io
import os
import struct
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
import numpy.typing as npt

from runtime.protocol.errors import BadRequest
from runtime.protocol.vocabulary import Vocabulary

_MARK = b"SGMASKS\x02"
_SUFFIX = ".masks"
_DIGEST = 20

Array = npt.NDArray[np.generic]


def vocabulary_digest(vocabulary: Vocabulary) -> bytes:
    """A digest of the vocabulary's tokens, special ids and ends."""
    digest = hashlib.blake2b(digest_size=_DIGEST)
    lengths = np.fromiter(map(len, vocabulary.tokens), dtype="<i8", count=len(vocabulary))
    digest.update(lengths.tobytes())
    digest.update(b"".join(vocabulary.tokens))
    for ids in (vocabulary.special, vocabulary.eos):
        digest.update(struct.pack("<q", len(ids)) + np.array(sorted(ids), dtype="<i8").tobytes())
    return digest.digest()


class MaskStore:
    """The tables of one vocabulary in `folder`, which is created. The files unused for the longest go when
    all take more than `limit_bytes`. Raises BadRequest if the folder cannot be created."""

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
        return self._folder / f"{_digest(self._vocabulary + key).hex()}{_SUFFIX}"

    def load(self, key: bytes) -> tuple[Array, ...] | None:
        """The arrays saved under `key`, read only; None if there are none, or the file is damaged."""
        path = self.path(key)
        try:
            data = path.read_bytes()
        except OSError:
            return None
        if data[:_DIGEST] != _digest(data[_DIGEST:]):
            return None
        with suppress(OSError):
            os.utime(path)
        with np.load(io.BytesIO(data[_DIGEST:]), allow_pickle=False) as file:
            arrays: tuple[Array, ...] = tuple(file[name] for name in file.files)
        for array in arrays:
            array.flags.writeable = False
        return arrays

    def save(self, key: bytes, arrays: Sequence[Array]) -> None:
        """Keep `arrays`. If the folder cannot be written to, they are computed again next time."""
        file = io.BytesIO()
        np.savez(file, *arrays)
        data = _digest(file.getvalue()) + file.getvalue()
        if len(data) > self._limit:
            return
        with suppress(OSError):
            handle, name = tempfile.mkstemp(dir=self._folder, suffix=".part")
            try:
                with os.fdopen(handle, "wb") as part:
                    part.write(data)
                os.replace(name, self.path(key))
            except OSError:
                Path(name).unlink(missing_ok=True)
                return
            self._shrink()

    def _shrink(self) -> None:
        files = []
        for path in self._folder.glob(f"*{_SUFFIX}"):
            with suppress(FileNotFoundError):  # another process may have removed it
                status = path.stat()
                files.append((status.st_mtime_ns, status.st_size, path))
        held = sum(size for _, size, _ in files)
        for _, size, path in sorted(files):
            if held <= self._limit:
                return
            path.unlink(missing_ok=True)
            held -= size


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(_MARK + data, digest_size=_DIGEST).digest()
