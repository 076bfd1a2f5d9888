"""This project's engine and other engines on the same workloads, in one run: `python -m benchmarks.engine`.

Each engine has its adapter in benchmarks/peers/, its process, and usually its environment:
`--environments <folder>` names the folder that holds `<name>/bin/python` for each (benchmarks/README.md says
how they are made). One that is not there is skipped by name.

Figures are CPU seconds of all processes of an engine, the least of the rounds, in which the engines take
turns; every round starts with an empty prefix cache. The limit is what the machine's measured memory
bandwidth and torch's plain matrix products allow; an engine with faster products comes above 100 %.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks import limits
from benchmarks.measuring import HERE, Reading, conditions, keep
from benchmarks.peers.child import PEERS, Child, Missing
from benchmarks.workloads import SHAPES, Workload, make_model, workloads

PRECISIONS = ("float32", "bfloat16", "int8")
OURS = PEERS[0]


class Results:
    """What was measured: seconds by workload and engine, the outputs, and why others are missing."""

    def __init__(self) -> None:
        self.took: dict[str, dict[str, list[Reading]]] = {}
        self.gave: dict[str, dict[str, list[list[int]]]] = {}
        self.versions: dict[str, str] = {}
        self.missing: list[str] = []

    def least(self, work: str, engine: str) -> float | None:
        """CPU seconds."""
        readings = self.took.get(work, {}).get(engine)
        return min(reading.cpu for reading in readings) if readings else None

    def wall(self, work: str, engine: str) -> float:
        return min(reading.wall for reading in self.took[work][engine])

    def best_peer(self, work: str, named: str) -> tuple[str, float] | None:
        """The peer with the least seconds among those whose name ends so."""
        found = [(engine, self.least(work, engine)) for engine in self.took.get(work, {})]
        others = [
            (name, cpu) for name, cpu in found if not name.startswith(OURS) and name.endswith(named) and cpu
        ]
        return min(others, key=lambda one: one[1], default=None)


def run(child: Child, work: Workload) -> list[list[int]]:
    if not work.lead:
        return child.run(work.prompts, work.new_tokens)
    first = child.run(work.prompts[:1], work.new_tokens)
    return first + child.run(work.prompts[1:], work.new_tokens)


def measure(
    children: dict[str, Child], works: list[Workload], rounds: int, longest: float, results: Results
) -> None:
    """Every engine once per round and workload, first and last changing places. One that took more than
    `longest` CPU seconds has had its rounds; one that fails is left out from there on; and one that shares no
    prefixes is not asked to compute the same prefix for each of many requests."""
    for work in works:
        took = results.took.setdefault(work.name, {})
        for number in range(rounds):
            for name in list(reversed(children) if number % 2 else children):
                if name in took and max(reading.cpu for reading in took[name]) > longest:
                    continue
                if work.shared and not children[name].shares:
                    continue
                print(f"{work.name}, round {number + 1}: {name}", end=" ", file=sys.stderr, flush=True)
                child = children[name]
                try:
                    child.ask(do="forget")
                    before = child.reading()
                    gave = run(child, work)
                    after = child.reading()
                except Missing as error:
                    results.missing.append(f"{name}, {work.name}: {error}")
                    print(error, file=sys.stderr)
                    children.pop(name).close()
                    continue
                spent = Reading(after.wall - before.wall, after.cpu - before.cpu)
                print(f"{spent.cpu:.3f}", file=sys.stderr)
                took.setdefault(name, []).append(spent)
                results.gave.setdefault(work.name, {})[name] = gave


def started(
    names: list[str],
    model: Path,
    precisions: list[str],
    threads: int,
    environments: Path | None,
    results: Results,
) -> dict[str, Child]:
    children: dict[str, Child] = {}
    for precision in precisions:
        for name in names:
            try:
                child = Child(name, model, precision, threads, environments)
                child.run([list(range(300, 332))], 4)
            except Missing as error:
                results.missing.append(f"{name} {precision}: {error}")
                print(f"without {name} {precision}: {error}", file=sys.stderr)
                continue
            children[f"{name} {precision}"] = child
            results.versions[name] = child.version
    return children


def table(
    results: Results, works: list[Workload], precision: str, machine: limits.Limits, size: str
) -> list[list[str]]:
    """Head and rows of one precision: CPU seconds, ours by the best peer's, and the limit's share in ours."""
    engines = [n for n in dict.fromkeys(e for w in results.took.values() for e in w) if n.endswith(precision)]
    rows = [
        [
            "workload",
            *(name.removesuffix(f" {precision}") for name in engines),
            "best peer / ours",
            "limit",
            "limit / ours",
            "same output",
        ]
    ]
    for work in works:
        ours, mine = results.least(work.name, f"{OURS} {precision}"), results.gave.get(work.name, {})
        best, limit = results.best_peer(work.name, precision), machine.seconds(work, precision, SHAPES[size])
        cells = [results.least(work.name, name) for name in engines]
        own = mine.get(f"{OURS} {precision}")
        same = [
            n.split()[0] for n in engines if own and n in mine and mine[n] == own and not n.startswith(OURS)
        ]
        rows.append([
            work.name,
            *("-" if cell is None else f"{cell:.3f}" for cell in cells),
            f"{best[1] / ours:.2f}x" if best and ours else "-",
            f"{limit:.3f}",
            f"{limit / ours:.0%}" if ours else "-",
            ", ".join(same) or "-",
        ])  # fmt: skip
    return rows


def walls(results: Results, works: list[Workload]) -> list[list[str]]:
    """Tokens per second on the wall's clock, for runs with more than one thread."""
    engines = list(dict.fromkeys(e for w in results.took.values() for e in w))
    rows = [["tokens/s on the wall's clock", *engines]]
    for work in works:
        took = results.took.get(work.name, {})
        rows.append(
            [
                work.name,
                *(f"{work.tokens / results.wall(work.name, e):.0f}" if e in took else "-" for e in engines),
            ]
        )
    return rows


