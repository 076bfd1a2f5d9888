"""Builds the pipeline in this process: front door, scheduler thread, detokeniser thread, mailboxes between
them.

    caller -> TokenizerManager -> [mailbox] -> SchedulerProcess -> [mailbox] -> DetokenizerManager -> caller

The model is loaded by the thread that will run it; what goes wrong there is raised here, as itself.
"""

from __future__ import annotations

import atexit
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

from runtime.config.checkpoints import find_checkpoint
from runtime.config.engine import EngineConfig
from runtime.config.model import ModelSpec
from runtime.engine.runner import TorchRunner
from runtime.formats.chat.derive import Derivation, derive_chat_template
from runtime.formats.chat.files import load_chat_template, named_templates
from runtime.formats.chat.jinja import JinjaChatTemplate, find_chat_template
from runtime.formats.chat.render import TextTemplate
from runtime.formats.chat.template import ChatTemplate
from runtime.grammar.manager import GrammarManager
from runtime.ipc.mailbox import MailboxClosed, MemoryMailbox
from runtime.plan import Runner
from runtime.processes.detokenizer import DetokenizerManager
from runtime.processes.frontdoor import TokenizerManager
from runtime.processes.prepare import Limits, Preparer
from runtime.processes.scheduler import SchedulerProcess
from runtime.processes.tokenizer import Tokenizer
from runtime.protocol.errors import EngineDead, RuntimeFault
from runtime.protocol.io_struct import BatchTokenIDOutput
from runtime.scheduler.scheduler import Scheduler

WATCH_S = 1.0
"""How often the detokeniser's thread looks whether the scheduler still moves."""


@dataclass(frozen=True, slots=True)
class Model:
    """What the front of the pipeline knows of a checkpoint."""

    path: Path
    spec: ModelSpec
    tokenizer: Tokenizer
    template: ChatTemplate | TextTemplate | None

    @property
    def force_reasoning(self) -> bool:
        """Whether every reply begins inside the model's reasoning, which the prompt opens."""
        return isinstance(self.template, JinjaChatTemplate) and self.template.force_reasoning

    @property
    def derivation(self) -> Derivation | None:
        """The checkpoint's Jinja template as prefixes and suffixes; None where there is no Jinja template."""
        if not isinstance(self.template, JinjaChatTemplate):
            return None
        return derive_chat_template(self.template, name=self.path.name)


class Pipeline:
    """A running pipeline. `close` ends it; nothing else does, save a defect."""

    def __init__(
        self, config: EngineConfig, model: Model, door: TokenizerManager, stop: Callable[[], None]
    ) -> None:
        self.config, self.model, self.door = config, model, door
        self._stop = stop

    def close(self) -> None:
        self._stop()


def load_model(config: EngineConfig) -> Model:
    """Everything of the checkpoint but its weights. Raises ModelLoadError."""
    path = find_checkpoint(config.model)
    spec = ModelSpec.from_dir(path)
    config.context(spec)
    tokenizer = Tokenizer.load(path, spec.vocab_size, spec.eos_ids)
    template = choose_template(config.chat_template, path, tokenizer, config.hf_chat_template_name)
    return Model(path, spec, tokenizer, template)


def choose_template(
    asked: str | dict[str, str] | None, path: Path, tokenizer: Tokenizer, name: str | None = None
) -> ChatTemplate | TextTemplate | None:
    """The template that was asked for by name, file or text, else the checkpoint's own, else None. `name`:
    which of several named ones."""
    if asked is not None:
        # A text that cannot be parsed harms turns only: plain prompts need no template.
        return load_chat_template(asked, variables=tokenizer.tokens, hf_chat_template_name=name, check=False)
    sources = find_chat_template(path, tokenizer.config)
    if sources and name is not None:
        return named_templates(sources, tokenizer.tokens, name)
    return JinjaChatTemplate(sources, tokenizer.tokens) if sources else None


def launch(config: EngineConfig) -> Pipeline:
    """Load the model and start the threads; returns when requests can be taken.

    Raises ModelLoadError and BadRequest from loading as themselves; EngineDead when loading takes longer than
    load_timeout_s.
    """
    model = load_model(config)
    return start(config, model, lambda: TorchRunner.load(model.path, model.spec, config.runner()))


