"""Builds the pipeline in this process: frontend, scheduler thread, detokeniser thread, mailboxes between
them.

    caller -> TokenizerManager -> [mailbox] -> SchedulerProcess -> [mailbox] -> DetokenizerManager -> caller

The model is loaded by the thread that will run it; what goes wrong there is raised here, as itself.
"""

from __future__ import annotations

import atexit
import gc
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from runtime.config.engine import EngineConfig
from runtime.ipc.address import Address
from runtime.ipc.mailbox import Inbox, MailboxClosed, Outbox
from runtime.processes.checkpoint.model import Model, load_model
from runtime.processes.frontend.build import build_tokenizer_manager
from runtime.processes.frontend.tokenizer_manager import TokenizerManager
from runtime.processes.pipeline.assemble import assemble
from runtime.processes.pipeline.before_start import check_names
from runtime.processes.pipeline.detokenizer import DetokenizerManager
from runtime.processes.pipeline.loading import Loaded, load_runner
from runtime.processes.pipeline.scheduler_process import SchedulerProcess
from runtime.protocol.errors import EngineDead, RuntimeFault
from runtime.protocol.io_struct import BatchTokenIDOutput

WATCH_S = 1.0
"""How often the detokeniser's thread looks whether the scheduler still moves."""


class Pipeline:
    """A running pipeline. It ends with `close`, or when nobody holds its manager any more."""

    def __init__(
        self, config: EngineConfig, model: Model, manager: TokenizerManager, stop: Callable[[], None]
    ) -> None:
        self.config, self.model, self.manager = config, model, manager
        self._stop = stop

    def close(self) -> None:
        self._stop()
        # Whoever still waits (a thread that hangs gave no answer) gets this.
        self.manager.fail_all(EngineDead("the engine was closed"))


def launch(config: EngineConfig) -> Pipeline:
    """Load the model and start the threads; returns when requests can be taken.

    Raises ModelLoadError and BadRequest from loading as themselves; EngineDead when loading takes longer than
    load_timeout_s.
    """
    check_names(config)
    model = load_model(config)
    return start(config, model, lambda: load_runner(config, model))


def start(config: EngineConfig, model: Model, load_runner: Callable[[], Loaded]) -> Pipeline:
    """The pipeline around any runner. `load_runner` is called in the scheduler's thread."""
    requests, outputs = Address.memory(), Address.memory()
    worker = _Worker(config, model, load_runner, requests.inbox(), outputs.outbox())
    worker.start()
    slots = worker.wait_ready(config.load_timeout_s)
    manager = build_tokenizer_manager(config, model, slots, requests.outbox())
    detokenizer = DetokenizerManager(model.tokenizer.text_table)
    reader = _Reader(detokenizer, weakref.ref(manager), worker, outputs.inbox(), config.step_timeout_s)

    def stop() -> None:
        atexit.unregister(stop)
        worker.stop()
        deadline = time.monotonic() + config.close_timeout_s
        for thread in (worker.thread, reader.thread):
            thread.join(max(0.0, deadline - time.monotonic()))

    # An interpreter that ends while a thread is inside the tensor library ends with a crash.
    atexit.register(stop)
    reader.start(stop)
    # The threads hold no manager: an engine that nobody can reach ends, and its memory is given back. It may
    # be found out in code that holds any lock, so this takes none and waits for nothing.
    weakref.finalize(manager, worker.stop).atexit = False
    return Pipeline(config, model, manager, stop)


class _Worker:
    """The scheduler's thread: loads the model, then serves."""

    def __init__(
        self,
        config: EngineConfig,
        model: Model,
        load_runner: Callable[[], Loaded],
        inbox: Inbox,
        outbox: Outbox,
    ) -> None:
        self._config, self._model, self._load_runner = config, model, load_runner
        self._inbox, self._outbox = inbox, outbox
        self._ready: Future[int] = Future()
        self._process: SchedulerProcess | None = None
        self.cause: BaseException | None = None
        self.thread = threading.Thread(target=self._run, name="sglang-dsl-scheduler", daemon=True)

    def start(self) -> None:
        self.thread.start()

    def wait_ready(self, timeout: float) -> int:
        """The KV pool's slots, once the model is loaded. Raises what loading raised."""
        try:
            return self._ready.result(timeout)
        except TimeoutError:
            if self._ready.done():
                raise
            self.stop()
            raise EngineDead(
                f"the model was not loaded within {timeout:g} s",
                where=str(self._model.path),
                hint="load_timeout_s",
            ) from None

    def stop(self) -> None:
        self._inbox.close()

    @property
    def stalled_s(self) -> float:
        process = self._process
        return 0.0 if process is None else process.stalled_s

    def _run(self) -> None:
        try:
            process, slots = assemble(self._config, self._model, self._load_runner, self._inbox, self._outbox)
        except BaseException as error:
            self._ready.set_exception(error)
            if not isinstance(error, Exception):
                raise
            return
        self._process = process
        self._ready.set_result(slots)
        try:
            process.run()
        except BaseException as error:
            # The reader finds its mailbox closed, asks for the cause and fails all requests with it.
            self.cause = error
            if not isinstance(error, Exception):
                raise
        finally:
            self._process = None
            self._outbox.close()


class _Reader:
    """The detokeniser's thread: ids in, text to the frontend. Also notices when the scheduler stops or
    hangs.
    """

    def __init__(
        self,
        detokenizer: DetokenizerManager,
        manager: weakref.ref[TokenizerManager],
        worker: _Worker,
        inbox: Inbox,
        step_timeout_s: float,
    ) -> None:
        self._detokenizer, self._manager, self._worker, self._inbox = detokenizer, manager, worker, inbox
        self._step_timeout_s = step_timeout_s
        self.thread = threading.Thread(target=self._run, name="sglang-dsl-detokenizer", daemon=True)

    def start(self, at_exit: Callable[[], None]) -> None:
        """`at_exit`: registered with atexit until both threads have ended."""
        self._at_exit = at_exit
        self.thread.start()

    def _run(self) -> None:
        try:
            while self._handle(self._inbox.receive(WATCH_S)):
                pass
        except MailboxClosed:
            cause = self._worker.cause
            self._fail(EngineDead("the engine was closed") if cause is None else _dead_of(cause))
        except Exception as error:  # noqa: BLE001 - sent to all who wait; without this thread nothing goes on
            self._fail(_dead_of(error))
        finally:
            self._worker.stop()
        self._worker.thread.join()
        if self._manager() is None:
            # What the scheduler's thread left refers to one another, and the collector may not come for long.
            gc.collect()
        atexit.unregister(self._at_exit)

    def _handle(self, items: list[Any]) -> bool:
        """Whether somebody waits for more."""
        manager = self._manager()
        if manager is None:
            return False
        batches: list[BatchTokenIDOutput] = []
        for item in items:
            if isinstance(item, BatchTokenIDOutput):
                batches.append(item)
            else:
                manager.handle(item)
        made = self._detokenizer.handle(batches)
        if made is not None:
            manager.handle(made)
        if not items and self._worker.stalled_s > self._step_timeout_s:
            raise EngineDead(f"one step took longer than {self._step_timeout_s:g} s", hint="step_timeout_s")
        return True

    def _fail(self, fault: RuntimeFault) -> None:
        manager = self._manager()
        if manager is not None:
            manager.fail_all(fault)


def _dead_of(cause: BaseException) -> RuntimeFault:
    if isinstance(cause, EngineDead):
        return cause
    return EngineDead(f"the engine stopped: {type(cause).__name__}: {cause}", hint="start a new one")
