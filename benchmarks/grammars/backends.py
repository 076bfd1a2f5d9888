"""Grammar backends side by side, ours and the libraries used directly:
`python -m benchmarks.grammars.backends`.

Compiling, the first mask, masks along a text, memory; over byte-level vocabularies of 32,768 and 131,072
tokens trained on text of this machine. Each engine has a process of its own (worker.py) and one
thread, and they take turns: every case is given to each engine in every round. With SGLANG_DSL_DATA, the
schema sample in that folder is followed, too. Prints tables and, with --write, keeps them, dated, under
results/.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import selectors
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer
from tqdm import tqdm

from benchmarks.grammars.cases import Case, cases, sample
from benchmarks.grammars.engines import LIBRARIES, OURS
from benchmarks.measuring import HERE, RESULTS, conditions, keep
from benchmarks.vocabularies import LARGEST, about, default_folder, make_vocabulary

ENGINES = (*OURS, *LIBRARIES)
SLOW = ("outlines-core", "xgrammar library", "xgrammar")
"""Engines that are given only every --stride th schema of the sample."""

LONG = 2e6
"""Microseconds of compiling after which a case is not given to the engine again."""

HOW = (
    "Times are CPU time of one process with one thread, but for `wall`. Of each mask and step the least of "
    "the rounds counts, of compile times and memory the median; what takes 2 s to compile has one round. "
    "Every named case begins in a fresh process with the vocabulary prepared; the schemas of the sample "
    "follow one another in one process. MiB: growth of the resident set at its peak, over what the prepared "
    "vocabulary takes."
)
Result = dict[str, Any]


class Worker:
    """An engine in its own process. `prepared`: what it said of its preparation, or why it is missing."""

    def __init__(self, engine: str, size: int, folder: Path) -> None:
        self.engine = engine
        one = {"OMP_NUM_THREADS": "1", "RAYON_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.grammars.worker", engine, "--size", str(size),
             "--folder", folder],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={**os.environ, **one}, cwd=HERE.parent,
        )  # fmt: skip
        self._wait = selectors.DefaultSelector()
        self._wait.register(self._stdout, selectors.EVENT_READ)
        self._rest = b""
        self.prepared = self._line(300)

    @property
    def _stdout(self) -> Any:
        assert self._process.stdout is not None, "it was asked for"
        return self._process.stdout

    def _line(self, seconds: float) -> Result:
        """The next line it writes. Raises TimeoutError, EOFError."""
        end = time.monotonic() + seconds
        while b"\n" not in self._rest:
            if not self._wait.select(max(end - time.monotonic(), 0)):
                raise TimeoutError(f"{self.engine} wrote nothing for {seconds:g} s")
            data = os.read(self._stdout.fileno(), 1 << 20)
            if not data:
                raise EOFError(f"{self.engine} ended")
            self._rest += data
        line, _, self._rest = self._rest.partition(b"\n")
        found: Result = json.loads(line)
        return found

    def ask(self, asked: list[Result], seconds: float, mebibytes: int) -> Iterator[Result]:
        """A result per case; a case may take so much CPU time and memory."""
        assert self._process.stdin is not None, "it was asked for"
        request = {"cases": asked, "seconds": seconds, "mebibytes": mebibytes}
        self._process.stdin.write(json.dumps(request).encode() + b"\n")
        self._process.stdin.flush()
        for _ in asked:
            yield self._line(20 * seconds + 60)

    def close(self) -> None:
        self._wait.close()
        self._process.kill()
        self._process.communicate()


def prepare(case: Case, tokenizer: Tokenizer) -> Result:
    tokens = [tokenizer.encode(text, add_special_tokens=False).ids[:2000] for text in case.texts]
    return {"kind": case.kind, "spec": case.spec, "tokens": tokens}


def merged(rounds: list[Result]) -> Result:
    """One result of several rounds of a case: of each mask and step the least, of the rest the median."""
    whole = [one for one in rounds if "masks" in one]
    if not whole:
        return rounds[0]
    found = dict(whole[0])
    for name in ("masks", "steps"):
        found[name] = [min(times) for times in zip(*(one[name] for one in whole))]
    for name in ("compile", "wall", "first", "memory"):
        found[name] = statistics.median(one[name] for one in whole)
    return found


def parts(values: list[float], *which: float) -> list[float]:
    return [float(part) for part in np.percentile(np.array(values), which)] if values else [0.0] * len(which)


CASE_COLUMNS = ("case", "engine", "compile ms", "wall ms", "to first mask ms", "mask p50 us", "p99", "max",
                "advance p50 us", "MiB")  # fmt: skip


def case_row(name: str, engine: str, found: Result) -> list[str]:
    why = found.get("limit") or (f"refused: {found['refused'][:60]}" if "refused" in found else "")
    if why:
        return [name, engine, why, *[""] * (len(CASE_COLUMNS) - 3)]
    masks = parts(found["masks"], 50, 99, 100)
    row = [f"{found[key] / 1e3:.1f}" for key in ("compile", "wall", "first")]
    row += [f"{value:.0f}" for value in masks]
    row += [f"{parts(found['steps'], 50)[0]:.1f}", f"{found['memory'] / 1024:.0f}"]
    if "stuck" in found:
        row[-1] += f" (token {found['stuck']} not allowed)"
    return [name, engine, *row]


SAMPLE_COLUMNS = ("engine", "schemas", "refused", "over limit", "text not followed", "compile p50 ms", "p99",
                  "max", "to first mask p50 ms", "p99", "max", "mask p50 us", "p99", "max", "advance p50 us",
                  "p99", "MiB max")  # fmt: skip


def sample_row(engine: str, results: list[Result]) -> list[str]:
    whole = [one for one in results if "masks" in one]
    counts = [sum(key in one for one in results) for key in ("refused", "limit", "stuck")]
    row = [engine, str(len(results)), *map(str, counts)]
    for key in ("compile", "first"):
        row += [f"{value / 1e3:.1f}" for value in parts([one[key] for one in whole], 50, 99, 100)]
    row += [f"{value:.0f}" for value in parts([us for one in whole for us in one["masks"]], 50, 99, 100)]
    row += [f"{value:.1f}" for value in parts([us for one in whole for us in one["steps"]], 50, 99)]
    return [*row, f"{max((one['memory'] for one in whole), default=0) / 1024:.0f}"]


def slowest(results: list[Result], chosen: list[Case]) -> list[str]:
    """For people who want to know which schemas are behind a row's tail."""
    named = [(one, case.name) for one, case in zip(results, chosen) if one.get("masks")]
    compiled = sorted(named, key=lambda pair: -pair[0]["compile"])[:3]
    masked = sorted(named, key=lambda pair: -max(pair[0]["masks"]))[:3]
    return [
        "slowest to compile: " + ", ".join(f"{name} {one['compile'] / 1e3:.0f} ms" for one, name in compiled),
        "slowest mask: " + ", ".join(f"{name} {max(one['masks']) / 1e3:.1f} ms" for one, name in masked),
    ]