def start(config: EngineConfig, model: Model, load_runner: Callable[[], Runner]) -> Pipeline:
    """The pipeline around any runner. `load_runner` is called in the scheduler's thread."""
    requests, news = MemoryMailbox(), MemoryMailbox()
    worker = _Worker(config, model, load_runner, requests, news)
    worker.start()
    slots = worker.wait_ready(config.load_timeout_s)
    limits = Limits(model.spec.vocab_size, config.context(model.spec), slots)
    door = TokenizerManager(Preparer(model.tokenizer, model.template, limits), requests)
    reader = _Reader(
        DetokenizerManager(model.tokenizer.text_table), door, worker, news, config.step_timeout_s
    )
    reader.start()

    def stop() -> None:
        atexit.unregister(stop)
        worker.stop()
        deadline = time.monotonic() + config.close_timeout_s
        for thread in (worker.thread, reader.thread):
            thread.join(max(0.0, deadline - time.monotonic()))
        # Whoever still waits (a thread that hangs gave no answer) hears it now.
        door.fail_all(EngineDead("the engine was closed"))

    # An interpreter that ends while a thread is inside the tensor library ends with a crash.
    atexit.register(stop)
    return Pipeline(config, model, door, stop)


class _Worker:
    """The scheduler's thread: loads the model, then serves."""

    def __init__(
        self,
        config: EngineConfig,
        model: Model,
        load_runner: Callable[[], Runner],
        inbox: MemoryMailbox,
        outbox: MemoryMailbox,
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
        return 0.0 if self._process is None else self._process.stalled_s

    def _run(self) -> None:
        try:
            process, slots = self._build()
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
            # The reader finds its mailbox closed, asks for the cause and tells everybody who waits.
            self.cause = error
            if not isinstance(error, Exception):
                raise
        finally:
            self._outbox.close()

    def _build(self) -> tuple[SchedulerProcess, int]:
        config, model = self._config, self._model
        runner = self._load_runner()
        try:
            grammar = GrammarManager(
                model.tokenizer.vocabulary, backend=config.grammar_backend, workers=config.grammar_workers
            )
            scheduler = Scheduler(
                config.scheduler(model.spec),
                slots=runner.slots,
                vocabulary=model.tokenizer.vocabulary,
                encode=model.tokenizer.encode_plain,
                grammar=grammar,
            )
        except BaseException:
            runner.close()
            raise
        return SchedulerProcess(scheduler, runner, grammar, self._inbox, self._outbox), runner.slots


class _Reader:
    """The detokeniser's thread: ids in, text to the front door. Also notices when the scheduler stops or
    hangs.
    """

    def __init__(
        self,
        manager: DetokenizerManager,
        door: TokenizerManager,
        worker: _Worker,
        inbox: MemoryMailbox,
        step_timeout_s: float,
    ) -> None:
        self._manager, self._door, self._worker, self._inbox = manager, door, worker, inbox
        self._step_timeout_s = step_timeout_s
        self.thread = threading.Thread(target=self._run, name="sglang-dsl-detokenizer", daemon=True)

    def start(self) -> None:
        self.thread.start()

    def _run(self) -> None:
        try:
            while True:
                items = self._inbox.receive(WATCH_S)
                batches: list[BatchTokenIDOutput] = []
                for item in items:
                    if isinstance(item, BatchTokenIDOutput):
                        batches.append(item)
                    else:
                        self._door.handle(item)
                made = self._manager.handle(batches)
                if made is not None:
                    self._door.handle(made)
                if not items and self._worker.stalled_s > self._step_timeout_s:
                    raise EngineDead(
                        f"one step took longer than {self._step_timeout_s:g} s", hint="step_timeout_s"
                    )
        except MailboxClosed:
            cause = self._worker.cause
            self._door.fail_all(EngineDead("the engine was closed") if cause is None else _dead_of(cause))
        except Exception as error:  # noqa: BLE001 - told to all who wait; without this thread nothing goes on
            self._door.fail_all(_dead_of(error))
        finally:
            self._worker.stop()


def _dead_of(cause: BaseException) -> RuntimeFault:
    if isinstance(cause, EngineDead):
        return cause
    return EngineDead(f"the engine stopped: {type(cause).__name__}: {cause}", hint="start a new one")
