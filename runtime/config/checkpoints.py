"""Finds a model's files: a directory, or a bundled checkpoint by name. Never uses the network."""

from __future__ import annotations

import os
from pathlib import Path

from runtime import pocket
from runtime.config.gguf.directory import SUFFIX, directory_of
from runtime.protocol.errors import ModelLoadError, NoSuchModel

BUNDLED: dict[str, Path] = {"pocket": pocket.path()}
"""Name -> directory in this package."""


def find_checkpoint(model: str | Path) -> Path:
    """The absolute directory of `model`. A bundled name means the bundled checkpoint (write ./name for a
    directory of that name). For a .gguf file, the directory that is created from it.

    Raises ModelLoadError naming the path and the bundled names. The directory's contents are checked when
    they are read.
    """
    bundled = BUNDLED.get(str(model))
    if bundled is not None:
        if bundled.is_dir():
            return bundled
        raise ModelLoadError(
            "the bundled checkpoint is missing from this installation",
            where=str(bundled),
            hint="install sglang-dsl again, or pass the directory of another checkpoint",
        )
    path = Path(os.path.expanduser(model))
    if path.suffix == SUFFIX and path.is_file():
        return directory_of(path)
    if str(model) and path.is_dir():
        return path.resolve()
    what = "is a file" if path.is_file() else "there is no such directory"
    raise NoSuchModel(
        f"{what}; a model is a directory with a checkpoint in it, a .gguf file or a bundled name "
        f"({', '.join(BUNDLED)})",
        where=str(model) or "model",
        hint="nothing is ever downloaded: get the checkpoint first, then pass its directory",
    )
