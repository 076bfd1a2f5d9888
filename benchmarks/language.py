"""What the language itself costs: `python -m benchmarks.language`. No model, no server.

CPU time per program of a whole process (its caller's threads and the language's loop) on the mock backend,
which answers with a constant after a millisecond, so that as many programs as said are under way; what the
mock itself costs is measured by calling it bare, with the same calls and as many at once, and told beside it.
Then forks: how many threads and how much memory 10,000 of them take that all wait for their answer, and the
memory of a process in which 100,000 programs run, 64 at once.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import gc
import resource
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import sglang_dsl as sgl
from benchmarks.measuring import HERE, conditions, keep
from sglang_dsl.backends.base import Call, Completion
from sglang_dsl.concurrency.loop import background

AT_ONCE = 64
DELAY_S = 0.001
PAGE = resource.getpagesize()
TARGET_MS = 0.110  # a fifth of sglang 0.5.23's frontend: PEER_MS for the program of five calls
PEER_MS = 0.557


@sgl.function
def one_call(s: sgl.ProgramState, question: str) -> None:
    s += sgl.user(question)
    s += sgl.assistant(sgl.gen("a0", max_tokens=8))


@sgl.function
def five_calls(s: sgl.ProgramState, question: str) -> None:
    s += sgl.system("Answer in one word.")
    for turn in range(5):
        s += sgl.user(question)
        s += sgl.assistant(sgl.gen(f"a{turn}", max_tokens=8))


@sgl.function
async def five_calls_async(s: sgl.AsyncProgramState, question: str) -> None:
    s += sgl.system("Answer in one word.")
    for turn in range(5):
        s += sgl.user(question)
        s += sgl.assistant(sgl.gen(f"a{turn}", max_tokens=8))


@sgl.function
def five_reads(s: sgl.ProgramState, question: str) -> None:
    s += sgl.system("Answer in one word.")
    for turn in range(5):
        s += sgl.user(question)
        s += sgl.assistant(sgl.gen(f"a{turn}", max_tokens=8))
        s[f"a{turn}"]


@sgl.function
async def five_reads_async(s: sgl.AsyncProgramState, question: str) -> None:
    s += sgl.system("Answer in one word.")
    for turn in range(5):
        s += sgl.user(question)
        s += sgl.assistant(sgl.gen(f"a{turn}", max_tokens=8))
        await s[f"a{turn}"]


def mock() -> sgl.MockBackend:
    return sgl.MockBackend(lambda call: "yes", delay_s=DELAY_S)


def items(count: int) -> Iterator[dict[str, str]]:
    return ({"question": f"Is {number} even?"} for number in range(count))


def batch(program: Any) -> Callable[[sgl.MockBackend, int, int], None]:
    def run(backend: sgl.MockBackend, count: int, at_once: int) -> None:
        for _ in program.run_batch(
            items(count), backend=backend, num_threads=at_once, generator_style=True, ordered=False
        ):
            pass

    return run


def batch_async(program: Any) -> Callable[[sgl.MockBackend, int, int], None]:
    def run(backend: sgl.MockBackend, count: int, at_once: int) -> None:
        async def all_of_them() -> None:
            async for _ in program.arun_batch(
                items(count), backend=backend, num_threads=at_once, ordered=False
            ):
                pass

        asyncio.run(all_of_them())

    return run


WAYS: dict[str, tuple[int, Callable[[sgl.MockBackend, int, int], None]]] = {
    "run_batch, 1 call": (1, batch(one_call)),
    "run_batch, 5 calls": (5, batch(five_calls)),
    "run_batch, 5 calls, each read": (5, batch(five_reads)),
    "run_batch, 5 calls, async function": (5, batch(five_calls_async)),
    "arun_batch, 5 calls, async function": (5, batch_async(five_calls_async)),
    "run_batch, 5 calls, async function, each read": (5, batch(five_reads_async)),
    "arun_batch, 5 calls, async function, each read": (5, batch_async(five_reads_async)),
}


async def bare(backend: sgl.MockBackend, calls: list[Call], in_each: int, at_once: int) -> None:
    """The same calls without the language: `in_each` after one another, `at_once` times at once."""
    todo = iter([calls[at : at + in_each] for at in range(0, len(calls), in_each)])

    async def work() -> None:
        for some in todo:
            for call in some:
                await backend.generate(call)

    await asyncio.gather(*(work() for _ in range(at_once)))


def spent(what: Callable[[], object]) -> float:
    """CPU seconds of the process."""
    gc.collect()
    began = time.process_time()
    what()
    return time.process_time() - began


async def _loop_seconds() -> float:
    return time.thread_time()


def per_program(way: str, count: int, rounds: int, at_once: int = AT_ONCE) -> tuple[float, float, float]:
    """Milliseconds of CPU per program, least of `rounds`: in all; of these on the language's loop, in that
    round; and the mock's own, with the timers it waits on, which is spent there."""
    in_each, run = WAYS[way]
    whole, own = [], []
    for _ in range(rounds):
        backend = mock()
        run(backend, at_once, at_once)
        backend.calls.clear()
        looped = [0.0]

        def both(backend: Any = backend, looped: list[float] = looped) -> None:
            begin = background().run(_loop_seconds())
            run(backend, count, at_once)
            looped[0] = background().run(_loop_seconds()) - begin

        whole.append((spent(both), looped[0]))
        calls, again = list(backend.calls), mock()
        if len(calls) != count * in_each:
            raise SystemExit(f"{way}: {len(calls)} calls where {count * in_each} were to be made")
        backend.calls.clear()
        made: Coroutine[Any, Any, None] = bare(again, calls, in_each, at_once)
        own.append(spent(lambda m=made: background().run(m)))  # type: ignore[misc]
    seconds, on_loop = min(whole)
    return 1e3 * seconds / count, 1e3 * on_loop / count, 1e3 * min(own) / count


