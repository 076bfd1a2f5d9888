"""An adapter as a child process, seen from the one that measures."""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.measuring import Reading

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
START_S = 900.0
"""Loading exports the model first, where the engine has a format of its own."""
CALL_S = 900.0
PEERS = ("sglang-dsl", "transformers", "openvino", "onnxruntime", "llamacpp", "ctranslate2", "vllm")
"""Names of adapters: `<name>_peer.py` here, `<name>/bin/python` below the folder of environments."""


class Missing(Exception):
    """There is no such engine here, or it does not do this: one line that says why."""


class Child:
    """One engine in its process. `what`, in reports: "openvino bfloat16"."""

    def __init__(
        self, name: str, model: Path, precision: str, threads: int, environments: Path | None
    ) -> None:
        self.name, self.precision = name, precision
        file = HERE / f"{name.replace('-', '_')}_peer.py"
        python = _python(name, environments)
        log = model.parent / "logs" / f"{name}-{precision}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        here = {"PYTHONPATH": str(ROOT)} if python == sys.executable else {}
        kept = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
        with log.open("w", encoding="utf-8") as errors:
            self._process = subprocess.Popen(
                [python, str(file), str(model), precision, str(threads)],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, cwd=model.parent,
                env={**kept, **here, "OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"},
            )  # fmt: skip
        try:
            told = self._read(START_S)
        except BaseException:
            self.close()
            raise
        self.version, self.shares = str(told["version"]), bool(told["shares"])

    def ask(self, **words: Any) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(words).encode() + b"\n")
        self._process.stdin.flush()
        return self._read(CALL_S)

    def run(self, prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
        found: list[list[int]] = self.ask(do="run", prompts=prompts, new_tokens=new_tokens)["ids"]
        return found

    def reading(self) -> Reading:
        """The wall's clock, and the CPU seconds of this child and all below it."""
        return Reading.of(self._process.pid)

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()

    def _read(self, deadline: float) -> dict[str, Any]:
        assert self._process.stdout is not None
        with selectors.DefaultSelector() as ready:
            ready.register(self._process.stdout, selectors.EVENT_READ)
            if not ready.select(deadline):
                raise Missing(f"no answer within {deadline:.0f} s")
        line = self._process.stdout.readline()
        if not line:
            raise Missing("its process ended; see the log beside the model")
        told: dict[str, Any] = json.loads(line)
        if "missing" in told:
            raise Missing(told["missing"])
        return told


def _python(name: str, environments: Path | None) -> str:
    if name == "sglang-dsl":
        return sys.executable
    own = environments / name / "bin" / "python" if environments else None
    if own is not None and own.exists():
        return str(own)
    if name == "transformers":
        return sys.executable
    raise Missing("not installed" if environments is None else f"no {own}")
