"""EngineConfig: every option of an Engine in one frozen value, each with its help text.

It hands every owner a small config of its own and knows nothing of how they use it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runtime.config.checkpoints import find_checkpoint
from runtime.config.disaggregation import MODES as DISAGGREGATION
from runtime.config.disaggregation import DisaggregationConfig
from runtime.config.encoder import AnySpec, EncoderSpec, read_spec
from runtime.config.model import ModelSpec
from runtime.config.options import hand, help_of, option, options_of, read
from runtime.config.parts.images import ImageOptions
from runtime.config.parts.quantization import KV_DTYPES, check_wish
from runtime.config.pooling import DECODER_DEFAULT, ENCODER_DEFAULT, MODES, Pooling, read_pooling
from runtime.config.runner import LOAD_FORMATS, RunnerConfig, read_adapters
from runtime.config.scheduler import SchedulerConfig
from runtime.config.shards import check_ranks
from runtime.config.speculation import SpeculationConfig, draft_spec
from runtime.protocol.errors import BadRequest

PASS_SHARE = 0.8
"""How much of step_timeout_s a forward pass may take. Whoever waits for it can then say what hangs, before
those who watch the whole step give it up and cannot."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig(ImageOptions):
    """`EngineConfig.of(...)` checks names and types; `help_texts()` lists what each option is for.

    An option that has the name of a field of SchedulerConfig or RunnerConfig is handed to it as it is: to add
    one there is one line here. Command line, environment and configuration files follow by themselves.
    """

    model: str = option("pocket", "a checkpoint's directory, a .gguf file, or the name of a bundled model")
    dtype: str = option(
        "auto", "numbers to compute in: auto (bfloat16 on CUDA, float32 on CPU), float32 or bfloat16"
    )
    device: str = option("auto", "auto (CUDA where there is one), cpu, cuda or cuda:<n>")
    max_total_tokens: int | None = option(
        None, "tokens whose keys and values fit into the KV pool, its slots; None: by memory_fraction"
    )
    memory_fraction: float = option(
        0.25, "share of the memory left free by the weights that the KV pool may take"
    )
    threads: int | None = option(
        None, "CPU threads of one tensor operation; None: one for a small pass, all cores for others"
    )
    pack_weights: str = option(
        "auto",
        "keep a second copy of float32 matrices, laid out for the CPU: auto (where it fits comfortably; "
        "passes of one to three tokens use whichever copy is timed to be faster at load), always (all use "
        "it) or never. In bfloat16 the copy takes the matrices' place",
    )
    quantization: str | None = option(
        None,
        "what plain weights are rounded to while they are loaded: fp8 (half of bfloat16's memory) or, on the "
        "CPU, w8a8_int8 (weights and what they are multiplied with, for speed; quantised checkpoints, too); "
        "or the name of the checkpoint's own quantisation. None: as the checkpoint has them",
    )
    load_format: str = option(
        "auto",
        "where weights come from: auto (the checkpoint's safetensors files) or dummy (random numbers, for "
        "measurements where there are none: config.json and the tokenizer are enough)",
        choices=LOAD_FORMATS,
    )
    expand_weights: str = option(
        "auto",
        "make the numbers of a quantised checkpoint when it is loaded, for more memory and less time: "
        "auto (on the CPU, where they fit comfortably), always or never",
    )
    kv_cache_dtype: str = option(
        "auto",
        "numbers in which the KV pool keeps keys and values: auto (those computed in), bfloat16, fp8_e4m3 or "
        "fp8_e5m2, which take half of bfloat16's memory and round to 4 or 3 significant bits",
        choices=KV_DTYPES,
    )
    tp_size: int = option(
        1,
        "processes that share a decoder, each with a part of every matrix and of the KV pool (tensor "
        "parallelism): on the CPU, or with a GPU each",
    )
    runner_process: bool | None = option(
        None,
        "compute the model in a process of its own, so that work for constraints takes no time from it; "
        "None: where there are two CPU cores or more, and the model has more than some 10 million weights",
    )
    lora_paths: tuple[str, ...] = option(
        (),
        "LoRA adapters to load at the start: NAME=DIRECTORY of each, as peft writes it. Requests name one in "
        "lora_path, or after the model's name: MODEL:NAME",
    )
    enable_lora: bool | None = option(
        None, "let adapters be loaded while the server runs; None: where lora_paths are given"
    )
    max_loras_per_batch: int = option(
        8, "different adapters in one step, at most; each takes memory beside the weights"
    )
    max_loaded_loras: int | None = option(
        None,
        "adapters kept in memory, at most; for one more the one used longest ago is unloaded; None: no limit",
    )
    max_lora_rank: int | None = option(None, "rank of an adapter, at most; None: no limit")
    attention: str = option("auto", "an attention implementation's name; auto: the best one for the device")
    cuda_graph: bool = option(
        True, "record decoding steps as CUDA graphs, so that they cost the host one launch; on one GPU"
    )
    cuda_graph_max_bs: int = option(
        256, "sequences in a recorded step, at most; larger ones are not recorded"
    )
    context_length: int | None = option(
        None,
        "prompt + new tokens of a request, at most; None: the model's own, which for LongRoPE (Phi 3 of "
        "128k) is the shorter of its two: more takes its long frequencies",
    )
    allow_auto_truncate: bool = option(
        False, "shorten prompts and outputs that do not fit, where otherwise the request is refused"
    )
    page_size: int = option(1, "KV slots per page; prefixes are shared in whole pages")
    max_running_requests: int = option(256, "sequences computed in one step, at most")
    max_waiting_requests: int = option(4096, "requests waiting, at most; more are refused (HTTP 503)")
    chunked_prefill_size: int = option(2048, "prompt tokens computed in one step, at most")
    max_prefill_tokens: int = option(16384, "prompt tokens admitted and not yet computed, at most")
    schedule_policy: str = option(
        "lpm",
        "who of those waiting starts first: lpm (most of the prompt in the cache), fcfs (first come), lof "
        "(longest output), dfs-weight (prefix by prefix), priority (the requests' own) or random",
    )
    mixed_prefill: bool = option(
        True,
        "compute prompts and next tokens in one step; otherwise a step with prompts computes only these",
    )
    preemption_threshold: int | None = option(
        10,
        "with the policy `priority`: how much higher a waiting request's priority must be to take a running "
        "one's place; None: never",
    )
    max_preemptions: int = option(3, "how often one request can lose its place like that")
    queue_timeout_s: float | None = option(
        None, "seconds a request may wait before it is first let in; None: no limit"
    )
    running_timeout_s: float | None = option(None, "seconds a request may take from then on; None: no limit")
    overlap: bool | None = option(
        None,
        "let the scheduler work while the model computes; None: where the model runs on a GPU or in a "
        "process of its own (elsewhere they share the interpreter, and it gains nothing)",
    )
    max_sessions: int = option(1024, "sessions open at once, at most")
    max_session_tokens: int = option(16 << 20, "tokens of the turns of all sessions together, at most")
    eviction_policy: str = option(
        "lru",
        "which cached prefix goes first when room is needed: lru (least recently used), lfu (least often), "
        "slru (lru, but what was used again stays longer), fifo (oldest), filo, mru or priority (the "
        "requests' own)",
    )
    conservativeness: float = option(
        1.0,
        "how much of their max_new_tokens running requests are expected to need, as a multiple of the usual "
        "estimate; above 1 lets in fewer at once",
    )
    radix_cache: bool = option(True, "keep the KV of prefixes for later requests")
    jump_forward: bool = option(True, "append text that a constraint forces without decoding it")
    speculative_algorithm: str | None = option(
        None,
        "guess tokens and verify several in one pass, which changes no output: NGRAM (what followed the same "
        "tokens earlier in the request's text), STANDALONE (what a smaller model says) or None",
    )
    speculative_draft_model_path: str | None = option(
        None, "with STANDALONE: the smaller model's checkpoint; it must have the same vocabulary"
    )
    speculative_num_draft_tokens: int | None = option(
        None,
        "tokens of one sequence that a pass verifies, at most, the certain one included; None: 12 with "
        "NGRAM, 4 with STANDALONE",
    )
    speculative_num_steps: int | None = option(
        None, "with STANDALONE: passes of the smaller model, one for each token that is guessed"
    )
    speculative_ngram_min_match_window_size: int = option(
        2, "with NGRAM: how many of the last tokens must have come before for a guess"
    )
    speculative_ngram_max_match_window_size: int = option(
        12, "with NGRAM: how many are compared at most; the longest match wins"
    )
    grammar_backend: str = option(
        "auto", "what keeps constraints: auto (the best one for each kind), or a grammar backend's name"
    )
    grammar_whitespace: str = option(
        "single",
        "blanks between the tokens of constrained JSON: compact (none), single (at most one space) or "
        "flexible (line breaks and indentation, bounded)",
        choices=("compact", "single", "flexible"),
    )
    grammar_schema_format: str = option(
        "assertion",
        "what `format` does in a JSON schema: assertion (strings must have the format) or annotation (it is "
        "told in meta_info and binds nothing)",
        choices=("assertion", "annotation"),
    )
    grammar_cache_dir: str = option(
        "",
        "folder that keeps what constraints need of a vocabulary and is slow to make, for later starts; "
        "empty: none",
    )
    grammar_workers: int = option(1, "threads that compile constraints")
    liveness: bool = option(
        True,
        "lead constrained outputs to an end before max_new_tokens runs out, so that they always parse",
    )
    max_rejections: int = option(
        32, "how often one output may be taken back because its constraint refuses what it led to"
    )
    max_taken_back: int = option(
        256, "tokens that may be taken back so in all; 4 * max_new_tokens where that is more"
    )
    grammar_timeout_s: float = option(30.0, "seconds a constraint may take to be compiled, waiting included")
    grammar_cache_size: int = option(256, "compiled constraints that are kept ready, at most")
    grammar_cache_mb: int = option(512, "what these may take in all, in MiB (an estimate)")
    reasoning_end: str = option(
        "auto",
        "what ends the reasoning of a model that thinks before it answers: auto (as its tokenizer or chat "
        "template says), none, or the text itself",
    )
    reasoning_parser: str | None = option(
        None,
        "keep reasoning apart in every reply: auto (as the model marks it), or the name of a family, such as "
        "qwen3 or deepseek-r1; None: only where a request asks for it",
    )
    tool_call_parser: str = option(
        "auto",
        "the format in which the model writes tool calls: auto (as its chat template shows), none, or a "
        "format's name, such as qwen25",
    )
    chat_template: str | dict[str, str] | None = option(  # noqa: RUF009 - a field()
        None,
        "a built-in chat template's name, a .jinja or .json file's path, or Jinja texts by name; None: "
        "the checkpoint's own",
    )
    hf_chat_template_name: str | None = option(None, "which of several named chat templates is used")
    completion_template: str | None = option(
        None,
        "a fill-in-the-middle template's name, for prompts with a suffix; None: by the tokenizer's tokens",
    )
    allow_control_tokens: bool = option(
        False, "read control tokens that messages quote as such, where a request does not say"
    )
    pooling: str | None = option(
        None,
        "which token outputs become a text's vector: cls, mean, last or max; None: as the checkpoint says, "
        "else cls for encoders and last for decoders",
    )
    normalize_embeddings: bool | None = option(
        None, "scale vectors to length 1; None: as the checkpoint's modules.json says, else yes"
    )
    seed: int | None = option(None, "keys the draws of requests without a seed; None: fresh ones every time")
    scaled_logprobs: bool = option(
        False,
        "output tokens' log-probabilities at the temperature they were sampled with; otherwise the model's "
        "own, at temperature 1, as the prompt's always are",
    )
    max_top_logprobs: int = option(32, "top_logprobs_num of a request, at most; each costs memory per token")
    max_token_ids_logprob: int = option(64, "ids in token_ids_logprob of a request, at most")
    disaggregation_mode: str = option(
        "null",
        "compute prompts and outputs in two engines: prefill (this one computes prompts and hands their KV "
        "over), decode (this one takes them and generates) or null (this one does both). Send requests "
        "through `python -m runtime router`; one without bootstrap_room is answered by this engine alone",
        choices=DISAGGREGATION,
    )
    disaggregation_transfer_backend: str = option(
        "tcp",
        "how the KV goes from prefill to decode: local (same machine, through memory), tcp (sockets, between "
        "machines), nixl (RDMA where there is one; needs the extra nixl) or fake (nothing moves, for tests)",
    )
    disaggregation_bootstrap_port: int = option(
        8998, "port of the prefill engine's bootstrap server; 0: any free one"
    )
    disaggregation_host: str = option(
        "127.0.0.1", "address under which the other engine reaches this one; one of this machine's own"
    )
    disaggregation_allowed_hosts: tuple[str, ...] = option(
        (),
        "hosts that a request may name as its prefill engine's, separated by commas, * for all; this "
        "machine's own addresses always may. A decode engine connects to no other",
    )
    disaggregation_key: str | None = option(
        None,
        "secret that both engines of a pair are given, before anything moves between them; better given in "
        "SGLANG_DSL_DISAGGREGATION_KEY than on the command line; None: only this machine's engines pair",
        secret=True,
    )
    disaggregation_timeout_s: float = option(
        300.0,
        "seconds that each step of a transfer may take: finding the other engine, waiting for it, moving",
    )
    disaggregation_heartbeat_s: float = option(
        5.0, "seconds between two looks whether the other engine lives; after two misses it is given up"
    )
    num_reserved_decode_tokens: int = option(
        512, "KV slots that a decode engine keeps for each running request before it takes in another prompt"
    )
    profile_folder: str | None = option(
        None, "profiles are written below this folder; None: a fresh one in the system's temporary folder"
    )
    load_timeout_s: float = option(1800.0, "seconds the model may take to load")
    step_timeout_s: float = option(
        600.0,
        "seconds without progress after which the engine is given up; a forward pass may take four fifths",
    )
    close_timeout_s: float = option(30.0, "seconds close() waits for the engine's threads")

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> EngineConfig:
        """The config with these options. Raises BadRequest: an unknown name (lists the known ones), a value
        of the wrong type or out of range."""
        return read(cls, options, "Engine").verify()

    @classmethod
    def help_texts(cls) -> dict[str, str]:
        """Option -> what it is for."""
        return {one.name: help_of(one) for one in options_of(cls)}

    def verify(self) -> EngineConfig:
        """Return self, or raise BadRequest naming the option and its rule. Owners check what is theirs."""
        if self.grammar_workers < 1:
            raise BadRequest(f"must be at least 1, got {self.grammar_workers}", where="grammar_workers")
        if self.grammar_cache_size < 1 or self.grammar_cache_mb < 1:
            raise BadRequest("must be at least 1", where="grammar_cache_size / grammar_cache_mb")
        for name in ("max_top_logprobs", "max_token_ids_logprob"):
            if getattr(self, name) < 0:
                raise BadRequest(f"must be at least 0, got {getattr(self, name)}", where=name)
        if not self.reasoning_end:
            raise BadRequest('is empty; "none" says that the model does not reason', where="reasoning_end")
        if self.pooling is not None and self.pooling not in MODES:
            raise BadRequest(f"must be one of {', '.join(MODES)}, got {self.pooling!r}", where="pooling")
        for name in ("load_timeout_s", "step_timeout_s", "close_timeout_s", "grammar_timeout_s"):
            if not 0 < getattr(self, name) < float("inf"):
                raise BadRequest(f"must be a positive number, got {getattr(self, name)}", where=name)
        if self.lora_paths and self.enable_lora is False:
            raise BadRequest("goes with enable_lora", where="lora_paths")
        if self.max_loaded_loras is not None and self.max_loaded_loras < max(1, len(self.lora_paths)):
            raise BadRequest(
                f"must be at least 1, and hold the {len(self.lora_paths)} of lora_paths, got "
                f"{self.max_loaded_loras}",
                where="max_loaded_loras",
            )
        self.verify_images()
        self.runner().verify()
        if self.tp_size > 1 and self.runner_process is False:
            raise BadRequest(
                "must not be False where several processes share the model",
                where="runner_process",
                hint="leave it out, or tp_size",
            )
        self.disaggregation().verify()
        self._scheduler(self.context_length)
        return self

    def locate(self) -> tuple[Path, AnySpec]:
        """Where the checkpoint is, and its shape; quick. Raises ModelLoadError, and BadRequest for options
        that do not fit the model."""
        path = find_checkpoint(self.model)
        spec = read_spec(path)
        if isinstance(spec, ModelSpec):
            spec = spec.for_context(self.context_length)
        self.context(spec)
        _check_quantization(spec, self)
        if self.tp_size > 1:
            _check_ranks(spec, self.tp_size)
        if self.takes_adapters and isinstance(spec, EncoderSpec):
            raise BadRequest("an encoder takes no adapters", where="enable_lora", hint="leave it out")
        if self.speculative_algorithm is not None:
            _check_speculation(spec, self)
        return path, spec

    @property
    def takes_adapters(self) -> bool:
        return bool(self.lora_paths) if self.enable_lora is None else self.enable_lora

    def context(self, spec: AnySpec) -> int:
        """Tokens of one request, at most. Raises BadRequest when more is asked than the model can."""
        limit = spec.max_position_embeddings
        if self.context_length is not None and self.context_length > limit:
            raise BadRequest(
                f"is {self.context_length}, the model was made for {limit} tokens", where="context_length"
            )
        return limit if self.context_length is None else self.context_length

    def scheduler(self, spec: AnySpec, *, beside: bool = False) -> SchedulerConfig:
        """`beside`: whether the model computes on a GPU or in a process of its own."""
        return self._scheduler(self.context(spec), beside)

    def pooling_of(self, path: Path, spec: AnySpec) -> Pooling:
        """How texts become vectors. Raises ModelLoadError: the checkpoint asks for what is not computed."""
        default = ENCODER_DEFAULT if isinstance(spec, EncoderSpec) else DECODER_DEFAULT
        return read_pooling(path, default, mode=self.pooling, normalize=self.normalize_embeddings)

    def runner(self) -> RunnerConfig:
        return hand(
            RunnerConfig,
            self,
            enable_lora=self.takes_adapters,
            adapters=read_adapters(self.lora_paths),
            shared_kv=self.disaggregation_mode != "null",
            draft_model=self.speculative_draft_model_path,
            draft_tokens=self.speculation().drafts,
            step_timeout_s=PASS_SHARE * self.step_timeout_s,
        )

    def speculation(self) -> SpeculationConfig:
        return SpeculationConfig.of(
            self.speculative_algorithm,
            model=self.speculative_draft_model_path,
            steps=self.speculative_num_steps,
            tokens=self.speculative_num_draft_tokens,
            min_match=self.speculative_ngram_min_match_window_size,
            max_match=self.speculative_ngram_max_match_window_size,
        )

    def disaggregation(self) -> DisaggregationConfig:
        return DisaggregationConfig(
            mode=self.disaggregation_mode,
            transfer_backend=self.disaggregation_transfer_backend,
            host=self.disaggregation_host,
            bootstrap_port=self.disaggregation_bootstrap_port,
            allowed_hosts=self.disaggregation_allowed_hosts,
            key=self.disaggregation_key,
            reserved_tokens=self.num_reserved_decode_tokens,
            timeout_s=self.disaggregation_timeout_s,
            heartbeat_s=self.disaggregation_heartbeat_s,
        )

    def _scheduler(self, context_length: int | None, beside: bool = False) -> SchedulerConfig:
        overlap = beside if self.overlap is None else self.overlap
        return hand(
            SchedulerConfig,
            self,
            policy=self.schedule_policy,
            context_length=context_length,
            overlap=overlap,
            speculation=self.speculation(),
        )


