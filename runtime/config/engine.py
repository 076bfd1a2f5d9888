"""EngineConfig: every option of an Engine in one frozen value, each with its help text.

It hands every owner a small config of its own and knows nothing of how they use it.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import msgspec

from runtime.config.model import ModelSpec
from runtime.config.runner import RunnerConfig
from runtime.config.scheduler import SchedulerConfig
from runtime.protocol.errors import BadRequest


def _option(default: Any, help: str) -> Any:
    return field(default=default, metadata={"help": help})


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """`EngineConfig.of(...)` checks names and types; `help_texts()` lists what each option is for."""

    model: str = _option("pocket", "a checkpoint's directory, or the name of a bundled one")
    dtype: str = _option("auto", "numbers to compute in: auto, float32 or bfloat16")
    device: str = _option("auto", "auto (CUDA where there is one), cpu, cuda or cuda:<n>")
    max_total_tokens: int | None = _option(None, "slots of the KV pool; None: from the memory that is free")
    memory_fraction: float = _option(0.25, "share of the free memory that the KV pool may take")
    threads: int | None = _option(None, "CPU threads of one tensor operation; None: torch's own choice")
    pack_weights: str = _option(
        "auto", "keep matrices in a second layout for small batches on CPU: auto, always or never"
    )
    attention: str = _option("auto", "name of an attention implementation")
    context_length: int | None = _option(
        None, "prompt + new tokens of a request, at most; None: the model's own"
    )
    page_size: int = _option(1, "KV slots per page; prefixes are shared in whole pages")
    max_running_requests: int = _option(256, "sequences computed in one step, at most")
    max_waiting_requests: int = _option(4096, "requests waiting, at most; more are answered with QueueFull")
    chunked_prefill_size: int = _option(2048, "prompt tokens computed in one step, at most")
    max_prefill_tokens: int = _option(16384, "prompt tokens admitted and not yet computed, at most")
    schedule_policy: str = _option("lpm", "order of waiting requests: the name of a schedule policy")
    radix_cache: bool = _option(True, "keep the KV of prefixes for later requests")
    jump_forward: bool = _option(True, "append text that a constraint forces without decoding it")
    grammar_backend: str = _option("auto", "name of a grammar backend")
    grammar_workers: int = _option(1, "threads that compile constraints")
    chat_template: str | dict[str, str] | None = _option(  # noqa: RUF009 - a field()
        None,
        "a built-in chat template's name, a .jinja or .json file's path, or Jinja texts by name; None: "
        "the checkpoint's own",
    )
    hf_chat_template_name: str | None = _option(None, "which of several named chat templates is used")
    seed: int | None = _option(None, "keys the draws of requests without a seed; None: fresh ones every time")
    load_timeout_s: float = _option(1800.0, "seconds the model may take to load")
    step_timeout_s: float = _option(600.0, "seconds without progress after which the engine is given up")
    close_timeout_s: float = _option(30.0, "seconds close() waits for the engine's threads")

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> EngineConfig:
        """The config with these options. Raises BadRequest: an unknown name (lists the known ones), a value
        of the wrong type or out of range."""
        known = cls.help_texts()
        for name in options:
            if name not in known:
                near = difflib.get_close_matches(name, known, n=1)
                raise BadRequest(
                    f"unknown option {name!r}; known: {', '.join(known)}",
                    where="Engine",
                    hint=f"did you mean {near[0]!r}?" if near else None,
                )
        try:
            made = msgspec.convert(dict(options), cls)
        except msgspec.ValidationError as error:
            raise BadRequest(str(error).replace("`$.", "`"), where="Engine") from error
        return made.verify()

    @classmethod
    def help_texts(cls) -> dict[str, str]:
        """Option -> what it is for."""
        return {option.name: str(option.metadata["help"]) for option in fields(cls)}

    def verify(self) -> EngineConfig:
        """Return self, or raise BadRequest naming the option and its rule. Owners check what is theirs."""
        if self.grammar_workers < 1:
            raise BadRequest(f"must be at least 1, got {self.grammar_workers}", where="grammar_workers")
        for name in ("load_timeout_s", "step_timeout_s", "close_timeout_s"):
            if not 0 < getattr(self, name) < float("inf"):
                raise BadRequest(f"must be a positive number, got {getattr(self, name)}", where=name)
        self.runner().verify()
        self._scheduler(self.context_length)
        return self

    def context(self, spec: ModelSpec) -> int:
        """Tokens of one request, at most. Raises BadRequest when more is asked than the model can."""
        limit = spec.max_position_embeddings
        if self.context_length is not None and self.context_length > limit:
            raise BadRequest(
                f"is {self.context_length}, the model was made for {limit} tokens", where="context_length"
            )
        return limit if self.context_length is None else self.context_length

    def scheduler(self, spec: ModelSpec) -> SchedulerConfig:
        return self._scheduler(self.context(spec))

    def runner(self) -> RunnerConfig:
        return RunnerConfig(
            dtype=self.dtype,
            device=self.device,
            max_total_tokens=self.max_total_tokens,
            memory_fraction=self.memory_fraction,
            attention=self.attention,
            pack_weights=self.pack_weights,
            threads=self.threads,
            step_timeout_s=self.step_timeout_s,
            seed=self.seed,
        )

    def _scheduler(self, context_length: int | None) -> SchedulerConfig:
        return SchedulerConfig(
            page_size=self.page_size,
            max_running_requests=self.max_running_requests,
            max_waiting_requests=self.max_waiting_requests,
            chunked_prefill_size=self.chunked_prefill_size,
            max_prefill_tokens=self.max_prefill_tokens,
            policy=self.schedule_policy,
            radix_cache=self.radix_cache,
            jump_forward=self.jump_forward,
            context_length=context_length,
        )
