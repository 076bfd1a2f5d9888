"""Pooling: which token outputs of a text become its vector, according to the checkpoint's files. Torch-free.

It knows the files of sentence-transformers (modules.json and the pooling's config.json), not how anything is
computed.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from runtime.config.fields import Fields
from runtime.protocol.errors import ModelLoadError

MODES = ("cls", "mean", "last", "max")
_MODE_FIELDS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_lasttoken": "last",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
}
_FOLDER = "1_Pooling"


@dataclass(frozen=True, slots=True)
class Pooling:
    """mode: the first token's output, the mean of all, the last one's, or the elementwise maximum; the
    special tokens that the tokenizer adds count. normalize: vectors have length 1."""

    mode: str
    normalize: bool = True


ENCODER_DEFAULT = Pooling("cls")
DECODER_DEFAULT = Pooling("last")


def read_pooling(
    path: Path, default: Pooling, *, mode: str | None = None, normalize: bool | None = None
) -> Pooling:
    """The checkpoint's pooling: from modules.json and 1_Pooling/config.json, else `default`; `mode` and
    `normalize` override both.

    A checkpoint with a modules.json has vectors of length 1 if it lists Normalize, and only then. Raises
    ModelLoadError if a file is broken, or a step or a mode is not supported.
    """
    pooling = default
    steps = _steps(path / "modules.json")
    if steps is not None:
        pooling = replace(pooling, normalize="Normalize" in steps)
        folder = steps.get("Pooling")
    else:
        folder = _FOLDER
    file = path / folder / "config.json" if folder else None
    if mode is not None:
        pooling = replace(pooling, mode=mode)
    elif file is not None and file.is_file():
        pooling = replace(pooling, mode=_mode(Fields.read(file)))
    return pooling if normalize is None else replace(pooling, normalize=normalize)


def _steps(file: Path) -> dict[str, str] | None:
    """Kind -> folder of the modules listed; None if there is no file."""
    if not file.is_file():
        return None
    try:
        listed: Any = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise ModelLoadError(f"cannot be read: {error}", where=str(file)) from error
    steps: dict[str, str] = {}
    for one in listed if isinstance(listed, list) else [None]:
        match one:
            case {"type": str(kind), "path": str(folder)} if folder in ("", Path(folder).name):
                steps[kind.rpartition(".")[2]] = folder
            case _:
                raise ModelLoadError(
                    'must be a list of objects with a "type" and a "path" within the directory',
                    where=str(file),
                )
    unknown = sorted(set(steps) - {"Transformer", "Pooling", "Normalize", "Dropout"})
    if unknown:
        raise ModelLoadError(
            f"uses the step {unknown[0]}, which is not supported",
            where=str(file),
            hint="known: Transformer, Pooling, Normalize",
        )
    return steps


def _mode(fields: Fields) -> str:
    """Both layouts: a flag per mode, or one field pooling_mode."""
    if fields.has("pooling_mode"):
        value = fields.values["pooling_mode"]
        modes = [str(one) for one in value] if isinstance(value, list) else [str(value)]
        modes = ["last" if mode == "lasttoken" else mode for mode in modes]
    else:
        modes = [mode for word, mode in _MODE_FIELDS.items() if fields.flag(word, False)]
    if len(modes) != 1 or modes[0] not in MODES:
        raise fields.fail(
            f"the pooling {' + '.join(modes) or 'none'} is not supported; known: one of {', '.join(MODES)}",
            "choose another with the option `pooling`",
        )
    return modes[0]
