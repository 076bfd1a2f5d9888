"""The benchmark programs still run, in their small mode, and what they measure with counts right."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from benchmarks import engine, limits, programs
from benchmarks.measuring import Reading, conditions, in_turn, keep, ratio, timed
from benchmarks.peers import child
from benchmarks.peers.adapter import common_begin
from benchmarks.workloads import Workload
from runtime.api import Engine
from tests.process.patience import PROGRAM_S

ROOT = Path(__file__).resolve().parents[3]


def test_grammar_benchmark_in_small(tmp_path: Path) -> None:
    text = ROOT / "runtime" / "grammar"
    command = ["-m", "benchmarks.grammars.backends", "--quick", "--write", "--sizes", "2000", "--text", text]
    done = subprocess.run(
        [sys.executable, *command, "--folder", tmp_path, "--results", tmp_path],
        capture_output=True,
        text=True,
        timeout=PROGRAM_S,
        cwd=ROOT,
        env={key: value for key, value in os.environ.items() if key != "SGLANG_DSL_DATA"},
    )
    assert done.returncode == 0, done.stderr
    (report,) = tmp_path.glob("*-grammar.md")
    rows = [
        line.split(" | ") for line in report.read_text().splitlines() if line.startswith(("| R1", "| J1"))
    ]
    assert [row[1] for row in rows] == ["auto", "llguidance library"] * 2
    for row in rows:
        assert all(float(cell) >= 0 for cell in row[2:9]), row
        assert "not allowed" not in row[-1]


BURN = "import time\nwhile time.process_time() < {}: pass\n"


def spent(seconds: float) -> Reading:
    """What a reading says of a child that burns so much CPU itself, and of its grandchild that burns as much
    and is waited for; both have ended."""
    both = f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {BURN.format(seconds)!r}])\n"
    began = Reading.now()
    subprocess.run([sys.executable, "-c", both + BURN.format(seconds)], check=True, timeout=PROGRAM_S)
    return began.since()


def test_cpu_of_children_that_have_ended_is_counted() -> None:
    before = time.process_time()
    found = spent(0.5)
    here = time.process_time() - before
    assert 1.0 <= found.cpu <= 2.0
    assert here < 0.5, "the burning is the children's, not this process's"


def test_cpu_of_children_that_live_is_counted() -> None:
    """A child that has burnt and lives on, with a grandchild of the same kind, waits for a line from here."""
    lives = BURN.format(0.5) + "print('burnt', flush=True)\ninput()\n"
    parent = (
        "import subprocess, sys\n"
        f"child = subprocess.Popen([sys.executable, '-c', {lives!r}], stdin=subprocess.PIPE, "
        "stdout=subprocess.PIPE)\n"
        "child.stdout.readline()\n" + lives + "child.communicate(b'\\n')\n"
    )
    began = Reading.now()
    with subprocess.Popen(
        [sys.executable, "-c", parent], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"burnt\n"
        living = began.since()
        child.communicate(b"\n", timeout=PROGRAM_S)
    ended = began.since()
    assert 1.0 <= living.cpu <= 2.0
    assert living.cpu <= ended.cpu <= living.cpu + 0.5, "nothing is lost, or counted twice, when they end"


def test_cpu_of_the_model_is_counted() -> None:
    """Where the model has a process of its own, most of the work is done there."""
    with Engine("pocket", runner_process=True, threads=1, max_total_tokens=4096) as engine:
        engine.generate("Once", {"max_new_tokens": 4})
        own = time.process_time()
        took, _ = timed(lambda: engine.generate("Once", {"max_new_tokens": 200, "ignore_eos": True}))
        own = time.process_time() - own
    assert took.cpu > 1.5 * own


def test_ways_are_measured_in_turn_and_the_last_report_replaces_the_older(tmp_path: Path) -> None:
    order: list[str] = []
    took, gave = in_turn({name: lambda name=name: order.append(name) for name in "ab"}, 3)
    assert "".join(order) == "abbaab"
    assert {name: len(readings) for name, readings in took.items()} == {"a": 3, "b": 3}
    assert gave == {"a": [None] * 3, "b": [None] * 3}
    halves = ratio(
        [Reading(1, 3), Reading(2, 8), Reading(9, 9)], [Reading(2, 6), Reading(4, 1), Reading(1, 9)]
    )
    assert halves == Reading(0.5, 1.0)
    for name in ("2020-01-02-engine.md", "2020-01-02-other-engine.md"):
        (tmp_path / name).write_text("old")
    kept = keep("engine", conditions("1 thread"), folder=tmp_path)
    assert re.search("commit .*1 thread", kept.read_text())
    assert sorted(tmp_path.iterdir()) == sorted([kept, tmp_path / "2020-01-02-other-engine.md"])


def test_streaming_benchmark_in_small() -> None:
    """Every interface streams through the worker it measures, and each of its rows holds times."""
    command = [
        "benchmarks/serving/streaming.py",
        "--streams",
        "3",
        "--tokens",
        "12",
        "--lengths",
        "20",
        "--rounds",
        "1",
    ]
    done = subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, timeout=PROGRAM_S, cwd=ROOT, check=False
    )
    assert done.returncode == 0, done.stderr
    heads, _, *rows = done.stdout[done.stdout.rindex("| interface") :].splitlines()
    assert heads == "| interface | worker | 3 x 12 | 1 x 20 | a request |"
    names = [row.split(" | ")[0].removeprefix("| ") for row in rows]
    assert names == ["native", "native, incremental", "completions", "chat", "chat, reasoning", "responses",
                     "messages"]  # fmt: skip
    assert all(float(cell) > 0 for row in rows for cell in row.strip(" |").split(" | ")[2:])


def test_kv_transfer_benchmark_in_small() -> None:
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "benchmarks.serving.kv_transfer",
            "--transfers",
            "local",
            "tcp",
            "--mib",
            "2",
            "--rounds",
            "1",
        ],
        capture_output=True,
        text=True,
        timeout=PROGRAM_S,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr
    rows = [line.split(" | ") for line in done.stdout.splitlines() if line.endswith(" |")][1:]
    assert [row[0].removeprefix("| ") for row in rows] == ["local", "local", "tcp", "tcp"]
    assert all(float(cell.rstrip(" |")) >= 0 for row in rows for cell in row[2:])


ECHO = """
import sys
from pathlib import Path
sys.path.insert(0, {folder!r})
from adapter import Unsupported, serve