TARGET_COLUMNS = (
    "engine",
    "target",
    "found, ms",
    "at most, ms",
    "met",
    "values above the limit, and cases with such",
)
TARGETS = (
    ("compile p50", "compile", 50, 5e3), ("compile p99", "compile", 99, 100e3),
    ("first mask p50", "first", 50, 50e3), ("first mask max", "first", 100, 50e3),
    ("mask p50", "masks", 50, 50.0), ("mask p99", "masks", 99, 1e3), ("mask max", "masks", 100, 10e3),
)  # fmt: skip
"""What ours are to reach: a percentile of one figure in microseconds, and the most it may be."""


def verdicts(engine: str, results: list[tuple[str, Result]]) -> list[list[str]]:
    """A row per target; `results` with the name of their cases, of which the worst is told."""
    rows = []
    for title, key, part, most in TARGETS:
        pairs = [
            (value, name)
            for name, one in results
            if key in one
            for value in (one[key] if isinstance(one[key], list) else [one[key]])
        ]
        if not pairs:
            continue
        found = parts([value for value, _ in pairs], part)[0]
        over = sorted({name for value, name in pairs if value > most})
        above = sum(value > most for value, _ in pairs)
        told = f"{above} of {len(pairs)}, in {len(over)} of {len(results)}"
        rows.append(
            [engine, title, f"{found / 1e3:.3f}", f"{most / 1e3:g}", "yes" if found <= most else "no", told]
        )
    return rows


