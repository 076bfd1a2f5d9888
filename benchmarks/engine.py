"""Engine against transformers, the same workloads in turn in one process: `python benchmarks/engine.py`.

Prints rates and ratios and writes them, dated, to benchmarks/results/. Times are wall and CPU seconds of this
process; quote the ratios, single figures depend on the machine and its neighbours.
"""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import statistics
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

import torch  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402
from tqdm import tqdm  # noqa: E402

from benchmarks.peers.ours import Ours  # noqa: E402
from benchmarks.peers.transformers_peer import TransformersPeer  # noqa: E402
from benchmarks.workloads import Workload, make_model, workloads  # noqa: E402


def timed(peer: Ours | TransformersPeer, work: Workload) -> tuple[float, float, list[list[int]]]:
    """(wall seconds, CPU seconds, output ids) of one cold run."""
    peer.forget()
    wall, cpu = time.perf_counter(), time.process_time()
    out = peer.run(work.prompts, work.new_tokens)
    return time.perf_counter() - wall, time.process_time() - cpu, out


def measure(
    peers: list[Ours | TransformersPeer], works: list[Workload], rounds: int
) -> list[dict[str, object]]:
    """One row per workload: median rates of each peer and the agreement of their outputs."""
    rows = []
    for work in works:
        figures: dict[str, list[tuple[float, float]]] = {peer.name: [] for peer in peers}
        outputs: dict[str, list[list[int]]] = {}
        short = Workload("warm-up", [work.prompts[0][:32]], 4)
        for peer in peers:
            timed(peer, short)
        for _ in tqdm(range(rounds), desc=work.name, leave=False):
            for peer in peers:
                wall, cpu, outputs[peer.name] = timed(peer, work)
                figures[peer.name].append((wall, cpu))
        first, second = (outputs[peer.name] for peer in peers)
        same = sum(a == b for a, b in zip(first, second, strict=True))
        row: dict[str, object] = {
            "workload": work.name,
            "tokens": work.tokens,
            "same": f"{same}/{len(first)}",
        }
        for peer in peers:
            row[f"{peer.name} wall"] = statistics.median(w for w, _ in figures[peer.name])
            row[f"{peer.name} cpu"] = statistics.median(c for _, c in figures[peer.name])
        pairs = zip(figures[peers[1].name], figures[peers[0].name], strict=True)
        ratios = [(theirs[0] / ours[0], theirs[1] / ours[1]) for theirs, ours in pairs]
        row["ratio wall"] = statistics.median(r for r, _ in ratios)
        row["ratio cpu"] = statistics.median(r for _, r in ratios)
        rows.append(row)
    return rows


def report(rows: list[dict[str, object]], ours: str, theirs: str, rounds: int) -> str:
    """Markdown, and a table on the terminal."""
    head = ["workload", f"{ours} tok/s", f"{theirs} tok/s", "wall ratio", "CPU ratio", "same output"]
    table = Table(*head)
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for row in rows:
        tokens = float(str(row["tokens"]))
        cells = [
            str(row["workload"]),
            f"{tokens / float(str(row[f'{ours} wall'])):.1f}",
            f"{tokens / float(str(row[f'{theirs} wall'])):.1f}",
            f"{float(str(row['ratio wall'])):.2f}x",
            f"{float(str(row['ratio cpu'])):.2f}x",
            str(row["same"]),
        ]
        table.add_row(*cells)
        lines.append("| " + " | ".join(cells) + " |")
    Console(width=140).print(table)
    where = (
        f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}, "
    )
    where += f"{torch.get_num_threads()} thread(s), float32, median of {rounds} rounds, peers in turn"
    return f"{where}\n\n" + "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1, help="torch threads; 1 gives the steadiest figures")
    parser.add_argument("--only", default="", help="run only workloads whose name contains this")
    parser.add_argument("--write", action="store_true", help="write benchmarks/results/<date>-engine.md")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    folder = make_model(HERE / ".cache" / "llama-40m")
    peers: list[Ours | TransformersPeer] = [Ours(folder), TransformersPeer(folder)]
    try:
        rows = measure(peers, [w for w in workloads() if options.only in w.name], options.rounds)
    finally:
        for peer in peers:
            peer.close()
    text = report(rows, peers[0].name, peers[1].name, options.rounds)
    if options.write:
        today = datetime.date.today().isoformat()
        target = HERE / "results" / f"{today}-engine.md"
        target.write_text(f"# Engine against transformers, {today}\n\n{text}", encoding="utf-8")
        print(f"written to {target.relative_to(HERE.parent)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
