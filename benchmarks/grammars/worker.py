"""One engine in a process of its own, for backends.py: reads cases as lines of JSON, times them, writes
results as lines of JSON.

The vocabulary is prepared once; then a child is forked for each request, so that nothing is known from the
cases before, and a case that takes too much CPU time or memory ends with its child. Times are CPU time of the
process unless said otherwise. Linux only.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import select
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.grammars.engines import WARM, Engine, Refused, make_engine
from benchmarks.vocabularies import make_vocabulary

TICK = os.sysconf("SC_CLK_TCK")


def memory(kind: str) -> int:
    """VmRSS or VmHWM of this process in KiB."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(kind):
            return int(line.split()[1])
    return 0


def timed(engine: Engine, case: dict[str, Any]) -> dict[str, Any]:
    """Compile a case and follow its token sequences; times in microseconds."""
    held = memory("VmRSS")
    wall, begin = time.perf_counter_ns(), time.process_time_ns()
    try:
        compiled = engine.compile(case["kind"], case["spec"])
    except Refused as error:
        spent = (time.process_time_ns() - begin) / 1e3
        return {"refused": " ".join(str(error).split())[:300], "compile": spent}
    found: dict[str, Any] = {
        "compile": (time.process_time_ns() - begin) / 1e3,
        "wall": (time.perf_counter_ns() - wall) / 1e3,
    }
    masks: list[float] = []
    steps: list[float] = []
    for tokens in case["tokens"]:
        session = engine.begin(compiled)
        for number, token in enumerate(tokens):
            start = time.process_time_ns()
            session.mask()
            middle = time.process_time_ns()
            taken = session.allows(token)
            after = time.process_time_ns()
            taken = taken and session.advance(token)
            end = time.process_time_ns()
            masks.append((middle - start) / 1e3)
            steps.append((end - after) / 1e3)
            if not taken:
                found["stuck"] = number
                break
    found["first"] = found["compile"] + (masks[0] if masks else 0.0)
    found["masks"], found["steps"] = masks, steps
    found["memory"] = max(memory("VmHWM") - held, 0)
    return found


def warm(engine: Engine) -> None:
    """Touch what a child shares with its parent, or the system would copy it within a measurement."""
    for kind, spec in WARM:
        try:
            session = engine.begin(engine.compile(kind, spec))
        except Refused:
            continue
        session.mask()


def child(engine: Engine, cases: list[dict[str, Any]], out: int) -> None:
    warm(engine)
    for case in cases:
        os.write(out, json.dumps(timed(engine, case)).encode() + b"\n")
    os.write(out, b"end\n")


def lines(fd: int, pid: int, seconds: float, mebibytes: int) -> Iterator[str]:
    """What the child writes; ends with "over ..." where it took too much for one line, and is killed."""
    rest, spent = b"", cpu(pid)
    while True:
        if select.select([fd], [], [], 0.1)[0]:
            data = os.read(fd, 1 << 20)
            if not data:
                yield "died"
                return
            *whole, rest = (rest + data).split(b"\n")
            for line in whole:
                spent = cpu(pid)
                yield line.decode()
            continue
        if cpu(pid) - spent > seconds:
            yield f"over {seconds:g} s of CPU"
            return
        if rss(pid) > mebibytes:
            yield f"over {mebibytes} MiB"
            return


def cpu(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICK


def rss(pid: int) -> float:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE") / (1 << 20)


def answer(
    engine: Engine, cases: list[dict[str, Any]], seconds: float, mebibytes: int
) -> Iterator[dict[str, Any]]:
    """A result per case. A case over the limit is told as such; the next begins in a fresh child."""
    done = 0
    while done < len(cases):
        read, write = os.pipe()
        pid = os.fork()
        if not pid:
            try:
                os.close(read)
                child(engine, cases[done:], write)
            finally:
                os._exit(0)
        os.close(write)
        try:
            for line in lines(read, pid, seconds, mebibytes):
                if line == "end":
                    break
                done += 1
                if not line.startswith("{"):
                    yield {"limit": line}
                    break
                yield json.loads(line)
        finally:
            os.close(read)
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("engine")
    parser.add_argument("--size", type=int, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    given = parser.parse_args()
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what a library prints must not mix with the replies
    path, vocabulary = make_vocabulary(given.size, given.folder)
    held, begin = memory("VmRSS"), time.process_time()
    try:
        engine = make_engine(given.engine, vocabulary, path)
    except ImportError as error:
        print(json.dumps({"missing": str(error)}), file=replies)
        return
    prepared = time.process_time() - begin
    print(json.dumps({"seconds": prepared, "memory": memory("VmRSS") - held}), file=replies)
    gc.collect()
    gc.freeze()
    for line in sys.stdin:
        asked = json.loads(line)
        for result in answer(engine, asked["cases"], asked["seconds"], asked["mebibytes"]):
            print(json.dumps(result), file=replies)


if __name__ == "__main__":
    main()