def _check_quantization(spec: AnySpec, config: EngineConfig) -> None:
    match spec:
        case ModelSpec():
            check_wish(spec.quantization, config.quantization)
        case EncoderSpec():
            for name, plain in (("quantization", None), ("kv_cache_dtype", "auto"), ("load_format", "auto")):
                if getattr(config, name) != plain:
                    raise BadRequest("an encoder has none", where=name, hint="leave it out for this model")


def _check_ranks(spec: AnySpec, size: int) -> None:
    match spec:
        case EncoderSpec():
            raise BadRequest(
                "an encoder is computed by one process", where="tp_size", hint="leave it out for this model"
            )
        case ModelSpec():
            check_ranks(spec, size)


def _check_speculation(spec: AnySpec, config: EngineConfig) -> None:
    """Raises BadRequest, or ModelLoadError for the draft model, where no tokens can be guessed."""
    if isinstance(spec, EncoderSpec):
        raise BadRequest("an encoder generates nothing", where="speculative_algorithm", hint="leave it out")
    if config.speculative_draft_model_path is None:
        return
    parted = "tp_size" if config.tp_size > 1 else "disaggregation_mode"
    if config.tp_size > 1 or config.disaggregation_mode != "null":
        raise BadRequest(
            f"a draft model computes in one process, with all of the KV: not with {parted}",
            where="speculative_algorithm",
            hint="--speculative-algorithm NGRAM",
        )
    draft_spec(spec, config.speculative_draft_model_path)