class Echo:
    version, shares = "1", False

    def __init__(self, folder, precision, threads):
        if precision == "int8":
            raise Unsupported("no int8")
        print("an engine's own words")
        self.calls = {{}}

    def run(self, prompts, new_tokens):
        return [prompt[-1:] * new_tokens for prompt in prompts]

    def forget(self):
        self.calls.clear()

    def add(self, number, prompt, new_tokens, regex):
        self.calls[number] = f"{{prompt[-1:]}}{{new_tokens}}"

    def step(self):
        return dict([self.calls.popitem()])

serve(Echo)
"""


def test_an_engine_in_its_own_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it prints disturbs nothing, its own CPU is counted, and what it does not do is told by name."""
    (tmp_path / "echo_peer.py").write_text(ECHO.format(folder=str(ROOT / "benchmarks" / "peers")))
    (tmp_path / "echo" / "bin").mkdir(parents=True)
    (tmp_path / "echo" / "bin" / "python").symlink_to(sys.executable)
    monkeypatch.setattr(child, "HERE", tmp_path)
    model = tmp_path / "cache" / "model"
    with pytest.raises(child.Missing, match="no int8"):
        child.Child("echo", model, "int8", 1, tmp_path)
    with pytest.raises(child.Missing, match=r"no .*/other/bin/python"):
        child.Child("other", model, "float32", 1, tmp_path)
    echo = child.Child("echo", model, "float32", 1, tmp_path)
    try:
        assert (echo.version, echo.shares) == ("1", False)
        assert echo.run([[1, 2], [3]], 3) == [[2, 2, 2], [3, 3, 3]]
        before = echo.reading()
        assert 0 < before.cpu < time.process_time() + 5
        named = programs.items(3, long=False)
        texts = programs.drive(echo, [programs.chains(item) for item in named])
        assert echo.reading().cpu >= before.cpu
    finally:
        echo.close()
    solutions = "".join(f"Solution {n + 1}: :{programs.LONG}\n" for n in range(programs.CHAINS))
    assert texts == [f"{i.system}Question: {i.topic}?\n{solutions}Answer::{programs.LONG}" for i in named]


