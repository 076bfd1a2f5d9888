"""How far the way of one generation is scattered: files of the project, and calls of its functions, that a
warm four-token gen runs through with the engine in this process. The bounds are what was measured last; they
only fall. `python -m tests.process.architecture.test_files_of_a_gen` prints the files with their calls."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

from tests.process.patience import PATIENCE_S

ROOT = Path(__file__).resolve().parents[3]
MOST_FILES = 60
MOST_CALLS = 1400
RUNS = 5
"""The least of so many runs counts: a thread that wakes up meanwhile adds to one of them."""


class Watch:
    """A profile function for all threads that are started after it was made."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self._on = False
        self._folders = tuple(str(ROOT / name) + os.sep for name in ("sglang_dsl", "runtime"))
        threading.setprofile(self._event)

    def _event(self, frame: FrameType, event: str, _: Any) -> None:
        if self._on and event == "call" and frame.f_code.co_filename.startswith(self._folders):
            self.calls[os.path.relpath(frame.f_code.co_filename, ROOT)] += 1

    def __enter__(self) -> Watch:
        self.calls.clear()
        self._on = True
        sys.setprofile(self._event)
        return self

    def __exit__(self, *error: object) -> None:
        sys.setprofile(None)
        self._on = False


def counted() -> Counter[str]:
    """Calls by file, of the run that has the fewest."""
    watch = Watch()
    import sglang_dsl as sgl

    @sgl.function
    def ask(s: Any, x: str) -> None:
        s += sgl.user(x)
        s += sgl.assistant(sgl.gen("a", max_tokens=4, temperature=0))

    backend = sgl.EngineBackend("pocket")
    found = []
    for number in range(3 + RUNS):
        with watch:
            assert ask.run(x=f"hello {number}", backend=backend)["a"]
            time.sleep(0.2)  # what is left to do when the answer is there belongs to it
        found.append(watch.calls.copy())
    backend.close()
    return min(found[3:], key=lambda calls: calls.total())


def test_a_warm_gen_runs_through_few_files() -> None:
    done = subprocess.run(
        [sys.executable, "-m", __name__], capture_output=True, text=True, timeout=PATIENCE_S, cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}, check=True,
    )  # fmt: skip
    calls: dict[str, int] = json.loads(done.stdout)
    assert len(calls) <= MOST_FILES, done.stdout
    assert sum(calls.values()) <= MOST_CALLS, done.stdout


if __name__ == "__main__":
    print(json.dumps(dict(counted().most_common()), indent=1))
