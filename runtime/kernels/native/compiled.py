"""The compiled library: built with the package, or else by this machine's C compiler on first use and kept
in the user's cache folder. Plain C behind ctypes. Imports no torch."""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

log = logging.getLogger(__name__)

FOLDER = Path(__file__).parent
SOURCES = (
    "native.c", "kind.h", "vectors.h", "tasks.h", "panels.h", "layers.h", "gumbel.h", "tiles.h",
    "token_mask.h", "decoder.h",
)  # fmt: skip
"""The first one includes the others."""
FLAGS = ("-O3", "-fPIC", "-shared")  # for any processor of the architecture: the source has variants for each
VERSION = 6  # as in the source
_COMPILE_S = 180.0  # it takes about 20 s on one core
_UNPACKING_S = 60.0  # at most, between files that are installed together

_Loaded = TypeVar("_Loaded", bound=ctypes.CDLL)


def load(path: Path, how: type[_Loaded]) -> _Loaded:
    """The library at `path`. Raises OSError and AttributeError if it is not one, or has another version."""
    loaded = how(str(path))
    if (version := loaded.native_version()) != VERSION:
        raise OSError(f"{path} has version {version}, not {VERSION}")
    return loaded


def paths() -> Iterator[Path]:
    """Paths of the library, best first. The one that this machine's compiler builds comes last, and is built
    only when it is asked for."""
    yield from _built()
    if (path := _compiled_here()) is not None:
        yield path


def _built() -> Iterator[Path]:
    """The package's library, unless a checkout's source has changed since."""
    changed = max((FOLDER / name).stat().st_mtime for name in SOURCES)
    for path in sorted(FOLDER.glob("built*")):
        if path.stat().st_mtime < changed - _UNPACKING_S:
            log.info("%s is not used: its source has changed", path)
        else:
            yield path


def _compiled_here() -> Path | None:
    """The library built by this machine's compiler, now or earlier."""
    compiler = shutil.which(os.environ.get("CC", "cc"))
    if compiler is None:
        log.info("there is no C compiler (cc): slower code takes its place")
        return None
    try:
        return _compiled(compiler)
    except (OSError, subprocess.SubprocessError) as error:
        message = getattr(error, "stderr", None) or str(error)
        log.warning("%s cannot be compiled, slower code takes its place: %s", FOLDER / SOURCES[0], message)
        return None


def _compiled(compiler: str) -> Path:
    """Raises OSError and subprocess.SubprocessError."""
    what = [(FOLDER / name).read_bytes() for name in SOURCES]
    what += [word.encode() for word in (compiler, *FLAGS, platform.machine())]
    name = hashlib.sha256(b"\0".join(what)).hexdigest()[:24] + ".so"
    # A folder that only this user can write to: the user's cache folder, or a new one.
    folder = cache_folder() or Path(tempfile.mkdtemp(prefix="sglang-dsl-native-"))
    kept = folder / name
    if kept.exists():
        return kept
    # Written to a temporary file and moved: another process may be doing the same.
    file, draft = tempfile.mkstemp(suffix=".so", dir=folder)
    os.close(file)
    try:
        command = [compiler, *FLAGS, str(FOLDER / SOURCES[0]), "-o", draft, "-lm"]
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=_COMPILE_S)
        os.replace(draft, kept)
    finally:
        Path(draft).unlink(missing_ok=True)
    return kept


def cache_folder() -> Path | None:
    """The user's cache folder. None if others can write to it, or this user cannot."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    folder = Path(base) / "sglang-dsl" / "native"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        about = folder.stat()
    except OSError:
        return None
    private = about.st_uid == os.getuid() and not about.st_mode & 0o022
    return folder if private and os.access(folder, os.W_OK) else None
