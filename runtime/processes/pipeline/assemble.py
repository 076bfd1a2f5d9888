"""Assembles the scheduler's side of the pipeline: runner, grammars, scheduler.

The same for a thread of this process and for a process of its own: it knows neither what is behind the
mailboxes nor where the runner computes.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import cast

from runtime.config.encoder import EncoderSpec
from runtime.config.engine import EngineConfig
from runtime.config.model import ModelSpec
from runtime.config.pooling import Pooling
from runtime.disagg.assemble import open_peers, stage_of
from runtime.grammar.manager import GrammarManager
from runtime.grammar.reasoner import Reasoning, ReasoningEnd
from runtime.grammar.table import GRAMMAR_BACKENDS
from runtime.ipc.mailbox import Inbox, Outbox
from runtime.plan import Runner, TextRunner
from runtime.processes.checkpoint.model import Model, model_reasoning
from runtime.processes.pipeline.loading import Loaded
from runtime.processes.pipeline.scheduler_process import SchedulerProcess
from runtime.processes.pipeline.vectors import Vectors
from runtime.protocol.errors import BadRequest
from runtime.scheduler.embedding_scheduler import EmbeddingScheduler, TextLimits
from runtime.scheduler.requests.adapters import AdapterRegistry
from runtime.scheduler.requests.images import ImageRegistry
from runtime.scheduler.scheduler import Scheduler


def assemble(
    config: EngineConfig, model: Model, load: Callable[[], Loaded], inbox: Inbox, outbox: Outbox
) -> tuple[SchedulerProcess, int]:
    """The process and the KV pool's slots (encoders: tokens of a step). Raises the errors of `load`."""
    pooling = config.pooling_of(model.path, model.spec)
    loaded = load()
    try:
        match model.spec:
            case EncoderSpec() as spec:
                process, slots = _encoder(config, spec, pooling, loaded, inbox, outbox)
            case ModelSpec() as spec:
                process, slots = _decoder(config, model, spec, pooling, loaded, inbox, outbox)
        loaded.on_death(process.give_up)
    except BaseException:
        loaded.runner.close()
        raise
    return process, slots


def _encoder(
    config: EngineConfig, spec: EncoderSpec, pooling: Pooling, loaded: Loaded, inbox: Inbox, outbox: Outbox
) -> tuple[SchedulerProcess, int]:
    if config.disaggregation_mode != "null":
        raise BadRequest(
            "an encoder reads texts and generates nothing", where="disaggregation_mode", hint="leave it out"
        )
    limits = TextLimits(
        vocab_size=spec.vocab_size,
        positions=spec.max_position_embeddings,
        kinds=spec.token_types,
        width=spec.width,
        scores=spec.labels > 0,
    )
    scheduler = EmbeddingScheduler(config.scheduler(spec), limits)
    vectors = Vectors(pooling, scores=limits.scores, width=limits.width)
    runner = cast(TextRunner, loaded.runner)
    process = SchedulerProcess(
        scheduler, runner, None, inbox, outbox, profiler=loaded.profiler, vectors=vectors
    )
    return process, max(config.context(spec), config.max_prefill_tokens)


def _decoder(
    config: EngineConfig,
    model: Model,
    spec: ModelSpec,
    pooling: Pooling,
    loaded: Loaded,
    inbox: Inbox,
    outbox: Outbox,
) -> tuple[SchedulerProcess, int]:
    runner = cast(Runner, loaded.runner)
    # Not every backend has all of them.
    known = GRAMMAR_BACKENDS.load(config.grammar_backend).OPTIONS
    options = {
        "whitespace": config.grammar_whitespace,
        "schema_format": config.grammar_schema_format,
        "grammar_cache_dir": config.grammar_cache_dir,
    }
    grammar = GrammarManager(
        model.tokenizer.vocabulary,
        backend=config.grammar_backend,
        workers=config.grammar_workers,
        options={name: value for name, value in options.items() if name in known},
        compile_timeout_s=config.grammar_timeout_s,
        cache_size=config.grammar_cache_size,
        cache_bytes=config.grammar_cache_mb << 20,
    )
    marks, end = model_reasoning(config, model), None
    if marks is not None and marks.close_ids:
        end = ReasoningEnd(ids=(marks.close_ids,), inside=marks.inside_ids)
    elif marks is not None:
        end = ReasoningEnd(texts=(marks.close,), inside=marks.inside_ids)
    vectors = Vectors(pooling, width=spec.hidden_size)
    with ExitStack() as on_failure:
        peers = open_peers(config, loaded.kv_memory, 2 * config.max_running_requests)
        if peers is not None:
            on_failure.callback(peers.close)
        scheduler = Scheduler(
            config.scheduler(spec, beside=loaded.beside),
            slots=runner.slots,
            vocabulary=model.tokenizer.vocabulary,
            encode=model.tokenizer.encode_plain,
            grammar=grammar,
            verify_params=runner.verify,
            reasoning=None if end is None else Reasoning(model.tokenizer.vocabulary, end),
            stage=stage_of(config, peers),
            adapters=_adapters(config, runner),
            images=None
            if spec.vision is None
            else ImageRegistry(runner, kept_tokens=config.image_cache_tokens),
        )
        process = SchedulerProcess(
            scheduler, runner, grammar, inbox, outbox, profiler=loaded.profiler, vectors=vectors, peers=peers,
            path=None if config.load_format == "dummy" else str(model.path),
        )  # fmt: skip
        on_failure.pop_all()
    return process, runner.slots


def _adapters(config: EngineConfig, store: Runner) -> AdapterRegistry | None:
    if not config.takes_adapters:
        return None
    return AdapterRegistry(
        store, config.runner().adapters, per_batch=config.max_loras_per_batch, at_most=config.max_loaded_loras
    )
