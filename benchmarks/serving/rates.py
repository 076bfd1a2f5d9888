"""The whole server under sglang's own benchmark of servers, at several rates, with and without a shared
prefix: `python -m benchmarks.serving.rates --client PYTHON [--model pocket] [--write]`.

PYTHON: an interpreter with sglang without its engine; tests/clients make one (.venv/clients-sglang-*). The
server is `python -m runtime serve` in processes of its own, and the client runs on the same machine: what one
takes, the other lacks. Prompts are random words; with a shared prefix all of them begin with the same
PREFIX_TOKENS, else each has a beginning of its own, of the same length. The cache is empty before each run.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from benchmarks.measuring import HERE, conditions, keep

PREFIX_TOKENS, OWN_TOKENS, OUTPUT_TOKENS = 192, 64, 32
REQUESTS = {"5": 50, "15": 90, "40": 160, "inf": 500}
"""Per second -> how many in all."""
START_S, RUN_S = 120.0, 300.0
ROOT = HERE.parent
CHECKPOINT = ROOT / "runtime" / "pocket" / "checkpoint"
COLUMNS = {
    "requests/s": "request_throughput",
    "tokens/s": "output_throughput",
    "first token, median": "median_ttft_ms",
    "p99": "p99_ttft_ms",
    "between tokens, median": "median_itl_ms",
    "p99 ": "p99_itl_ms",
}


@contextmanager
def serving(model: str, folder: Path) -> Iterator[str]:
    """The URL of a server that has loaded the model."""
    ready = folder / "ready.json"
    command = [sys.executable, "-m", "runtime", "serve", "--model", model, "--port", "0"]
    command += ["--ready-file", str(ready), "--log-level", "warning"]
    server = subprocess.Popen(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)})
    try:
        deadline = time.monotonic() + START_S
        while not ready.is_file():
            if server.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError("the server did not start")
            time.sleep(0.1)
        yield str(json.loads(ready.read_text(encoding="utf-8"))["url"])
    finally:
        server.terminate()
        server.wait(START_S)


def asked(client: str, url: str, folder: Path, rate: str, shared: bool, tokenizer: str) -> Mapping[str, Any]:
    """What the benchmark says of one run."""
    count = REQUESTS[rate]
    groups = (1, count) if shared else (count, 1)
    told = folder / f"{rate}-{shared}.jsonl"
    httpx.post(f"{url}/flush_cache", json={}, timeout=START_S).raise_for_status()
    command = [
        client, "-W", "ignore", "-m", "sglang.bench_serving", "--backend", "sglang", "--base-url", url,
        "--dataset-name", "generated-shared-prefix", "--num-prompts", str(count), "--request-rate", rate,
        "--gsp-num-groups", str(groups[0]), "--gsp-prompts-per-group", str(groups[1]),
        "--gsp-system-prompt-len", str(PREFIX_TOKENS), "--gsp-question-len", str(OWN_TOKENS),
        "--gsp-output-len", str(OUTPUT_TOKENS), "--seed", str(list(REQUESTS).index(rate)), "--disable-tqdm",
        "--tokenizer", tokenizer, "--model", tokenizer, "--output-file", str(told),
    ]  # fmt: skip
    # It keeps its prompts below the home folder.
    environment = {**os.environ, "HOME": str(folder), "HF_HUB_OFFLINE": "1", "OPENAI_API_KEY": "none"}
    environment.pop("PYTHONPATH", None)
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=RUN_S, check=False
    )
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    made: Mapping[str, Any] = json.loads(told.read_text(encoding="utf-8"))
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--client", required=True, help="an interpreter with sglang's bench_serving")
    parser.add_argument("--model", default="pocket")
    parser.add_argument("--tokenizer", default=str(CHECKPOINT), help="of this model")
    parser.add_argument("--rates", nargs="*", default=list(REQUESTS), choices=list(REQUESTS))
    parser.add_argument("--write", action="store_true", help="keep the table under results/")
    given = parser.parse_args()
    client = str(Path(given.client).absolute())  # not resolved: a link tells which environment it is
    rows = [
        "| asked per second | prefix | answered | " + " | ".join(COLUMNS) + " |",
        "|---" * (3 + len(COLUMNS)) + "|",
    ]
    with tempfile.TemporaryDirectory(prefix="serving-") as name:
        folder = Path(name)
        with serving(given.model, folder) as url:
            for rate in given.rates:
                for shared in (False, True):
                    told = asked(client, url, folder, rate, shared, given.tokenizer)
                    figures = " | ".join(f"{told[key]:.1f}" for key in COLUMNS.values())
                    answered = f"{told['completed']} of {REQUESTS[rate]}"
                    rows.append(f"| {rate} | {'shared' if shared else 'own'} | {answered} | {figures} |")
                    print(rows[-1], f"load {os.getloadavg()[0]:.1f}", flush=True)
    setting = (
        f"{given.model}; prompts of {PREFIX_TOKENS} + {OWN_TOKENS} tokens, answers of {OUTPUT_TOKENS}; "
        "client and server on this machine; times in milliseconds"
    )
    report = "\n".join(
        ["# The server under sglang's bench_serving", "", conditions(), "", setting, "", *rows]
    )
    print(report)
    if given.write:
        keep("serving", report)


if __name__ == "__main__":
    main()
