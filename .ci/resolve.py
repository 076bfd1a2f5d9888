"""Proves that every extra can be installed from the public index alone, on each Python: with the pins of
constraints.txt, and with the newest releases that pyproject.toml allows. Installs nothing.

    make resolve          # a minute or two; needs the network

Settings of this machine (pip's and uv's files and variables, folders of wheels, further indexes) are left
out, so that what resolves here resolves anywhere. Exit codes: 0 all resolve, 1 some do not, 2 the index
cannot be reached.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
UV = Path(sys.executable).with_name("uv")
PYTHONS = ("3.11", "3.12", "3.13")
FROM_SOURCE = ("sqlitedict", "word2number")
"""Pure Python without wheels, which lm-eval needs; all else has wheels."""
PINS = ROOT / ".ci" / "constraints.txt"
ATTEMPTS, ATTEMPT_S, PAUSE_S = 3, 180.0, 5.0
DEADLINE_S = 900.0
"""Seconds for all of it."""
UNSATISFIABLE = 1
"""uv's exit code where no set of releases fits; whatever else fails may be the network."""
TOLD = ("torch", "triton", "transformers", "numpy", "tokenizers", "llguidance", "xgrammar")


class Unreachable(Exception):
    """The index did not answer."""


def resolve(python: str, pinned: bool, cache: Path, deadline: float) -> tuple[bool, str]:
    """Whether it resolves, and the releases chosen or the reason. Raises Unreachable."""
    command = [
        str(UV), "--no-config", "--quiet", "pip", "compile", "--cache-dir", str(cache), "--all-extras",
        "--python-version", python, "--only-binary", ":all:", "--no-header", "--no-annotate",
        *(option for name in FROM_SOURCE for option in ("--no-binary", name)), "pyproject.toml",
    ]  # fmt: skip
    if pinned:
        command += ["--constraint", str(PINS)]
    own = {name: value for name, value in os.environ.items() if not name.startswith(("UV_", "PIP_"))}
    said = ""
    for attempt in range(ATTEMPTS):
        if attempt:
            time.sleep(PAUSE_S)
        left = min(ATTEMPT_S, deadline - time.monotonic())
        if left <= 0:
            raise Unreachable(f"not done after {DEADLINE_S:.0f} s; {said}")
        try:
            done = subprocess.run(
                command, cwd=ROOT, env={**own, "PIP_CONFIG_FILE": os.devnull}, capture_output=True, text=True,
                timeout=left, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            said = f"no answer in {left:.0f} s"
            continue
        if done.returncode == 0:
            return True, done.stdout
        said = done.stderr.strip()
        if done.returncode == UNSATISFIABLE:
            return False, said
    raise Unreachable(said)


def main() -> int:
    deadline, failed = time.monotonic() + DEADLINE_S, False
    with tempfile.TemporaryDirectory(prefix="resolve-") as cache:
        for python in PYTHONS:
            for pinned in (True, False):
                name = f"Python {python}, {'pinned' if pinned else 'newest'}"
                try:
                    fits, said = resolve(python, pinned, Path(cache), deadline)
                except Unreachable as error:
                    print(f"{name}: cannot be told, the package index does not answer: {error}")
                    return 2
                failed |= not fits
                chosen = [line for line in said.splitlines() if line.partition("==")[0] in TOLD]
                told = ", ".join(chosen) if fits else f"DOES NOT RESOLVE\n{said}"
                print(f"{name}: {told}", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
