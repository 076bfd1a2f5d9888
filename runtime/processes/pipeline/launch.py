"""The pipeline in this process: frontend, scheduler thread, detokeniser thread, mailboxes between them.

    caller -> TokenizerManager -> [mailbox] -> SchedulerProcess -> [mailbox] -> DetokenizerManager -> caller

The model is loaded by the thread that will run it; its errors are raised here.
"""

from __future__ import annotations

import atexit
import gc
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future

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
"""How often the detokeniser's thread checks that the scheduler is not stuck."""


class Pipeline:
    """A running pipeline. It ends with `close`, or when its manager is garbage."""

    def __init__(
        self, config: EngineConfig, model: Model, manager: TokenizerManager, stop: Callable[[], None]
    ) -> None:
        self.config, self.model, self.manager = config, model, manager
        self._stop = stop

    def close(self) -> None:
        self._stop()
        # For callers that a stuck thread has not answered.
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
    worker.thread.start()
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
    # The threads hold no manager, so that an unreachable engine ends and its memory is freed. Finalizers run
    # in code that may hold any lock, so this one takes none and waits for nothing.
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

    def wait_ready(self, timeout: float) -> int:
        """The KV pool's slots, once the model is loaded. Raises the errors of loading."""
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
            # The reader finds its mailbox closed and fails all requests with this.
            self.cause = error
            if not isinstance(error, Exception):
                raise
        finally:
            self._process = None
            self._outbox.close()


class _Reader:
    """The detokeniser's thread. It notices when the scheduler stops or hangs."""

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
            self._read()
        except MailboxClosed:
            cause = self._worker.cause
            self._fail(EngineDead("the engine was closed") if cause is None else _dead_of(cause))
        except Exception as error:  # noqa: BLE001 - it is the answer to all requests
            self._fail(_dead_of(error))
        finally:
            self._worker.stop()
        self._worker.thread.join()
        if self._manager() is None:
            # The scheduler's objects refer to one another, and the collector may not run for long.
            gc.collect()
        atexit.unregister(self._at_exit)

    def _read(self) -> None:
        """Until the manager is garbage."""
        while True:
            items = self._inbox.receive(WATCH_S)
            if (manager := self._manager()) is None:
                return
            batches: list[BatchTokenIDOutput] = []
            for item in items:
                if isinstance(item, BatchTokenIDOutput):
                    batches.append(item)
                else:
                    manager.handle(item)
            if (texts := self._detokenizer.handle(batches)) is not None:
                manager.handle(texts)
            if not items and self._worker.stalled_s > self._step_timeout_s:
                raise EngineDead(
                    f"one step took longer than {self._step_timeout_s:g} s", hint="step_timeout_s"
                )
            del texts, manager  # not kept alive while it waits

    def _fail(self, fault: RuntimeFault) -> None:
        manager = self._manager()
        if manager is not None:
            manager.fail_all(fault)


def _dead_of(cause: BaseException) -> RuntimeFault:
    if isinstance(cause, EngineDead):
        return cause
    return EngineDead(f"the engine stopped: {type(cause).__name__}: {cause}", hint="start a new one")
