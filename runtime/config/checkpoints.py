"""Finds a model's files, a directory or a bundled checkpoint by name, and reads its shape. Never uses the
network."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TypeAlias

from runtime import pocket
from runtime.config.encoder import ENCODERS, EncoderSpec, encoder_spec
from runtime.config.family import ARCHITECTURES
from runtime.config.fields import Fields
from runtime.config.gguf.directory import SUFFIX, directory_of
from runtime.config.model import ModelSpec
from runtime.protocol.errors import ModelLoadError, NoSuchModel

AnySpec: TypeAlias = ModelSpec | EncoderSpec
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


def read_spec(path: str | Path) -> AnySpec:
    """The shape of the checkpoint in `path`: a decoder's or an encoder's. Raises ModelLoadError: see
    ModelSpec.from_dir."""
    config = Path(os.path.expanduser(path)) / "config.json"
    if not config.is_file():
        return ModelSpec.from_dir(path)  # raises the error
    fields = Fields.read(config)
    names = fields.names("architectures")
    if names and names[0] in ENCODERS:
        return encoder_spec(names[0], fields)
    if names and names[0] not in ARCHITECTURES:
        raise fields.fail(
            f"unknown architecture {names[0]!r}",
            f"known: decoders {', '.join(ARCHITECTURES)}; encoders {', '.join(ENCODERS)}",
        )
    return ModelSpec.from_dir(path)


def draft_spec(spec: ModelSpec, draft: str) -> tuple[Path, ModelSpec]:
    """The checkpoint `draft`, and its shape. Raises ModelLoadError if it cannot draft for a model like
    `spec`."""
    folder = find_checkpoint(draft)
    small = read_spec(folder)
    if not isinstance(small, ModelSpec):
        raise ModelLoadError("a draft model must be a decoder, this is an encoder", where=draft)
    if small.vocab_size != spec.vocab_size:
        raise ModelLoadError(
            f"the draft model has {small.vocab_size} ids, the model {spec.vocab_size}",
            where=draft,
            hint="they must share their vocabulary: take one of the same family",
        )
    return folder, small