class Waiting(sgl.MockBackend):
    """Answers nobody before all are there."""

    def __init__(self, expected: int) -> None:
        super().__init__(lambda call: "yes")
        self.expected, self.all_here = expected, asyncio.Event()
        self.threads = self.memory = 0

    async def generate(self, call: Call) -> Completion:
        self.in_flight += 1
        if self.in_flight == self.expected:
            self.threads, self.memory = threading.active_count(), resident()
            self.all_here.set()
        await self.all_here.wait()
        return Completion(("yes",))


def resident() -> int:
    """Bytes of memory that the process has now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE


def forks(count: int) -> dict[str, float]:
    """`count` forks of one state, each with a call under way at the same moment."""
    backend = Waiting(count)
    background()
    gc.collect()
    threads, memory = threading.active_count(), resident()
    began, cpu = time.perf_counter(), time.process_time()

    @sgl.function
    def program(s: sgl.ProgramState) -> None:
        s += sgl.user("Say yes.")
        group = s.fork(count)
        for fork in group:
            fork += sgl.assistant(sgl.gen("answer", max_tokens=8))
        group.join()

    state = program.run(backend=backend)
    if state["answer"] != ["yes"] * count:
        raise SystemExit("a fork was lost")
    return {
        "threads before": threads,
        "threads with all waiting": backend.threads,
        "KiB per fork": (backend.memory - memory) / 1024 / count,
        "wall s": time.perf_counter() - began,
        "CPU ms per fork": 1e3 * (time.process_time() - cpu) / count,
    }


def flat(count: int) -> list[tuple[int, float]]:
    """(programs done, MiB) after each tenth of `count` programs."""
    backend = sgl.MockBackend(lambda call: "yes")
    found, step = [], max(1, count // 10)
    states = one_call.run_batch(items(count), backend=backend, num_threads=AT_ONCE, generator_style=True)
    for done, _ in enumerate(states, 1):
        if done % 1000 == 0:
            backend.calls.clear()  # the mock keeps them for tests
        if done % step == 0:
            found.append((done, resident() / 2**20))
    return found


def report(options: argparse.Namespace) -> Iterator[str]:
    """The tables, line by line."""
    count = options.programs
    yield "# The language alone"
    yield ""
    yield (
        f"{conditions()}. `python "
        f"benchmarks/language.py`: {count} programs, {AT_ONCE} at once, least of {options.rounds} rounds. "
        f"Milliseconds of CPU per program. The target for five calls is {TARGET_MS} in all, a fifth of the "
        f"{PEER_MS} that sglang 0.5.23's frontend was measured to take for them, which did not run here."
    )
    yield ""
    yield "| way | in all | functions, on threads | the loop | of which the mock |"
    yield "|---|---|---|---|---|"
    for way in WAYS:
        whole, loop, own = per_program(way, count, options.rounds)
        yield f"| {way} | {whole:.3f} | {whole - loop:.3f} | {loop:.3f} | {own:.3f} |"
    yield ""
    yield f"{options.forks} forks of one state, all waiting for their answers at the same moment:"
    yield ""
    told = forks(options.forks)
    yield "| " + " | ".join(told) + " |"
    yield "|---" * len(told) + "|"
    yield "| " + " | ".join(f"{value:.4g}" for value in told.values()) + " |"
    yield ""
    yield f"{options.flat} programs of one call through run_batch(generator_style=True), resident memory:"
    yield ""
    yield "| programs | MiB |"
    yield "|---|---|"
    for done, size in flat(options.flat):
        yield f"| {done} | {size:.1f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--programs", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--forks", type=int, default=10_000)
    parser.add_argument("--flat", type=int, default=100_000, help="programs of the memory test")
    parser.add_argument("--quick", action="store_true", help="a few of everything")
    parser.add_argument("--write", action="store_true", help="keep the tables under results/")
    parser.add_argument("--profile", choices=WAYS, help="cProfile one way instead: the language's loop")
    options = parser.parse_args()
    if options.profile:
        profile(options.profile, options.programs)
        return
    if options.quick:
        options.programs, options.rounds, options.forks, options.flat = 64, 1, 200, 200
    lines = []
    for line in report(options):
        print(line, flush=True)
        lines.append(line)
    if options.write:
        keep("language", "\n".join(lines), folder=HERE / "results")


def profile(way: str, count: int) -> None:
    """Where the time goes, on the loop's thread and on all others."""
    looked, others = cProfile.Profile(), cProfile.Profile()
    background().run(_switch(looked.enable))
    run = WAYS[way][1]
    if way.startswith("arun"):
        others.runcall(run, mock(), count, AT_ONCE)
    else:
        run(mock(), count, AT_ONCE)
    background().run(_switch(looked.disable))
    looked.print_stats("tottime")
    if way.startswith("arun"):
        others.print_stats("tottime")


async def _switch(what: Callable[[], object]) -> None:
    what()


if __name__ == "__main__":
    main()