class Report:
    """Tables, to the terminal as they are made and as Markdown at the end."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.lines: list[str] = []

    def say(self, text: str, *, heading: bool = False) -> None:
        self.console.rule(text) if heading else self.console.print(text, highlight=False)
        self.lines += [f"## {text}" if heading else text, ""]

    def table(self, columns: tuple[str, ...], rows: list[list[str]]) -> None:
        table = Table(*(columns), box=None)
        for row in rows:
            table.add_row(*row)
        self.console.print(table)
        self.lines += [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
        self.lines += [f"| {' | '.join(cell.replace('|', '/') for cell in row)} |" for row in rows]
        self.lines.append("")


def by_case(
    workers: list[Worker], chosen: list[Case], tokenizer: Tokenizer, given: Any, report: Report
) -> None:
    rows, known_all = [], []
    for case in tqdm(chosen, desc="cases", leave=False, disable=None):
        asked = [prepare(case, tokenizer)]
        rounds: dict[str, list[Result]] = {worker.engine: [] for worker in workers}
        for _ in range(given.rounds):
            for worker in workers:
                known = rounds[worker.engine]
                if not known or ("masks" in known[-1] and known[-1]["compile"] < LONG):
                    known += worker.ask(asked, given.seconds, given.mebibytes)
        rows += [case_row(case.name, engine, merged(found)) for engine, found in rounds.items()]
        known_all += [(case.name, merged(found)) for engine, found in rounds.items() if engine == OURS[0]]
    report.table(CASE_COLUMNS, rows)
    report.table(TARGET_COLUMNS, verdicts(f"{OURS[0]}, cases", known_all))


def by_sample(
    workers: list[Worker], chosen: list[Case], tokenizer: Tokenizer, given: Any, report: Report
) -> None:
    rows, tails, judged = [], [], []
    for worker in workers:
        if worker.engine == "outlines":
            continue  # takes regular expressions and choices only, or what auto sends it
        some = chosen[:: given.stride] if worker.engine in SLOW else chosen
        asked = [prepare(case, tokenizer) for case in some]
        rounds = [
            list(tqdm(worker.ask(asked, given.sample_seconds, given.mebibytes), desc=worker.engine,
                      leave=False, total=len(asked), disable=None))
            for _ in range(1 if worker.engine in SLOW else given.sample_rounds)
        ]  # fmt: skip
        results = [merged(list(same)) for same in zip(*rounds)]
        rows.append(sample_row(worker.engine, results))
        tails += [f"{worker.engine}, {line}" for line in slowest(results, some)]
        if worker.engine == OURS[0]:
            named = [(case.name, one) for case, one in zip(some, results)]
            judged = verdicts(f"{OURS[0]}, sample", named)
    report.table(SAMPLE_COLUMNS, rows)
    report.table(TARGET_COLUMNS, judged)
    for line in tails:
        report.say(line + ".")


def one_size(size: int, given: Any, report: Report) -> None:
    path, vocabulary = make_vocabulary(size, given.folder, given.text)
    tokenizer = Tokenizer.from_file(str(path))
    report.say(f"Vocabulary of {about(vocabulary)}", heading=True)
    with contextlib.ExitStack() as stack:
        workers = []
        for engine in given.engines:
            worker = Worker(engine, size, given.folder)
            stack.callback(worker.close)
            if "missing" in worker.prepared:
                report.say(f"{engine}: {worker.prepared['missing']}")
                continue
            workers.append(worker)
        prepared = [
            f"{worker.engine} {told['seconds']:.1f} s and {told['memory'] / 1024:.0f} MiB"
            for worker, told in ((worker, worker.prepared) for worker in workers)
        ]
        report.say("Prepared once, import included: " + ", ".join(prepared) + ".")
        named = [case for case in cases() if not given.cases or case.name.split()[0] in given.cases]
        by_case(workers, named, tokenizer, given, report)
        schemas = list(sample(given.data))[:: given.every] if given.data else []
        if schemas:
            report.say(f"Schema sample, {len(schemas)} schemas, vocabulary of {size:,}", heading=True)
            by_sample(workers, schemas, tokenizer, given, report)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    data = os.environ.get("SGLANG_DSL_DATA")
    parser.add_argument("--sizes", type=int, nargs="*", default=[32_768, LARGEST])
    parser.add_argument("--engines", nargs="*", default=list(ENGINES), choices=ENGINES)
    parser.add_argument("--cases", nargs="*", help="by the letter and number of their names; default: all")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--sample-rounds", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=30.0, help="of CPU that a case may take")
    parser.add_argument(
        "--sample-seconds", type=float, default=10.0, help="the same of a schema of the sample"
    )
    parser.add_argument("--mebibytes", type=int, default=6144, help="that an engine may hold")
    parser.add_argument("--stride", type=int, default=16, help="every n-th schema for: " + ", ".join(SLOW))
    parser.add_argument("--every", type=int, default=1, help="every n-th schema for all engines")
    parser.add_argument("--folder", type=Path, default=default_folder(), help="where vocabularies are kept")
    parser.add_argument("--text", type=Path, nargs="*", default=[], help="folders to train vocabularies on")
    parser.add_argument("--data", type=Path, default=Path(data) if data else None)
    parser.add_argument("--quick", action="store_true", help="ours and llguidance, two cases, one round")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--append", action="store_true", help="write behind what the day's file has")
    parser.add_argument("--results", type=Path, default=RESULTS)
    given = parser.parse_args()
    if given.quick:
        given.engines, given.cases = ["auto", "llguidance library"], ["R1", "J1"]
        given.rounds, given.sizes, given.data = 1, given.sizes[:1], None
    return given


def finish(report: Report, given: argparse.Namespace, begin: float) -> None:
    """The last words of the report; keeps it where that was asked for."""
    command = " ".join(["python -m benchmarks.grammars.backends", *sys.argv[1:]])
    report.say(f"{conditions()}; {(time.monotonic() - begin) / 60:.0f} minutes. `{command}`")
    limits = f"{given.seconds:g} s of CPU for a case, {given.sample_seconds:g} s for a schema of the sample"
    report.say(f"{HOW} Limits: {limits}, {given.mebibytes} MiB.")
    if given.write or given.append:
        print(keep("grammar", "\n".join(report.lines), append=given.append, folder=given.results))


def main() -> None:
    given = parse()
    report = Report(Console(width=200))
    begin = time.monotonic()
    title = f"Grammar backends, {datetime.date.today().isoformat()}"
    report.lines += [f"# {title}{', once more' if given.append else ''}", ""]
    try:
        for size in given.sizes:
            one_size(size, given, report)
    finally:  # what was measured so far is kept, however this ends
        finish(report, given, begin)


if __name__ == "__main__":
    main()
