"""How fast each KV transfer is, between two processes, against a copy of as many bytes in memory and against
a bare socket between the same two processes.

    python -m benchmarks.serving.kv_transfer [--transfers local tcp nixl] [--mib 256] [--rounds 5] [--write]

The second process has the pool that is read (and sends through the bare socket); this one receives. Each
round measures all ways once, in turn; told is the median of the rounds, and of the ratios of each round. A
bare socket hands over bytes that are there already, and checks nothing.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.measuring import conditions, keep
from runtime.disagg.transfer.bootstrap import BootstrapServer
from runtime.disagg.transfer.kv_manager import KV_TRANSFERS, KVPoll, TransferOptions
from runtime.disagg.transfer.memory import ArrayMemory, KVLayout, Order, make_memory
from runtime.disagg.transfer.metadata import Metadata
from runtime.plan import Run

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 300.0
RUN = 64
"""Tokens that lie together: pages of 64."""


def layout(order: Order) -> KVLayout:
    """Of a model of some billions of parameters: 32 layers, 8 heads of 128 bfloat16 numbers."""
    return KVLayout(32, 8, 256, "bfloat16", 0, 8, order)


def pool(order: Order, tokens: int) -> ArrayMemory:
    return make_memory(2 * (tokens + RUN), layout(order), file=os.memfd_create("kv"))


def runs(tokens: int, first: int) -> list[Run]:
    """Every other page, so that they do not lie in one piece."""
    return [Run(first + 2 * at, min(RUN, tokens - at)) for at in range(0, tokens, RUN)]


# -- the other process ---------------------------------------------------------------------------------------


def send(settings: dict[str, Any]) -> None:
    """Serve rooms and the bare socket until stdin ends."""
    memory = pool(settings["order"], settings["tokens"])
    memory.view[...] = 1
    bare = np.ones(settings["bytes"], dtype=np.uint8).data
    bootstrap = BootstrapServer()
    listener = socket.create_server(("127.0.0.1", 0))

    def pour() -> None:
        while True:
            end, _ = listener.accept()
            with end:
                end.sendall(bare)

    threading.Thread(target=pour, daemon=True).start()
    manager = KV_TRANSFERS.load(settings["transfer"])(memory, TransferOptions())
    manager.listen(bootstrap.address)
    told = {"bootstrap": bootstrap.address, "port": listener.getsockname()[1]}
    print(json.dumps(told), flush=True)
    for line in sys.stdin:
        sender = manager.sender(int(line))
        while sender.poll() is KVPoll.Bootstrapping:
            time.sleep(0.0002)
        sender.init(settings["tokens"])
        sender.send(runs(settings["tokens"], 0), Metadata(output_ids=(1,)))
        while not sender.poll().ended:
            time.sleep(0.0002)
    os._exit(0)


# -- this process --------------------------------------------------------------------------------------------


class Sender:
    """The other process."""

    def __init__(self, **settings: Any) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "benchmarks.serving.kv_transfer", "--send", json.dumps(settings)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        assert self.process.stdout is not None
        self.told = json.loads(self.process.stdout.readline())

    def room(self, room: int) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{room}\n")
        self.process.stdin.flush()

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()


def timed(act: Callable[[], None]) -> float:
    begin = time.perf_counter()
    act()
    return time.perf_counter() - begin


def measure(name: str, order: Order, size: int, rounds: int) -> list[dict[str, float]]:
    """Seconds per way and round."""
    tokens = max(1, size // layout(order).token_bytes(8))
    size = tokens * layout(order).token_bytes(8)
    memory = pool(order, tokens)
    memory.view[...] = 0
    one, other = np.ones(size, dtype=np.uint8), np.zeros(size, dtype=np.uint8)
    buffer = np.zeros(size, dtype=np.uint8).data
    manager = KV_TRANSFERS.load(name)(memory, TransferOptions())
    sender = Sender(transfer=name, order=order, tokens=tokens, bytes=size)

    def bare() -> None:
        with socket.create_connection(("127.0.0.1", sender.told["port"])) as end:
            left = buffer
            while left:
                left = left[end.recv_into(left) :]

    def transfer(room: int) -> float:
        sender.room(room)
        receiver = manager.receiver(sender.told["bootstrap"], room)
        wait(receiver, KVPoll.WaitingForInput)
        begin = time.perf_counter()
        receiver.init(runs(tokens, RUN), 0)
        wait(receiver, KVPoll.Success)
        return time.perf_counter() - begin

    found = []
    try:
        for number in range(rounds + 1):
            took = {
                "memory": timed(lambda: np.copyto(other, one)),
                "socket": timed(bare),
                "transfer": transfer(number + 1),
                "bytes": float(size),
            }
            if number:  # the first meets memory that was never touched
                found.append(took)
    finally:
        sender.close()
        manager.close()
        assert memory.file is not None
        os.close(memory.file)
    return found


def wait(receiver: Any, poll: KVPoll) -> None:
    until = time.monotonic() + LIMIT_S
    while receiver.poll() is not poll:
        if receiver.poll() is KVPoll.Failed or time.monotonic() > until:
            raise SystemExit(f"the transfer failed: {receiver.failure()}")
        time.sleep(0.0002)


def report(found: dict[tuple[str, Order], list[dict[str, float]]]) -> str:
    lines = [
        "| transfer | pools | GB/s | memory copy GB/s | of it | bare socket GB/s | of it |",
        "|---|---|---|---|---|---|---|",
    ]
    for (name, order), rounds in found.items():

        def speed(way: str, rounds: list[dict[str, float]] = rounds) -> float:
            return statistics.median(one["bytes"] / one[way] for one in rounds) / 1e9

        def share(way: str, rounds: list[dict[str, float]] = rounds) -> float:
            return statistics.median(one[way] / one["transfer"] for one in rounds)

        lines.append(
            f"| {name} | {order}-major | {speed('transfer'):.2f} | {speed('memory'):.2f}"
            f" | {share('memory'):.2f} | {speed('socket'):.2f} | {share('socket'):.2f} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--transfers", nargs="+", default=["local", "tcp", "nixl"])
    parser.add_argument("--mib", type=int, default=256, help="of KV in one transfer")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--write", action="store_true", help="keep the report under results/")
    parser.add_argument("--send", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.send:
        send(json.loads(given.send))
        return
    found: dict[tuple[str, Order], list[dict[str, float]]] = {}
    orders: tuple[Order, Order] = ("head", "token")
    for name in given.transfers:
        if name == "nixl" and importlib.util.find_spec("nixl") is None:
            print("nixl is not installed: pip install 'sglang-dsl[nixl]'")
            continue
        for order in orders:
            found[name, order] = measure(name, order, given.mib << 20, given.rounds)
    done = f"{given.mib} MiB of KV in pages of {RUN} tokens, {given.rounds} rounds"
    text = f"# KV transfers between two processes\n\n{conditions(done)}\n\n{report(found)}\n"
    print(text)
    if given.write:
        keep("kv-transfer", text)


if __name__ == "__main__":
    main()
