"""A prefill engine's side of a transfer in a process of its own, for tests: a pool with known bytes, and
rooms that are sent as a line of JSON says. Loads no torch.

    python tests/process/contracts/kv_prefill_process.py   (settings: the first line of stdin)
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from typing import Any

import numpy as np

from runtime.disagg.transfer.bootstrap import BootstrapServer
from runtime.disagg.transfer.faults import Faults
from runtime.disagg.transfer.kv_manager import KV_TRANSFERS, KVPoll, TransferOptions
from runtime.disagg.transfer.memory import ArrayMemory, KVLayout, make_memory
from runtime.disagg.transfer.metadata import Metadata
from runtime.plan import Run


def known(memory: ArrayMemory) -> ArrayMemory:
    """Filled with bytes that tell slot, layer, kind, head and place."""
    slots, layers, kinds, heads, width = memory.view.shape
    first = memory.layout.first
    slot, layer, kind, head, place = np.ogrid[:slots, :layers, :kinds, first : first + heads, :width]
    memory.view[...] = (slot * 31 + layer * 7 + kind * 101 + head * 17 + place * 3 + slot // 251) % 251
    return memory


def tell(**what: Any) -> None:
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


def serve(manager: Any, order: dict[str, Any]) -> None:
    """Send one room: its chunks, each with a pause before it; tell how it ended."""
    sender = manager.sender(order["room"])
    while sender.poll() is KVPoll.Bootstrapping:
        time.sleep(0.001)
    sender.init(sum(length for chunk in order["chunks"] for _, length in chunk))
    for chunk in order["chunks"][:-1]:
        sender.send([Run(*run) for run in chunk])
        tell(sent=order["room"])
        time.sleep(order.get("pause", 0))
    if not order.get("never", False):
        sender.send([Run(*run) for run in order["chunks"][-1]], Metadata(output_ids=(order["room"],)))
    while not sender.poll().ended:
        time.sleep(0.001)
    tell(room=order["room"], poll=int(sender.poll()), failure=str(sender.failure()))


def main() -> None:
    settings = json.loads(sys.stdin.readline())
    memory = known(make_memory(settings["slots"], KVLayout(**settings["layout"]), file=os.memfd_create("kv")))
    bootstrap = BootstrapServer(port=settings.get("port", 0))
    options = TransferOptions(**settings.get("options", {}), faults=Faults.of_environment())
    manager = KV_TRANSFERS.load(settings["transfer"])(memory, options)
    manager.listen(bootstrap.address)
    tell(bootstrap=bootstrap.address, port=bootstrap.port, pid=os.getpid())
    for line in sys.stdin:
        threading.Thread(target=serve, args=(manager, json.loads(line)), daemon=True).start()
    manager.close()


if __name__ == "__main__":
    main()
