"""EngineConfig: every option of an Engine in one frozen value, each with its help text.

It gives each owner a small config of its own, and does not know how they use it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Self

from runtime.config.checkpoints import AnySpec, draft_spec, find_checkpoint, read_spec
from runtime.config.encoder import EncoderSpec
from runtime.config.model import ModelSpec
from runtime.config.options import Config, config_from, option
from runtime.config.parts.quantization import check_requested
from runtime.config.parts.vision import ImageOptions
from runtime.config.pooling import DECODER_DEFAULT, ENCODER_DEFAULT, MODES, Pooling, read_pooling
from runtime.config.runner import RunnerConfig, RunnerOptions, read_adapters
from runtime.config.scheduler import SchedulerConfig, SchedulerOptions
from runtime.config.shards import check_ranks
from runtime.config.speculation import SpeculationOptions
from runtime.protocol.errors import BadRequest

PASS_SHARE = 0.8
"""The share of step_timeout_s that a forward pass may take. So the waiting thread can report the hanging pass
before the limit of the whole step is reached."""


@dataclass(frozen=True, kw_only=True)
class EngineConfig(ImageOptions, SpeculationOptions, SchedulerOptions, RunnerOptions, Config):
    """Options of an engine.

    An option is defined once: in SchedulerOptions, RunnerOptions, SpeculationOptions or ImageOptions, or
    below. Command line, environment, configuration files and documentation follow automatically.
    """

    label = "Engine"

    model: str = option("pocket")
    """directory of a checkpoint, a .gguf file, or the name of a bundled model"""
    runner_process: bool | None = option(None)
    """run the model in a separate process, so that compiling and applying constraints does not slow it down.
    By default yes if there are at least two CPU cores and the model has more than about 10 million weights"""
    lora_paths: tuple[str, ...] = option(())
    """LoRA adapters to load at startup, each as NAME=DIRECTORY in the format of peft. Requests select one
    with lora_path, or after the model's name: MODEL:NAME"""
    enable_lora: bool | None = option(None)
    """allow adapters to be loaded at run time. By default yes if --lora-paths is set"""
    max_loaded_loras: int | None = option(None)
    """maximum number of adapters in host memory; loading another one unloads the least recently used. By
    default no limit"""
    context_length: int | None = option(None, at_least=1)
    """maximum number of tokens of a request, prompt and output together. By default the model's own limit.
    For LongRoPE models (Phi 3 128k) the default is the shorter of their two limits; a larger value selects
    the long frequencies"""
    allow_auto_truncate: bool = option(False)
    """shorten prompts and outputs that are too long, instead of rejecting the request"""
    schedule_policy: str = option("lpm")
    """order in which waiting requests start: lpm (longest cached prefix first), fcfs (first come, first
    served), lof (longest output first), dfs-weight (grouped by shared prefix), priority (the priority of the
    request) or random"""
    overlap: bool | None = option(None)
    """let the scheduler work while the model computes; on a GPU also queue the next decoding step before it
    is scheduled. By default yes if the model runs on a GPU or in a separate process; otherwise both share one
    interpreter and nothing is gained"""
    grammar_backend: str = option("auto")
    """grammar backend that enforces constraints; auto: the best one for each kind of constraint"""
    grammar_whitespace: str = option("single", choices=("compact", "single", "flexible"))
    """whitespace between the tokens of constrained JSON: compact (none), single (at most one space) or
    flexible (line breaks and indentation, bounded)"""
    grammar_schema_format: str = option("assertion", choices=("assertion", "annotation"))
    """effect of `format` in a JSON schema: assertion (strings must have the format) or annotation (only
    reported in meta_info)"""
    grammar_cache_dir: str = option("")
    """folder that caches vocabulary data for constraints, which is slow to compute, for later starts. By
    default not cached"""
    grammar_workers: int = option(1, at_least=1)
    """number of threads that compile constraints"""
    grammar_timeout_s: float = option(30.0, positive=True)
    """seconds that compiling a constraint may take, waiting included"""
    grammar_cache_size: int = option(256, at_least=1)
    """maximum number of compiled constraints in the cache"""
    grammar_cache_mb: int = option(512, at_least=1)
    """maximum estimated size of the compiled constraints in the cache, in MiB"""
    reasoning_end: str = option("auto")
    """text that ends the reasoning of a model that thinks before it answers: auto (according to the tokenizer
    or chat template), none, or the text itself"""
    reasoning_parser: str | None = option(None)
    """separate reasoning from content in every response: auto (as the model marks it), or the name of a model
    family, such as qwen3 or deepseek-r1. By default only if a request asks for it"""
    tool_call_parser: str = option("auto")
    """format in which the model writes tool calls: auto (detected from the chat template), none, or the name
    of a format, such as qwen25"""
    chat_template: str | dict[str, str] | None = option(None)  # noqa: RUF009 - a field()
    """name of a built-in chat template, path of a .jinja or .json file, or Jinja texts by name. By default
    the checkpoint's own"""
    hf_chat_template_name: str | None = option(None)
    """name of the chat template to use, if the checkpoint has several"""
    completion_template: str | None = option(None)
    """name of a fill-in-the-middle template, for prompts with a suffix. By default chosen by the tokenizer's
    tokens"""
    allow_control_tokens: bool = option(False)
    """parse control tokens in the text of messages as such, unless the request says otherwise"""
    pooling: str | None = option(None, choices=MODES)
    """token outputs that become the embedding of a text: cls, mean, last or max. By default as the checkpoint
    says, else cls for encoders and last for decoders"""
    normalize_embeddings: bool | None = option(None)
    """normalise embeddings to length 1. By default as the checkpoint's modules.json says, else yes"""
    max_top_logprobs: int = option(32, at_least=0)
    """maximum value of top_logprobs_num in a request; each one costs memory per token"""
    max_token_ids_logprob: int = option(64, at_least=0)
    """maximum number of ids in token_ids_logprob of a request"""
    disaggregation_mode: str = option("null", choices=("null", "prefill", "decode"))
    """compute prompts and outputs in two engines: prefill (this one computes prompts and transfers their KV),
    decode (this one receives the KV and generates) or null (this one does both). Send requests through
    `python -m runtime router`; a request without bootstrap_room is computed by this engine alone"""
    disaggregation_transfer_backend: str = option("tcp")
    """how KV is transferred from prefill to decode: local (same machine, through memory), tcp (sockets,
    between machines), nixl (RDMA if available; needs the extra `nixl`) or fake (transfers nothing, for
    tests)"""
    disaggregation_bootstrap_port: int = option(8998, within=(0, 65535))
    """port of the prefill engine's bootstrap server; 0 picks a free one"""
    disaggregation_host: str = option("127.0.0.1")
    """address of this machine at which the other engine can reach this one"""
    disaggregation_allowed_hosts: tuple[str, ...] = option(())
    """hosts that a request may name as its prefill engine, separated by commas; * allows all. This machine's
    own addresses are always allowed. A decode engine connects to no other hosts"""
    disaggregation_key: str | None = option(None, secret=True)
    """shared secret of both engines of a pair. Prefer SGLANG_DSL_DISAGGREGATION_KEY over the command line. By
    default only engines on the same machine can pair"""
    disaggregation_timeout_s: float = option(300.0, positive=True)
    """seconds that each step of a transfer may take: finding the other engine, waiting for it,
    transferring"""
    disaggregation_heartbeat_s: float = option(5.0, positive=True)
    """seconds between checks of the other engine; after two missed ones it counts as dead"""
    num_reserved_decode_tokens: int = option(512, at_least=0)
    """KV slots that a decode engine reserves per running request before it admits another"""
    profile_folder: str | None = option(None)
    """folder below which profiles are written. By default a new folder in the system's temporary directory"""
    load_timeout_s: float = option(1800.0, positive=True)
    """seconds that loading the model may take"""
    step_timeout_s: float = option(600.0, positive=True)
    """seconds without progress after which the engine counts as stuck and fails; a forward pass may take four
    fifths of it"""
    close_timeout_s: float = option(30.0, positive=True)
    """seconds that close() waits for the engine's threads"""

    def verify(self) -> Self:
        """Return self, or raise BadRequest naming an option that does not fit the others."""
        if not self.reasoning_end:
            raise BadRequest('is empty; "none" says that the model does not reason', where="reasoning_end")
        if self.lora_paths and self.enable_lora is False:
            raise BadRequest("needs enable_lora", where="lora_paths")
        if self.max_loaded_loras is not None and self.max_loaded_loras < max(1, len(self.lora_paths)):
            raise BadRequest(
                f"must be at least 1, and at least the {len(self.lora_paths)} adapters of lora_paths, got "
                f"{self.max_loaded_loras}",
                where="max_loaded_loras",
            )
        self.verify_images()
        self.runner().verify()
        if self.tp_size > 1 and self.runner_process is False:
            raise BadRequest(
                "must not be False if several processes share the model",
                where="runner_process",
                hint="leave it out, or tp_size",
            )
        if not self.disaggregation_host:
            raise BadRequest("must not be empty", where="disaggregation_host")
        if self.disaggregation_key is not None and not self.disaggregation_key.strip():
            raise BadRequest("is empty", where="disaggregation_key")
        self.speculation()
        return self

    def locate(self) -> tuple[Path, AnySpec]:
        """The directory of the checkpoint, and its shape; fast. Raises ModelLoadError, and BadRequest for
        options that do not fit the model."""
        path = find_checkpoint(self.model)
        spec = read_spec(path)
        if isinstance(spec, EncoderSpec):
            self.context(spec)
            _check_encoder(self)
            return path, spec
        spec = spec.for_context(self.context_length)
        self.context(spec)
        check_requested(spec.quantization, self.quantization)
        if self.tp_size > 1:
            check_ranks(spec, self.tp_size)
        if self.speculative_draft_model_path is not None:
            _check_draft_model(spec, self, self.speculative_draft_model_path)
        return path, spec

    @property
    def takes_adapters(self) -> bool:
        return bool(self.lora_paths) if self.enable_lora is None else self.enable_lora

    def context(self, spec: AnySpec) -> int:
        """The most tokens of one request. Raises BadRequest if more than the model's maximum is requested."""
        limit = spec.max_position_embeddings
        if self.context_length is not None and self.context_length > limit:
            raise BadRequest(
                f"is {self.context_length}, but the model supports at most {limit} tokens",
                where="context_length",
            )
        return limit if self.context_length is None else self.context_length

    def scheduler(self, spec: AnySpec, *, beside: bool = False) -> SchedulerConfig:
        """`beside`: whether the model computes on a GPU or in a separate process."""
        return config_from(
            SchedulerConfig,
            self,
            policy=self.schedule_policy,
            context_length=self.context(spec),
            overlap=beside if self.overlap is None else self.overlap,
            speculation=self.speculation(),
        )

    def pooling_of(self, path: Path, spec: AnySpec) -> Pooling:
        """How texts become vectors. Raises ModelLoadError if the checkpoint needs a pooling that is not
        supported."""
        default = ENCODER_DEFAULT if isinstance(spec, EncoderSpec) else DECODER_DEFAULT
        return read_pooling(path, default, mode=self.pooling, normalize=self.normalize_embeddings)

    def runner(self) -> RunnerConfig:
        return config_from(
            RunnerConfig,
            self,
            enable_lora=self.takes_adapters,
            adapters=read_adapters(self.lora_paths),
            shared_kv=self.disaggregation_mode != "null",
            draft_model=self.speculative_draft_model_path,
            draft_tokens=self.speculation().drafts,
            lookahead=self.overlap is not False,
            step_timeout_s=PASS_SHARE * self.step_timeout_s,
        )


def _check_encoder(config: EngineConfig) -> None:
    """Raise BadRequest for an option that encoders do not support."""
    hint = "leave it out for this model"
    plain = {"quantization": None, "kv_cache_dtype": "auto", "load_format": "auto", "tp_size": 1}
    for name, default in plain.items():
        if getattr(config, name) != default:
            raise BadRequest("not supported for encoders", where=name, hint=hint)
    if config.takes_adapters:
        raise BadRequest("encoders do not support adapters", where="enable_lora", hint=hint)
    if config.speculative_algorithm is not None:
        raise BadRequest("encoders do not generate text", where="speculative_algorithm", hint=hint)


def _check_draft_model(spec: ModelSpec, config: EngineConfig, draft: str) -> None:
    """Raises BadRequest, or ModelLoadError for the draft model, if speculation is not possible."""
    parted = "tp_size" if config.tp_size > 1 else "disaggregation_mode"
    if config.tp_size > 1 or config.disaggregation_mode != "null":
        raise BadRequest(
            f"a draft model needs one process with the whole KV pool, so it cannot be combined with {parted}",
            where="speculative_algorithm",
            hint="--speculative-algorithm NGRAM",
        )
    draft_spec(spec, draft)
