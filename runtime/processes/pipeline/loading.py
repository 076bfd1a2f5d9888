"""Loads the model's runner, in this process or in another one. Torch is imported only if it is used here."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass

from runtime.config.encoder import EncoderSpec
from runtime.config.engine import EngineConfig
from runtime.config.model import ModelSpec
from runtime.disagg.transfer.memory import KVMemory
from runtime.plan import Runner, TextRunner
from runtime.processes.checkpoint.model import Model
from runtime.processes.pipeline.runner_process import RunnerProcess
from runtime.processes.pipeline.verbs import Profiler
from runtime.protocol.errors import BadRequest, RuntimeFault

SMALL = 10_000_000
"""A model with at most so many numbers in its matrices computes in the scheduler's process: its step takes
one or two milliseconds, and sending it to another process a tenth of one."""
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Loaded:
    """A runner, ready. beside: whether it computes outside this process, or on a GPU. on_death: registers a
    callback, called from another thread when the runner is lost. kv_memory: its KV pool, for transfers; None
    if this process cannot reach it."""

    runner: Runner | TextRunner
    beside: bool = False
    profiler: Profiler | None = None
    on_death: Callable[[Callable[[RuntimeFault], None]], None] = lambda act: None
    kv_memory: KVMemory | None = None


def load_runner(config: EngineConfig, model: Model) -> Loaded:
    """Raises ModelLoadError and BadRequest; EngineDead when its process ends meanwhile."""
    match model.spec:
        case EncoderSpec() as spec:
            pooling = config.pooling_of(model.path, spec)
            from runtime.engine.embed import TorchTextRunner

            reader = TorchTextRunner.load(model.path, spec, config.runner(), pooling)
            return Loaded(reader, profiler=_profiler(config))
        case ModelSpec() as spec if needs_process(config, spec):
            process = RunnerProcess(
                model.path,
                spec,
                config.runner(),
                load_timeout_s=config.load_timeout_s,
                profile_folder=config.profile_folder,
            )
            return Loaded(process, True, process, process.on_death, process.kv_memory)
        case ModelSpec() as spec:
            from runtime.engine.drafting import DraftingRunner
            from runtime.engine.runner import TorchRunner

            settings = config.runner()
            kind = TorchRunner if settings.draft_model is None else DraftingRunner
            small = is_small(spec)
            if config.runner_process is None and small:
                log.info("the model is small and computes in this process; runner_process gives it its own")
            # Handing a step to a thread takes as long as a small step.
            runner = kind.load(model.path, spec, settings, beside=not small)
            return Loaded(runner, runner.device != "cpu", _profiler(config), kv_memory=runner.kv_memory)


def _profiler(config: EngineConfig) -> Profiler:
    from runtime.engine.profiler import TorchProfiler

    return TorchProfiler(config.profile_folder)


def is_small(spec: ModelSpec) -> bool:
    return sum(spec.matrix_sizes) <= SMALL


def needs_process(config: EngineConfig, spec: ModelSpec) -> bool:
    """Whether a decoder computes in another process. Raises BadRequest if options ask for it in vain."""
    if sys.platform != "linux":
        for option, needs in (("runner_process", config.runner_process), ("tp_size", config.tp_size > 1)):
            if needs:
                raise BadRequest("this system is not Linux", where=option, hint="leave it out")
        return False
    if config.tp_size > 1:
        return True
    if config.runner_process is not None:
        return config.runner_process
    return bool(sys.executable) and len(os.sched_getaffinity(0)) >= 2 and not is_small(spec)
