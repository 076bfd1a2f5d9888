"""Ways of computing on the CPU, and versions of this project, on the same workloads in turn:
`python -m benchmarks.versions [--before <checkout>] [--model pocket] [--write]`.

Each way is an Engine in a process of its own, with one thread; prints the CPU seconds of all its processes,
the least of the rounds, each of which starts with an empty prefix cache. `--before`: a checkout of an earlier
commit, which is measured as well; the outputs of both are compared.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
if "--worker" not in sys.argv:  # the other checkout's, there
    sys.path.insert(0, str(HERE.parent))

WAYS: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"dtype": "float32", "quantization": "w8a8_int8"},
}
GREEDY: dict[str, Any] = {"temperature": 0.0}
NUCLEUS: dict[str, Any] = {"temperature": 1.0, "top_p": 0.9, "seed": 1}


def works(vocab: int) -> dict[str, tuple[list[list[int]], int, dict[str, Any]]]:
    """Name -> prompts, new tokens of each, how they are sampled."""
    draw = random.Random(0)

    def ids(count: int) -> list[int]:
        return [draw.randrange(vocab // 100, vocab) for _ in range(count)]

    prefix = ids(1000)
    return {
        "single": ([ids(32)], 64, GREEDY),
        "batch 8": ([ids(32) for _ in range(8)], 64, GREEDY),
        "batch 8, top-p": ([ids(32) for _ in range(8)], 64, NUCLEUS),
        "batch 32": ([ids(32) for _ in range(32)], 32, GREEDY),
        "batch 64": ([ids(32) for _ in range(64)], 32, GREEDY),
        "32 x 500": ([ids(500) for _ in range(32)], 16, GREEDY),
        "prefill 1,024": ([ids(1024)], 1, GREEDY),
        "64 sharing 1,000": ([[*prefix, *ids(8)] for _ in range(64)], 16, GREEDY),
    }


class Way:
    """An Engine in a child process: asked for a workload by name, it answers what that took and gave."""

    def __init__(self, checkout: Path, model: str, vocab: int, options: dict[str, Any]) -> None:
        environment = {**os.environ, "PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-P", str(HERE / "versions.py"), "--worker", model, str(vocab)]
        self._child = subprocess.Popen(
            [*command, json.dumps(options)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment, cwd=checkout,
        )  # fmt: skip

    def run(self, name: str) -> tuple[float, str]:
        """CPU seconds, and a digest of the output."""
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        print(name, file=self._child.stdin, flush=True)
        for line in self._child.stdout:
            if line.startswith("{"):
                told = json.loads(line)
                return told["cpu"], told["output"]
        raise RuntimeError(f"the engine's process ended during {name!r}")

    def close(self) -> None:
        assert self._child.stdin is not None
        self._child.stdin.close()
        self._child.wait(60)


def worker(model: str, vocab: int, options: dict[str, Any]) -> None:
    import hashlib
    import importlib.util

    from runtime.api import Engine
    from runtime.protocol.sampling import SamplingParams

    spec = importlib.util.spec_from_file_location("measuring", HERE / "measuring.py")
    assert spec is not None
    assert spec.loader is not None
    measuring = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(measuring)
    todo = works(vocab)
    engine = Engine(model, max_total_tokens=24_576, threads=1, **options)
    engine.generate([todo["single"][0][0]], SamplingParams(max_new_tokens=4, **GREEDY))
    for name in map(str.strip, sys.stdin):
        prompts, new, words = todo[name]
        engine.flush_cache()
        before = measuring.cpu_of_tree()
        outs = engine.generate(prompts, SamplingParams(max_new_tokens=new, ignore_eos=True, **words))
        cpu = measuring.cpu_of_tree() - before
        ids = json.dumps([list(out.output_ids) for out in outs])
        output = hashlib.sha256(ids.encode()).hexdigest()[:12]
        print(json.dumps({"cpu": cpu, "output": output}), flush=True)
    engine.close()


def measure(ways: dict[str, Way], names: Sequence[str], rounds: int) -> list[list[str]]:
    """A row per workload: the least CPU seconds of each way; marked where the output is not that of the same
    way before."""
    from tqdm import tqdm

    rows = []
    for name in tqdm(names):
        took: dict[str, list[float]] = {way: [] for way in ways}
        gave: dict[str, str] = {}
        for number in range(rounds):
            for way in reversed(ways) if number % 2 else ways:
                cpu, gave[way] = ways[way].run(name)
                took[way].append(cpu)
        cells = []
        for way, values in took.items():
            earlier = gave.get(f"{way}, before")
            cells.append(f"{min(values):.3f}" + ("" if earlier in (None, gave[way]) else " *"))
        rows.append([name, *cells])
    return rows


def _commit(checkout: Path) -> str:
    git = ["git", "-C", str(checkout), "describe", "--always"]
    return subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip() or "unknown"


def main() -> int:
    if "--worker" in sys.argv:
        model, vocab, options = sys.argv[2:]
        worker(model, int(vocab), json.loads(options))
        return 0
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--before", type=Path, help="a checkout of an earlier commit")
    parser.add_argument("--model", default="", help="a checkpoint; else the random Llama of 40 M parameters")
    parser.add_argument("--only", nargs="*", default=(), help="names of workloads")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--write", action="store_true", help="write benchmarks/results/<date>-versions.md")
    parser.add_argument("--append", action="store_true", help="write behind what the day's file has")
    given = parser.parse_args()
    from benchmarks.measuring import conditions, keep
    from benchmarks.workloads import VOCAB, make_model

    model = given.model or str(make_model(HERE / ".cache" / "llama-40m"))
    vocab = 1280 if given.model == "pocket" else VOCAB
    ways: dict[str, Way] = {}
    try:
        for name, options in WAYS.items():
            if given.before and "quantization" not in options:
                ways[f"{name}, before"] = Way(given.before.resolve(), model, vocab, options)
            ways[name] = Way(HERE.parent, model, vocab, options)
        rows = measure(ways, given.only or list(works(vocab)), given.rounds)
    finally:
        for way in ways.values():
            way.close()
    head = ["CPU seconds", *ways]
    lines = ["| " + " | ".join(cells) + " |" for cells in (head, ["---"] * len(head), *rows)]
    named = given.model or "random Llama of 40 M parameters"
    where = conditions(f"{named}, one thread, least of {given.rounds} rounds, ways in turn")
    earlier = f" Before: commit {_commit(given.before)}." if given.before else ""
    text = f"{where}.{earlier} *: not the output of before.\n\n" + "\n".join(lines)
    print(text)
    if given.write:
        keep("versions", f"# Ways of computing on the CPU\n\n{text}", append=given.append)
    return 0


if __name__ == "__main__":
    sys.exit(main())
