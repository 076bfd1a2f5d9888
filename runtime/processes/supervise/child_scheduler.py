"""The scheduler's process: has the model loaded, beside it or in itself, then serves its mailbox until it is
closed."""

from __future__ import annotations

import gc
from pathlib import Path

from runtime.processes.checkpoint.model import load_model
from runtime.processes.pipeline.assemble import assemble
from runtime.processes.pipeline.loading import load_runner
from runtime.processes.supervise.channel import ChildSpec, Stop
from runtime.processes.supervise.lifecycle import Lifecycle
from runtime.processes.supervise.names import DETOKENIZER, SCHEDULER, mailbox_of

YOUNG = 20_000
"""New objects between two looks of the garbage collector. A step of hundreds of requests makes some thousands
that are gone by the next one; with Python's own 700 it looks at them again and again."""


def run(spec: ChildSpec, lifecycle: Lifecycle) -> None:
    """Raises what loading raises, and what ends the process."""
    folder = Path(spec.folder)
    inbox = mailbox_of(folder, SCHEDULER).inbox()
    outbox = mailbox_of(folder, DETOKENIZER).outbox()
    try:
        model = load_model(spec.engine, turns=False)
        process, slots = assemble(spec.engine, model, lambda: load_runner(spec.engine, model), inbox, outbox)
        lifecycle.stalled_s = lambda: process.stalled_s

        def say_why(_: Stop) -> None:
            if lifecycle.orphaned:
                process.closed_because = "the server's supervisor died"
            inbox.close()

        lifecycle.on_stop(say_why)
        gc.set_threshold(YOUNG)
        lifecycle.ready({"slots": slots})
        process.run()
    finally:
        inbox.close()
        outbox.close()
