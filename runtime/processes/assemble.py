"""The scheduler's side of the pipeline put together: runner, grammars, scheduler. Torch comes in here.

The same for a thread of this process and for a process of its own; it knows mailboxes, not what is behind
them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias, cast

from runtime.config.encoder import EncoderSpec
from runtime.config.engine import EngineConfig
from runtime.config.model import ModelSpec
from runtime.config.pooling import Pooling
from runtime.engine.device import pick_device
from runtime.engine.embed import TorchTextRunner
from runtime.engine.profiler import TorchProfiler
from runtime.engine.runner import TorchRunner
from runtime.formats.reasoning import Thoughts
from runtime.grammar.manager import GrammarManager
from runtime.grammar.reasoner import Reasoning, ReasoningEnd
from runtime.grammar.table import GRAMMAR_BACKENDS
from runtime.ipc.mailbox import Inbox, Outbox
from runtime.plan import Runner, TextRunner
from runtime.processes.checkpoint import Model
from runtime.processes.scheduler import SchedulerProcess
from runtime.processes.thoughts import model_thoughts
from runtime.processes.vectors import Vectors
from runtime.scheduler.embedding import EmbeddingScheduler, TextLimits
from runtime.scheduler.scheduler import Scheduler

AnyRunner: TypeAlias = Runner | TextRunner


def load_runner(config: EngineConfig, model: Model) -> AnyRunner:
    """The model's weights, ready to run. Raises ModelLoadError and BadRequest."""
    match model.spec:
        case EncoderSpec() as spec:
            pooling = config.pooling_of(model.path, spec)
            return TorchTextRunner.load(model.path, spec, config.runner(), pooling)
        case ModelSpec() as spec:
            return TorchRunner.load(model.path, spec, config.runner())


def assemble(
    config: EngineConfig, model: Model, load: Callable[[], AnyRunner], inbox: Inbox, outbox: Outbox
) -> tuple[SchedulerProcess, int]:
    """The process, not running yet, and the KV pool's slots (for an encoder, which has no pool, the tokens of
    one step). Raises what `load` raises."""
    pooling = config.pooling_of(model.path, model.spec)
    runner = load()
    try:
        match model.spec:
            case EncoderSpec() as spec:
                return _reading(config, spec, pooling, cast(TextRunner, runner), inbox, outbox)
            case ModelSpec() as spec:
                return _generating(config, model, spec, pooling, cast(Runner, runner), inbox, outbox)
    except BaseException:
        runner.close()
        raise


def _reading(
    config: EngineConfig,
    spec: EncoderSpec,
    pooling: Pooling,
    runner: TextRunner,
    inbox: Inbox,
    outbox: Outbox,
) -> tuple[SchedulerProcess, int]:
    limits = TextLimits(
        vocab_size=spec.vocab_size,
        positions=spec.max_position_embeddings,
        kinds=spec.token_types,
        width=spec.width,
        scores=spec.labels > 0,
    )
    scheduler = EmbeddingScheduler(config.scheduler(spec), limits)
    vectors = Vectors(pooling, scores=limits.scores, width=limits.width)
    profiler = TorchProfiler(config.profile_folder)
    made = SchedulerProcess(scheduler, runner, None, inbox, outbox, profiler=profiler, vectors=vectors)
    return made, max(config.context(spec), config.max_prefill_tokens)


def _generating(
    config: EngineConfig,
    model: Model,
    spec: ModelSpec,
    pooling: Pooling,
    runner: Runner,
    inbox: Inbox,
    outbox: Outbox,
) -> tuple[SchedulerProcess, int]:
    # Some backends write JSON in one way only.
    known = GRAMMAR_BACKENDS.load(config.grammar_backend).OPTIONS
    options = {"whitespace": config.grammar_whitespace, "grammar_cache_dir": config.grammar_cache_dir}
    grammar = GrammarManager(
        model.tokenizer.vocabulary,
        backend=config.grammar_backend,
        workers=config.grammar_workers,
        options={name: value for name, value in options.items() if name in known},
        compile_timeout_s=config.grammar_timeout_s,
        cache_size=config.grammar_cache_size,
        cache_bytes=config.grammar_cache_mb << 20,
    )
    thoughts = model_thoughts(config, model)
    scheduler = Scheduler(
        config.scheduler(spec, gpu=pick_device(config.device).type != "cpu"),
        slots=runner.slots,
        vocabulary=model.tokenizer.vocabulary,
        encode=model.tokenizer.encode_plain,
        grammar=grammar,
        verify_params=runner.verify,
        reasoning=None if thoughts is None else _reasoning(model, thoughts),
    )
    vectors = Vectors(pooling, width=spec.hidden_size)
    profiler = TorchProfiler(config.profile_folder)
    made = SchedulerProcess(scheduler, runner, grammar, inbox, outbox, profiler=profiler, vectors=vectors)
    return made, runner.slots


def _reasoning(model: Model, thoughts: Thoughts) -> Reasoning:
    if thoughts.close_ids:
        end = ReasoningEnd(ids=(thoughts.close_ids,), inside=thoughts.inside_ids)
    else:
        end = ReasoningEnd(texts=(thoughts.close,), inside=thoughts.inside_ids)
    return Reasoning(model.tokenizer.vocabulary, end)