def markdown(rows: list[list[str]]) -> str:
    return "\n".join(
        "| " + " | ".join(cells) + " |" for cells in (rows[0], ["---"] * len(rows[0]), *rows[1:])
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", choices=tuple(SHAPES), default="40m", help="of the random Llama")
    parser.add_argument("--precisions", nargs="+", choices=PRECISIONS, default=["float32"])
    parser.add_argument("--engines", nargs="+", choices=PEERS, default=list(PEERS))
    parser.add_argument(
        "--environments",
        type=Path,
        default=os.environ.get("SGLANG_DSL_PEERS"),
        help="folder of the peers' environments; else SGLANG_DSL_PEERS",
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--longest", type=float, default=20.0, help="CPU seconds after which one round is enough"
    )
    parser.add_argument(
        "--threads", type=int, default=1, help="of each engine; 1 gives the steadiest figures"
    )
    parser.add_argument("--only", nargs="*", default=(), help="names of workloads")
    parser.add_argument("--append", action="store_true", help="write behind what the day's file has")
    parser.add_argument("--write", action="store_true", help="write benchmarks/results/<date>-engine.md")
    options = parser.parse_args()
    model = make_model(HERE / ".cache" / f"llama-{options.size}", size=options.size)
    works = [work for work in workloads() if not options.only or work.name in options.only]
    environments = Path(options.environments) if options.environments else None
    results = Results()
    machine = limits.measure(options.threads)
    children = started(options.engines, model, options.precisions, options.threads, environments, results)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        measure(children, works, options.rounds, options.longest, results)
    except KeyboardInterrupt:
        results.missing.append("what was to come when the run was ended")
    finally:
        for child in children.values():
            child.close()
    parts = [
        f"{limit_line(machine)}\n\nEngines: "
        + "; ".join(f"{n} {v}" for n, v in results.versions.items())
        + "."
    ]
    for precision in options.precisions:
        rows = table(results, works, precision, machine, options.size)
        shown = Table(*rows[0])
        for row in rows[1:]:
            shown.add_row(*row)
        Console(width=200).print(shown)
        parts.append(f"CPU seconds, {precision}:\n\n{markdown(rows)}")
    parts.append(markdown(walls(results, works)))
    if results.missing:
        parts.append("Not measured:\n\n" + "\n".join(f"- {line}" for line in results.missing))
    where = conditions(
        f"random Llama of {options.size}, {options.threads} thread(s)",
        f"least of {options.rounds} rounds, engines in turn",
    )
    text = f"## Llama {options.size}, {options.threads} thread(s)\n\n{where}.\n\n" + "\n\n".join(parts) + "\n"
    print(text)
    if options.write:
        target = keep(
            "engine", text if options.append else f"# Engines side by side\n\n{text}", append=options.append
        )
        print(f"written to {target.relative_to(HERE.parent)}")
    return 0


def limit_line(machine: limits.Limits) -> str:
    rates = ", ".join(f"{name} {rate / 1e9:.0f}" for name, rate in machine.products.items())
    read = f"memory read at {machine.bandwidth / 1e9:.1f} GB/s"
    return f"Measured limits per CPU second: {read}; 10^9 operations of products: {rates}."


if __name__ == "__main__":
    sys.exit(main())
