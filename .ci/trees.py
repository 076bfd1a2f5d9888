"""Which tests run: all of them, or those that a change reaches.

    python .ci/trees.py affected   long tests, explore and clients that the changes since .ci/proved reach
    python .ci/trees.py all        every tree; one that passed at this commit is not run again

A test file is as near to a change as its imports: 0 if it changed itself, 1 if it imports a changed module,
and so on (grimp's graph; names in registries, and modules that are run with `-m`, count as imports). The
nearest files are chosen until BUDGET_S is used up, by the seconds that the last whole run wrote to
.ci/proved. A tenth of all files, another one at each commit, comes first.
"""

from __future__ import annotations

import ast
import heapq
import itertools
import json
import os
import re
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import grimp

ROOT = Path(__file__).resolve().parent.parent
PROVED = ROOT / ".ci" / "proved"
PASSED = ROOT / ".proved"
LAST_FAILED = ROOT / ".pytest_cache" / "v" / "cache" / "lastfailed"
"""Where pytest keeps the names of the tests that failed."""
JOBS = int(os.environ.get("JOBS", "3"))
BUDGET_S = int(os.environ.get("BUDGET_S", str(7 * 60)))
LATEST = 2.5
"""So many times the budget may pass on a slow machine; what has not begun then is left to `make test-all`."""
UNKNOWN_S = 20
"""For a file that the last whole run did not have."""
FAR = 99
PACKAGES = ("runtime", "sglang_dsl")
EVERYTHING = ("pyproject.toml", ".ci/constraints.txt", "tests/conftest.py")
"""A change of one of these is one step away from every test."""
READ = ("tutorials", "examples", "README.md", "CONTRIBUTING.md", "Makefile", ".github", ".ci")
"""What tests read, and do not import."""
SCRIPTS = ("tests/", "benchmarks/", "examples/pocket/")
"""Modules outside of the packages."""
MODULE = re.compile(r"(?:runtime|sglang_dsl|examples\.pocket)(?:\.\w+)*(?=:\w|$)")
DRAWN = re.compile(r"^(?:from|import) hypothesis|mark\.drawn", re.MULTILINE)
LENGTHS = {
    "SOAK_REQUESTS": "1500", "FUZZ_SECONDS": "90", "PROGRAMS": "3000", "SLOW_EXAMPLES": "30",
    "SEEDED_PROGRAMS": "100",
}  # fmt: skip
"""How much the long tests do; their own defaults are several times as much."""


@dataclass(frozen=True)
class Group:
    """Tests that run in one call of pytest."""

    name: str
    marks: str
    workers: int
    options: tuple[str, ...] = ()

    def command(self, files: Iterable[str]) -> list[str]:
        spread = ["-n", str(self.workers), "--dist", "worksteal"] if self.workers > 1 else []
        return [sys.executable, "-m", "pytest", "-q", *spread, "-m", self.marks, *self.options, *files]


LONG = ("--timeout", "1800", "--durations", "10")
GROUPS = {
    one.name: one
    for one in (
        Group("unit", "not gpu", JOBS),
        Group("process", "not gpu", JOBS),
        Group("long", "not ray", JOBS, LONG),
        Group("explore", "hypothesis or drawn", JOBS, LONG),
        Group("clients", "not gpu", 1, LONG),
        # Ray gives its processes 15 s to start, which nothing sets: one test at a time.
        Group("ray", "ray", 1, LONG),
    )
}


