"""A checkpoint directory created from a GGUF file: config.json, the tokenizer's files, and links to the
weights.

It is in the user's cache, named after the file, its size and its time. It is created once, however many
processes ask for it, and again if the file changes.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import struct
import tempfile
from pathlib import Path

from runtime.config.gguf.header import Header, read_header
from runtime.config.gguf.settings import settings
from runtime.protocol.errors import ModelLoadError

SUFFIX = ".gguf"
WEIGHTS = "model*.gguf"
"""The names of the links to the weights."""
VERSION = 1  # of the directory's contents; directories of other versions are not used
_PART = re.compile(r"(?P<name>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
_BESIDE = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")
_FREQUENCIES = "rope_freqs.weight"


def directory_of(file: Path) -> Path:
    """The directory of the model in `file`; if it has several files, `file` is the first. Tokenizer files in
    the same folder are used instead of the file's own. Raises ModelLoadError."""
    file = file.resolve()
    beside = [file.parent / name for name in _BESIDE if (file.parent / name).is_file()]
    marks = [f"{VERSION}"]
    for one in (file, *beside):
        state = one.stat()
        marks.append(f"{one} {state.st_size} {state.st_mtime_ns}")
    digest = hashlib.sha256("\n".join(marks).encode("utf-8", "surrogateescape")).hexdigest()[:16]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "sglang-dsl" / "gguf"
    target = cache / f"{file.stem}-{digest}"
    if target.is_dir():
        return target
    try:
        cache.mkdir(parents=True, exist_ok=True)
        draft = Path(tempfile.mkdtemp(dir=cache, prefix=".making-"))
    except OSError as error:
        raise ModelLoadError(
            f"metadata files for {file.name} cannot be written: {error.strerror}",
            where=str(cache),
            hint="set XDG_CACHE_HOME to a writable folder",
        ) from error
    try:
        _fill(draft, file, beside)
        draft.rename(target)
    except OSError:
        if not target.is_dir():  # another process was faster
            raise
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return target


def _fill(target: Path, file: Path, beside: list[Path]) -> None:
    parts = _parts(file)
    headers = [read_header(part) for part in parts]
    frequencies = next((factors for header in headers if (factors := _frequencies(header))), ())
    # The first of several files has all metadata; the tensors are in all of them.
    tensors = {name: info for header in headers for name, info in header.tensors.items()}
    header = Header(headers[0].path, headers[0].values, tensors)
    config = settings(header, frequencies)
    names = {one.name for one in beside}
    texts = {"config.json": config}
    if "tokenizer.json" not in names:
        # Only needed here: the library takes long to import.
        from runtime.config.gguf.vocabulary import tokenizer

        texts["tokenizer.json"], texts["tokenizer_config.json"] = tokenizer(header)
    for name, values in texts.items():
        text = json.dumps(values, ensure_ascii=True)
        (target / name).write_text(text, encoding="ascii")
    for one in beside:
        if one.name not in texts:
            (target / one.name).symlink_to(one)
    for number, part in enumerate(parts):
        (target / f"model-{number:05}.gguf").symlink_to(part)


def _parts(file: Path) -> list[Path]:
    match = _PART.fullmatch(file.name)
    if match is None:
        return [file]
    count = int(match["count"])
    parts = [
        file.parent / f"{match['name']}-{number:05}-of-{count:05}.gguf" for number in range(1, count + 1)
    ]
    for part in parts:
        if not part.is_file():
            raise ModelLoadError(f"the file is missing; the model is in {count}", where=str(part))
    return parts


def _frequencies(header: Header) -> tuple[float, ...]:
    info = header.tensors.get(_FREQUENCIES)
    if info is None:
        return ()
    if info.kind.name != "F32":
        raise ModelLoadError(f"{_FREQUENCIES!r} is not in F32", where=str(header.path))
    with header.path.open("rb") as file:
        file.seek(info.offset)
        return struct.unpack(f"<{info.nbytes // 4}f", file.read(info.nbytes))
