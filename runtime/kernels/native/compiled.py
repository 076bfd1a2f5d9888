"""The compiled source: made when the package was built, or else by this machine's C compiler when it is
first asked for, and then kept in the user's cache folder.

It is plain C behind ctypes: nothing of Python or torch is compiled against. Knows files and compilers, not
what is in the source; imports no torch.
"""

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
FLAGS = ("-O3", "-fPIC", "-shared")  # for all processors of a kind: the source has a copy for each
VERSION = 6  # as in the source
_COMPILE_S = 180.0  # some 20 s of one processor
_UNPACKING_S = 60.0  # between files that are installed together

_Loaded = TypeVar("_Loaded", bound=ctypes.CDLL)


def load(path: Path, how: type[_Loaded]) -> _Loaded:
    """The library at `path`. Raises OSError and AttributeError: it is none, or of another version."""
    loaded = how(str(path))
    if (version := loaded.native_version()) != VERSION:
        raise OSError(f"{path} has version {version}, not {VERSION}")
    return loaded


def paths() -> Iterator[Path]:
    """Where the library may lie, best first. What this machine's compiler makes comes last, and is made only
    when it is asked for."""
    yield from _built()
    if (made := _made_here()) is not None:
        yield made


def _built() -> Iterator[Path]:
    """That of the package, but for one that a checkout has changed since."""
    changed = max((FOLDER / name).stat().st_mtime for name in SOURCES)
    for path in sorted(FOLDER.glob("built*")):
        if path.stat().st_mtime < changed - _UNPACKING_S:
            log.info("%s is not used: its source has changed", path)
        else:
            yield path


def _made_here() -> Path | None:
    """By this machine's compiler, now or before."""
    compiler = shutil.which(os.environ.get("CC", "cc"))
    if compiler is None:
        log.info("there is no C compiler (cc): slower code takes its place")
        return None
    try:
        return _compiled(compiler)
    except (OSError, subprocess.SubprocessError) as error:
        said = getattr(error, "stderr", None) or str(error)
        log.warning("%s cannot be compiled, slower code takes its place: %s", FOLDER / SOURCES[0], said)
        return None


def _compiled(compiler: str) -> Path:
    """Raises OSError and subprocess.SubprocessError."""
    what = [(FOLDER / name).read_bytes() for name in SOURCES]
    what += [word.encode() for word in (compiler, *FLAGS, platform.machine())]
    name = hashlib.sha256(b"\0".join(what)).hexdigest()[:24] + ".so"
    # Where nobody else can put a library: the user's own cache folder, or a new one.
    folder = cache_folder() or Path(tempfile.mkdtemp(prefix="sglang-dsl-native-"))
    kept = folder / name
    if kept.exists():
        return kept
    # Written beside and moved: another process may be doing the same.
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
    """The user's own. None: others can write there too, or this user cannot."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    folder = Path(base) / "sglang-dsl" / "native"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        about = folder.stat()
    except OSError:
        return None
    own = about.st_uid == os.getuid() and not about.st_mode & 0o022
    return folder if own and os.access(folder, os.W_OK) else None