def git(*command: str) -> str:
    return subprocess.run(
        ["git", *command], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.strip()


def candidates() -> Iterator[tuple[str, str]]:
    """(group, file) of every test file that the gate may leave out."""
    for path in sorted((ROOT / "tests").glob("*/**/test_*.py")):
        file, tree = str(path.relative_to(ROOT)), path.relative_to(ROOT).parts[1]
        text = path.read_text(encoding="utf-8")
        if tree == "long":
            yield "ray" if "mark.ray" in text else "long", file
        elif tree == "clients":
            yield "clients", file
        elif tree in ("unit", "process") and DRAWN.search(text):
            yield "explore", file


# -- how near a test is to a change ----------------------------------------------------------------------


def module_of(file: str) -> str:
    return file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def named(tree: ast.Module) -> Iterator[str]:
    """Modules that are named in strings: in registries ("module:object"), and behind `-m`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and "." in node.value:
            if found := MODULE.match(node.value):
                yield found.group()
        elif isinstance(node, ast.List | ast.Tuple):
            texts = [getattr(item, "value", None) for item in node.elts]
            for flag, name in itertools.pairwise(texts):
                if flag == "-m" and name in PACKAGES:
                    yield f"{name}.__main__"


def imported(tree: ast.Module, known: set[str]) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                yield whole if whole in known else node.module


def arrows() -> dict[str, set[str]]:
    """Module -> those that import it, of the packages and of the tests."""
    graph = grimp.build_graph(*PACKAGES, cache_dir=None)
    back: dict[str, set[str]] = defaultdict(set)
    for module in graph.modules:
        for target in graph.find_modules_directly_imported_by(module):
            back[target].add(module)
    tests = {
        module_of(file): file
        for file in git("ls-files", *(f"{folder}*.py" for folder in SCRIPTS)).splitlines()
    }
    known = graph.modules | tests.keys()
    sources = {module: ROOT / file for module, file in tests.items()}
    for module in graph.modules:
        path = ROOT / (module.replace(".", "/") + ".py")
        sources[module] = path if path.is_file() else path.with_suffix("") / "__init__.py"
    for module, path in sources.items():
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for target in {*named(tree), *(imported(tree, known) if module in tests else ())} & known:
            back[target].add(module)
    for module in tests:  # the fixtures of the folders above
        parts = module.split(".")
        for depth in range(1, len(parts)):
            above = ".".join([*parts[:depth], "conftest"])
            if above in tests and above not in (module, "tests.conftest"):
                back[above].add(module)
    return back


def begins(changed: Iterable[str]) -> dict[str, tuple[int, str]]:
    """Module -> how near it is to what changed before anything is imported, and the changed file."""
    begin: dict[str, tuple[int, str]] = {}
    others: list[str] = []
    for file in changed:
        path = Path(file)
        if path.parts[0] in PACKAGES and path.suffix != ".py":  # sources in C, pages, a checkpoint
            begin[".".join(path.parts[:-1])] = (1, file)
        elif path.suffix == ".py" and (path.parts[0] in PACKAGES or file.startswith(SCRIPTS)):
            begin[module_of(file)] = (0, file)
        if path.parts[0] in READ:
            others.append(file)
    if others:  # read by the tests that name their folder
        pattern = re.compile("|".join(f'"{re.escape(Path(file).parts[0])}' for file in others))
        for test in git("ls-files", "tests/*.py").splitlines():
            if pattern.search((ROOT / test).read_text(encoding="utf-8")):
                begin.setdefault(module_of(test), (1, others[0]))
    return begin


def distances(changed: list[str]) -> dict[str, tuple[int, str]]:
    """Module -> the least number of imports between it and a changed file, and that file."""
    back, near = arrows(), begins(changed)
    queue = [(steps, module) for module, (steps, _) in near.items()]
    heapq.heapify(queue)
    while queue:
        steps, module = heapq.heappop(queue)
        if steps > near[module][0]:
            continue
        for importer in back.get(module, ()):
            if steps + 1 < near.get(importer, (FAR, ""))[0]:
                near[importer] = (steps + 1, near[module][1])
                heapq.heappush(queue, (steps + 1, importer))
    return near


# -- what is chosen --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Choice:
    group: str
    file: str
    seconds: int
    why: str

    @property
    def cost(self) -> float:
        """Seconds of the gate."""
        return self.seconds / GROUPS[self.group].workers


def choose() -> tuple[list[Choice], list[Choice]]:
    """Those that the gate runs, and those that it leaves to `make test-all`."""
    proved = json.loads(PROVED.read_text()) if PROVED.is_file() else {"commit": None, "seconds": {}}
    head = git("rev-parse", "HEAD")
    try:
        rows = [
            row.split("\t") for row in git("diff", "--name-status", proved["commit"], "HEAD").splitlines()
        ]
        changed = [row[-1] for row in rows if row[0] != "R100"]  # a file that only moved is no change
        print(f"{len(changed)} files changed since all tests passed ({proved['commit'][:9]})")
    except (subprocess.CalledProcessError, TypeError):
        changed = git("ls-files").splitlines()
        print("no commit is known at which all tests passed: everything counts as changed")
    near, turn = distances(changed), int(head[:8], 16) % 10
    whole = next((file for file in changed if file in EVERYTHING), None)
    tenth, reached = [], []
    for number, (group, file) in enumerate(sorted(candidates(), key=lambda one: (one[1], one[0]))):
        seconds = int(proved["seconds"].get(f"{group} {file}", UNKNOWN_S))
        steps, source = near.get(module_of(file), (FAR, ""))
        if whole and steps > 1:
            steps, source = 1, whole
        if number % 10 == turn:
            tenth.append(Choice(group, file, seconds, "this commit's tenth"))
        elif steps < FAR:
            reached.append((steps, Choice(group, file, seconds, f"{steps} from {source}")))
    chosen, left, spent = [], [], 0.0
    nearest = [one for _, one in sorted(reached, key=lambda pair: (pair[0], pair[1].seconds, pair[1].file))]
    for share, some in ((BUDGET_S / 4, sorted(tenth, key=lambda one: one.seconds)), (BUDGET_S, nearest)):
        for one in some:
            if spent + one.cost <= share:
                chosen.append(one)
                spent += one.cost
            else:
                left.append(one)
    print(
        f"{len(chosen)} of {len(chosen) + len(left)} files that are reached, about {spent / 60:.0f} minutes:"
    )
    for one in chosen:
        print(f"  {one.group:8} {one.file} ({one.seconds} s): {one.why}")
    print(f"{len(left)} reached files are left to `make test-all`", flush=True)
    return chosen, left


# -- runs ------------------------------------------------------------------------------------------------


def environment(group: str, times: Path) -> dict[str, str]:
    env = {**LENGTHS, **os.environ, "OMP_NUM_THREADS": "1", "TEST_SECONDS": str(times)}
    if group in ("unit", "process"):
        env.pop("EXPLORE", None)
    elif not env.get("EXPLORE"):  # a commit draws its own examples, wherever it is tested
        env["EXPLORE"] = str(int(git("rev-parse", "--short=7", "HEAD")[:7], 16))
    return env


@dataclass(frozen=True)
class Outcome:
    """Of one call of pytest. seconds: of each file."""

    passed: bool
    seconds: dict[str, float]
    failed: frozenset[str]


def run(group: str, files: Iterable[str], **more: str) -> Outcome:
    """more: of the environment."""
    times = PASSED / f"{group}.seconds"
    PASSED.mkdir(exist_ok=True)
    times.unlink(missing_ok=True)
    began = time.monotonic()
    env = environment(group, times) | more
    code = subprocess.run(GROUPS[group].command(files), cwd=ROOT, env=env).returncode
    print(
        f"{group}: {'passed' if code == 0 else f'FAILED ({code})'} after {time.monotonic() - began:.0f} s",
        flush=True,
    )
    seconds = json.loads(times.read_text()) if times.is_file() else {}
    if code == 1:
        last = json.loads(LAST_FAILED.read_text()) if LAST_FAILED.is_file() else {}
        failed = {name.partition("::")[0] for name in last}
    else:  # anything but 0 ended before all tests had run: no file of it counts as passed
        failed = set() if code == 0 else set(seconds)
    return Outcome(code == 0, seconds, frozenset(failed))


def affected() -> int:
    chosen, _ = choose()
    right, deadline = True, str(time.time() + LATEST * BUDGET_S)
    for group in ("explore", "long", "ray", "clients"):
        if files := [one.file for one in chosen if one.group == group]:
            right = run(group, files, TEST_DEADLINE=deadline).passed and right
    return 0 if right else 1


def still_passed(stamp: Path, files: list[str]) -> dict[str, float]:
    """Those that passed at an earlier commit, and that no change since then reaches; with their seconds."""
    if not stamp.is_file():
        return {}
    past = json.loads(stamp.read_text())
    try:
        changed = git("diff", "--name-only", past["commit"], "HEAD").splitlines()
    except subprocess.CalledProcessError:  # a commit that was rewritten
        return {}
    if set(changed) & set(EVERYTHING):
        return {}
    near = distances(changed) if changed else {}
    return {
        file: past["seconds"][file]
        for file in files
        if file in past["seconds"] and module_of(file) not in near
    }


def everything() -> int:
    """Runs each tree. A file that passed before is run again only if something that it imports has changed:
    one failure does not cost an hour. At the end .ci/proved has the commit, and the seconds of each file."""
    head, clean = git("rev-parse", "HEAD"), not git("status", "--porcelain", "--untracked-files=no")
    files: dict[str, list[str]] = {
        tree: git("ls-files", f"tests/{tree}/**/test_*.py", f"tests/{tree}/test_*.py").splitlines()
        for tree in ("unit", "process")
    }
    for group, file in candidates():
        files.setdefault(group, []).append(file)
    seconds: dict[str, int] = {}
    right = True
    for group in GROUPS:
        stamp = PASSED / group
        took = still_passed(stamp, files[group]) if clean else {}
        if todo := [file for file in files[group] if file not in took]:
            if took:
                print(f"{group}: {len(took)} files passed before, and nothing that they import has changed")
            outcome = run(group, todo)
            right = right and outcome.passed
            took |= {file: outcome.seconds.get(file, 0.0) for file in todo if file not in outcome.failed}
        else:
            print(f"{group}: passed before")
        if clean:
            stamp.write_text(json.dumps({"commit": head, "seconds": took}))
        if group not in ("unit", "process"):
            seconds |= {f"{group} {file}": max(1, round(took.get(file, UNKNOWN_S))) for file in files[group]}
    if right and clean:
        PROVED.write_text(json.dumps({"commit": head, "seconds": seconds}, indent=1, sort_keys=True) + "\n")
        print(f"all passed: {PROVED.relative_to(ROOT)} says so, to be committed")
    elif right:
        print(
            "all passed, but the working tree has changes that are not committed: .ci/proved stays as it was"
        )
    return 0 if right else 1


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["affected"]:
            sys.exit(affected())
        case ["all"]:
            sys.exit(everything())
        case _:
            sys.exit(__doc__)
