"""A checkpoint's directory made of a GGUF file: config.json, the tokenizer's files, and links to the weights.

It lies in the user's cache, named after the file, its size and its time: made once, whatever number of
processes asks for it, and anew when the file is another.
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
from runtime.config.gguf.vocabulary import tokenizer
from runtime.protocol.errors import ModelLoadError

SUFFIX = ".gguf"
WEIGHTS = "model*.gguf"
"""What the links to the weights are called."""
VERSION = 1  # of what is made; a directory of another one is not used
_PART = re.compile(r"(?P<name>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
_BESIDE = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")
_FREQUENCIES = "rope_freqs.weight"


def directory_of(file: Path) -> Path:
    """The directory of the model in `file`; of one in several files, the first. Files of a tokenizer that lie
    beside it are taken for its own. Raises ModelLoadError."""
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
        made = Path(tempfile.mkdtemp(dir=cache, prefix=".making-"))
    except OSError as error:
        raise ModelLoadError(
            f"metadata files for {file.name} cannot be written: {error.strerror}",
            where=str(cache),
            hint="set XDG_CACHE_HOME to a writable folder",
        ) from error
    try:
        _fill(made, file, beside)
        made.rename(target)
    except OSError:
        if not target.is_dir():  # another process was faster
            raise
    finally:
        shutil.rmtree(made, ignore_errors=True)
    return target


def _fill(made: Path, file: Path, beside: list[Path]) -> None:
    parts = _parts(file)
    headers = [read_header(part) for part in parts]
    frequencies = next((found for header in headers if (found := _frequencies(header))), ())
    # All is said in the first of several files; the tensors are in all of them.
    tensors = {name: place for header in headers for name, place in header.tensors.items()}
    header = Header(headers[0].path, headers[0].values, tensors)
    config = settings(header, frequencies)
    own = {one.name for one in beside}
    texts = {"config.json": config}
    if "tokenizer.json" not in own:
        texts["tokenizer.json"], texts["tokenizer_config.json"] = tokenizer(header)
    for name, values in texts.items():
        text = json.dumps(values, ensure_ascii=True)
        (made / name).write_text(text, encoding="ascii")
    for one in beside:
        if one.name not in texts:
            (made / one.name).symlink_to(one)
    for number, part in enumerate(parts):
        (made / f"model-{number:05}.gguf").symlink_to(part)


def _parts(file: Path) -> list[Path]:
    match = _PART.fullmatch(file.name)
    if match is None:
        return [file]
    count = int(match["count"])
    found = [
        file.parent / f"{match['name']}-{number:05}-of-{count:05}.gguf" for number in range(1, count + 1)
    ]
    for part in found:
        if not part.is_file():
            raise ModelLoadError(f"the file is missing; the model is in {count}", where=str(part))
    return found


def _frequencies(header: Header) -> tuple[float, ...]:
    place = header.tensors.get(_FREQUENCIES)
    if place is None:
        return ()
    if place.kind.name != "F32":
        raise ModelLoadError(f"{_FREQUENCIES!r} is not in F32", where=str(header.path))
    with header.path.open("rb") as file:
        file.seek(place.offset)
        return struct.unpack(f"<{place.nbytes // 4}f", file.read(place.nbytes))
