"""The scheduler's process: loads the model, or starts its process, then serves its mailbox until it is
closed."""

from __future__ import annotations

import gc
from pathlib import Path

from runtime.processes.checkpoint.model import load_model
from runtime.processes.pipeline.assemble import assemble
from runtime.processes.pipeline.loading import load_runner
from runtime.processes.supervise.channel import DETOKENIZER, SCHEDULER, ChildSpec, Stop, mailbox_of
from runtime.processes.supervise.lifecycle import Lifecycle

YOUNG = 20_000
"""Threshold of the garbage collector's youngest generation. A step of hundreds of requests allocates some
thousand objects that are freed by the next one; with Python's default of 700 they are collected again and
again."""


def run(spec: ChildSpec, lifecycle: Lifecycle) -> None:
    """Raises the errors of loading and of SchedulerProcess.run."""
    folder = Path(spec.folder)
    inbox = mailbox_of(folder, SCHEDULER).inbox()
    outbox = mailbox_of(folder, DETOKENIZER).outbox()
    try:
        model = load_model(spec.engine, turns=False)
        process, slots = assemble(spec.engine, model, lambda: load_runner(spec.engine, model), inbox, outbox)
        lifecycle.stalled_s = lambda: process.stalled_s

        def close(_: Stop) -> None:
            if lifecycle.orphaned:
                process.closed_because = "the server's supervisor died"
            inbox.close()

        lifecycle.on_stop(close)
        gc.set_threshold(YOUNG)
        lifecycle.ready({"slots": slots})
        process.run()
    finally:
        inbox.close()
        outbox.close()
