"""Engine against transformers, the same workloads in turn in one process: `python benchmarks/engine.py`.

Prints rates and ratios (theirs / ours: above 1, ours is faster). CPU seconds are those of all processes, the
engine's runner included; quote the CPU ratios, single figures and walls depend on the machine and its
neighbours.
"""

from __future__ import annotations

import argparse
import sys
from functools import partial
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

import torch  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402
from tqdm import tqdm  # noqa: E402

from benchmarks.measuring import conditions, in_turn, keep, median, ratio  # noqa: E402
from benchmarks.peers.ours import Ours  # noqa: E402
from benchmarks.peers.transformers_peer import TransformersPeer  # noqa: E402
from benchmarks.workloads import Workload, make_model, workloads  # noqa: E402


def measure(peers: list[Ours | TransformersPeer], works: list[Workload], rounds: int) -> list[dict[str, Any]]:
    """One row per workload: medians of each peer and the agreement of their outputs. Every run is cold."""
    rows = []

    def cold(peer: Ours | TransformersPeer, work: Workload) -> list[list[int]]:
        peer.forget()
        return peer.run(work.prompts, work.new_tokens)

    for work in tqdm(works):
        short = Workload("warm-up", [work.prompts[0][:32]], 4)
        for peer in peers:
            cold(peer, short)
        took, gave = in_turn({peer.name: partial(cold, peer, work) for peer in peers}, rounds)
        first, second = (gave[peer.name][-1] for peer in peers)
        same = sum(a == b for a, b in zip(first, second, strict=True))
        row: dict[str, Any] = {
            "workload": work.name,
            "tokens": work.tokens,
            "same": f"{same}/{len(first)}",
            "ratio": ratio(took[peers[1].name], took[peers[0].name]),
        }
        rows.append(row | {peer.name: median(took[peer.name]) for peer in peers})
    return rows


def report(rows: list[dict[str, Any]], ours: str, theirs: str, threads: int, rounds: int) -> str:
    """Markdown, and a table on the terminal."""
    head = ["workload"]
    head += [f"{name} tok/{unit}" for unit in ("s", "CPU-s") for name in (ours, theirs)]
    head += ["wall ratio", "CPU ratio", "same output"]
    table = Table(*head)
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for row in rows:
        cells = [row["workload"]]
        cells += [f"{row['tokens'] / row[name][which]:.1f}" for which in (0, 1) for name in (ours, theirs)]
        cells += [f"{row['ratio'].wall:.2f}x", f"{row['ratio'].cpu:.2f}x", row["same"]]
        table.add_row(*cells)
        lines.append("| " + " | ".join(cells) + " |")
    Console(width=160).print(table)
    where = conditions(
        f"torch {torch.__version__}, {threads} thread(s), float32, median of {rounds} rounds, peers in turn"
    )
    return f"{where}.\n\n" + "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1, help="torch threads; 1 gives the steadiest figures")
    parser.add_argument("--only", default="", help="run only workloads whose name contains this")
    parser.add_argument("--append", action="store_true", help="write behind what the day's file has")
    parser.add_argument("--write", action="store_true", help="write benchmarks/results/<date>-engine.md")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    folder = make_model(HERE / ".cache" / "llama-40m")
    peers: list[Ours | TransformersPeer] = [Ours(folder, options.threads), TransformersPeer(folder)]
    try:
        rows = measure(peers, [w for w in workloads() if options.only in w.name], options.rounds)
    finally:
        for peer in peers:
            peer.close()
    text = report(rows, peers[0].name, peers[1].name, options.threads, options.rounds)
    if options.write:
        target = keep("engine", f"# Engine against transformers\n\n{text}", append=options.append)
        print(f"written to {target.relative_to(HERE.parent)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
