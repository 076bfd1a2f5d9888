"""The compiled source: made by this machine's C compiler when it is first asked for, and kept in the user's
cache folder. Without a compiler, or where what it made gives other numbers, there is none: whoever asks
computes with torch then.

It knows pointers and shapes; not pools, plans or layers.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import math
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

log = logging.getLogger(__name__)

SOURCE = Path(__file__).with_name("attend.c")
FLAGS = ("-O3", "-march=native", "-fno-math-errno", "-fPIC", "-shared")
DIM_STEP, MOST_DIM = 16, 256  # as in the source
_COMPILE_S = 60.0
_POINTER, _INT = ctypes.c_void_p, ctypes.c_int64


class Library:
    """attend: see the source. put: the same."""

    def __init__(self, path: Path) -> None:
        """Raises OSError and AttributeError: it is no such library."""
        loaded = ctypes.CDLL(str(path))
        self.attend: Any = loaded.attend
        self.attend.argtypes = [
            *(_POINTER, _INT, _INT, _INT, _INT, _INT, _POINTER, _INT),
            *(_POINTER, _INT, _POINTER, ctypes.c_float, _POINTER, _POINTER),
        ]
        self.put: Any = loaded.put
        self.put.argtypes = [_POINTER, _INT, _INT, _INT, _INT, _POINTER, _INT, _POINTER, _INT]
        self.attend.restype = self.put.restype = None


@functools.cache
def library() -> Library | None:
    """The same for the whole process."""
    compiler = shutil.which(os.environ.get("CC", "cc"))
    if compiler is None:
        log.info("there is no C compiler (cc): attention is computed with torch's products")
        return None
    try:
        made = Library(_compiled(compiler))
    except (OSError, AttributeError, subprocess.SubprocessError) as error:
        said = getattr(error, "stderr", None) or str(error)
        log.warning("%s cannot be compiled or loaded, torch's products take its place: %s", SOURCE, said)
        return None
    if not _right(made):
        log.warning("%s gives wrong numbers on this machine, torch's products take its place", SOURCE)
        return None
    return made


def _compiled(compiler: str) -> Path:
    """Raises OSError and subprocess.SubprocessError."""
    what = [SOURCE.read_bytes(), *(word.encode() for word in (compiler, *FLAGS, *_processor()))]
    name = hashlib.sha256(b"\0".join(what)).hexdigest()[:24] + ".so"
    folder = _folder()
    kept = folder / name
    if kept.exists():
        return kept
    # Written beside and moved: another process may be doing the same.
    file, draft = tempfile.mkstemp(suffix=".so", dir=folder)
    os.close(file)
    try:
        command = [compiler, *FLAGS, str(SOURCE), "-o", draft, "-lm"]
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=_COMPILE_S)
        os.replace(draft, kept)
    finally:
        Path(draft).unlink(missing_ok=True)
    return kept


def _folder() -> Path:
    """Where nobody else can put a library: the user's own cache folder, or a new one."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    folder = Path(base) / "sglang-dsl" / "native"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        about = folder.stat()
        if about.st_uid == os.getuid() and not about.st_mode & 0o022 and os.access(folder, os.W_OK):
            return folder
    except OSError:
        pass
    return Path(tempfile.mkdtemp(prefix="sglang-dsl-native-"))


def _processor() -> tuple[str, ...]:
    """What the compiler makes depends on: a cache folder may be shared by machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    kinds = ("model name", "flags", "Features", "CPU part")
    return (platform.machine(), *(sorted({line for line in lines if line.startswith(kinds)})))


def _right(made: Library) -> bool:
    """Against the definition, on numbers of every place."""
    kv_heads, group, dim, slots = 2, 3, 32, 50
    data, queries = torch.randn(2 * kv_heads, slots, dim), torch.randn(1, kv_heads * group, dim)
    jobs, runs = torch.tensor([[0, 0, 2]], dtype=torch.int32), torch.tensor([[7, 35], [0, 3]]).int()
    out, lse = torch.empty(1, kv_heads * group, dim), torch.empty(1, kv_heads * group)
    scale = 1 / math.sqrt(dim)
    made.attend(
        *(data.data_ptr(), slots, kv_heads, dim, 0, group, queries.data_ptr(), queries.stride(0)),
        *(jobs.data_ptr(), 1, runs.data_ptr(), scale, out.data_ptr(), lse.data_ptr()),
    )
    seen = data[:, [*range(7, 42), 0, 1, 2]]
    scores = queries[0].view(kv_heads, group, dim) @ seen[:kv_heads].transpose(1, 2) * scale
    right = (scores.softmax(-1) @ seen[kv_heads:]).view(-1, dim)
    return _near(out[0], right) and _near(lse[0], scores.logsumexp(-1).flatten())


def _near(one: Tensor, other: Tensor) -> bool:
    return torch.allclose(one, other, atol=1e-5)