def test_replies_find_their_programs_in_any_order() -> None:
    class Late:
        """Answers the newest call first, with its prompt's length."""

        def __init__(self) -> None:
            self.calls: list[tuple[int, str, int, str | None]] = []
            self.most = 0

        def ask(self, calls: list[tuple[int, str, int, str | None]], **words: object) -> dict[str, object]:
            self.calls += calls
            self.most = max(self.most, len(self.calls))
            number, prompt, *_ = self.calls.pop()
            return {"replies": [[number, f"<{prompt.count(':')}>"]]}

    late = Late()
    texts = programs.drive(late, [programs.tree(item) for item in programs.items(2, long=False)])  # type: ignore[arg-type]
    assert late.most >= 2 * programs.BRANCHES, "programs run side by side"
    assert all(text.count("Score 1:<4>") == 4 and text.count("Answer 2:<3>") == 4 for text in texts)


def test_the_best_peer_and_the_limit() -> None:
    """A step costs the greater of its reads and its products; what is shared is computed once."""
    found = engine.Results()
    found.took["w"] = {
        name: [Reading(1, cpu), Reading(1, cpu + 1)]
        for name, cpu in {
            "sglang-dsl float32": 1.0,
            "a float32": 3.0,
            "b float32": 2.0,
            "a int8": 1.0,
        }.items()
    }
    assert found.best_peer("w", "float32") == ("b float32", 2.0)
    assert found.best_peer("w", "bfloat16") is None
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1}
    weights, head, _ = limits.costs(shape)
    machine = limits.Limits(bandwidth=1e30, products={"float32": 1.0})
    once = Workload("w", [[1] * 10] * 4, 1)
    assert machine.seconds(once, "float32", shape) == 2 * (40 * weights + 4 * head)
    common = Workload("w", [[1] * 10] * 4, 1, shared=8)
    assert common_begin(common.prompts[:1]) == 0
    assert common_begin([[1, 2, 3], [1, 2, 4, 5]]) == 2
    assert common_begin([[1, 2, 3], [1, 2]]) == 1
    assert machine.seconds(common, "float32", shape) == 2 * (16 * weights + 4 * head)
    slow = limits.Limits(bandwidth=1.0, products={"float32": 1e30})
    assert slow.seconds(once, "float32", shape) == 4 * (weights + head)


def test_the_limit_is_the_fastest_way_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever it is: loops alone, torch, or this project."""
    monkeypatch.setattr(limits, "BYTES", 1 << 20)
    monkeypatch.setattr(limits, "LOOPS", 1000)
    monkeypatch.setattr(limits.torch, "set_num_threads", lambda count: None)
    operations = 2 * limits.ROWS * limits.SIDE**2

    def measured(fast: float) -> limits.Limits:
        """One of the ways takes so many seconds, all others one."""

        def own() -> None:
            pass

        monkeypatch.setattr(limits, "_ours", lambda *matrices: [own])
        monkeypatch.setattr(limits, "_least", lambda way: fast if way is own else 1.0)
        return limits.measure(1)

    found = measured(0.5)
    assert found.products == dict.fromkeys(limits.SIZES, operations / 0.5)
    assert found.bandwidth == (1 << 20) / 0.5
    assert measured(2.0).products == dict.fromkeys(limits.SIZES, operations)
    loops = limits._loops()
    assert loops is not None
    with ThreadPoolExecutor(2) as pool:
        (once,), (twice,) = (limits._alone(loops, "float32", threads, pool) for threads in (1, 2))
        limits._read(loops, torch.ones(1 << 18), 4, 2, pool)
    assert twice == 2 * once > 0
    monkeypatch.setattr(limits, "_alone", lambda *given: [1e30])
    assert measured(0.5).products == dict.fromkeys(limits.SIZES, 1e30)
