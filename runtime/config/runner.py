"""RunnerConfig: how the compute plane computes. Torch-free: the control plane and command lines use it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from runtime.config.options import check, option
from runtime.config.parts.quantization import KV_DTYPES
from runtime.plan import Adapter
from runtime.protocol.errors import BadRequest

COMPUTE_DTYPES = ("auto", "float32", "bfloat16")
LOAD_FORMATS = ("auto", "dummy")
MAX_RANKS = 64
MAX_LORAS = 64


@dataclass(frozen=True, slots=True)
class World:
    """The rank of a process among those that share one model. file: a path that all ranks share and that does
    not exist yet, through which they find one another within timeout_s."""

    rank: int = 0
    size: int = 1
    file: str = ""
    timeout_s: float = 1800.0


def read_adapters(paths: Sequence[str]) -> tuple[Adapter, ...]:
    """NAME=DIRECTORY, or a directory that is also the name; numbered from 1. Raises BadRequest."""
    adapters: dict[str, Adapter] = {}
    for number, text in enumerate(paths, 1):
        name, equals, path = text.partition("=")
        path = path if equals else name
        if not name or not path:
            raise BadRequest(f"must be NAME=DIRECTORY, got {text!r}", where="lora_paths")
        if name in adapters:
            raise BadRequest(f"the name {name!r} occurs twice", where="lora_paths")
        adapters[name] = Adapter(number, name, path)
    return tuple(adapters.values())


@dataclass(frozen=True, kw_only=True)
class RunnerOptions:
    """How the model computes: options of EngineConfig that the runner uses unchanged."""

    dtype: str = option("auto", choices=COMPUTE_DTYPES)
    """data type to compute in: auto (bfloat16 on CUDA, float32 on CPU), float32 or bfloat16"""
    device: str = option("auto")
    """device to compute on: auto (CUDA if available), cpu, cuda or cuda:<n>"""
    max_total_tokens: int | None = option(None, at_least=1)
    """size of the KV pool in tokens (slots). By default computed from --memory-fraction"""
    memory_fraction: float = option(0.25)
    """fraction of the memory left after loading the weights that the KV pool may use"""
    threads: int | None = option(None, at_least=1)
    """CPU threads per tensor operation. By default one for small passes, all cores for others"""
    pack_weights: str = option("auto", choices=("auto", "always", "never"))
    """keep matrices in a layout made for the CPU: auto (in bfloat16, if the processor has two fast ones, in
    both where memory allows; which passes use which is tested at load), always (in one) or never"""
    quantization: str | None = option(None)
    """quantise weights while they load: fp8 (half the memory of bfloat16) or, on the CPU, w8a8_int8 (weights
    and activations, for speed; works for quantised checkpoints too). Or the name of the checkpoint's own
    quantisation. By default weights are used as they are"""
    load_format: str = option("auto", choices=LOAD_FORMATS)
    """where weights come from: auto (the checkpoint's safetensors files) or dummy (random values for
    benchmarks; only config.json and the tokenizer are needed)"""
    expand_weights: str = option("auto", choices=("auto", "always", "never"))
    """dequantise a quantised checkpoint when it loads, which takes more memory and makes it faster: auto (on
    the CPU, if it fits in memory easily), always or never"""
    kv_cache_dtype: str = option("auto", choices=KV_DTYPES)
    """data type of the KV cache: auto (the one of --dtype), bfloat16, fp8_e4m3 or fp8_e5m2. The fp8 types
    take half the memory of bfloat16 and round to 4 or 3 significant bits"""
    tp_size: int = option(1, within=(1, MAX_RANKS))
    """tensor parallelism: number of processes that share a decoder, each with a part of every matrix and of
    the KV pool; on the CPU, or with one GPU each"""
    max_loras_per_batch: int = option(8, within=(1, MAX_LORAS))
    """maximum number of different adapters in one step; each takes device memory beside the weights"""
    max_lora_rank: int | None = option(None, at_least=1)
    """maximum rank of an adapter. By default no limit"""
    attention: str = option("auto")
    """name of the attention implementation; auto: the best one for the device"""
    cuda_graph: bool = option(True)
    """record decoding steps as CUDA graphs to save launch overhead; on a single GPU only"""
    cuda_graph_max_bs: int = option(256, within=(1, 4096))
    """maximum number of sequences in a CUDA graph; larger steps run without one"""
    seed: int | None = option(None)
    """seed for the random draws of requests without a seed. By default different every time"""
    scaled_logprobs: bool = option(False)
    """report the log-probabilities of output tokens at the sampling temperature; otherwise the model's own,
    at temperature 1, as always for prompts"""


@dataclass(frozen=True, kw_only=True)
class RunnerConfig(RunnerOptions):
    """The options, and the values that EngineConfig derives from others.

    enable_lora     support LoRA adapters
    adapters        those to load at startup
    lookahead       on a GPU, queue the next decoding step before it is planned
    shared_kv       keep the KV pool in memory that other processes of this machine can map, for KV transfers
    draft_model     checkpoint of a smaller model that drafts tokens; None: no draft model
    draft_tokens    maximum number of tokens that it drafts for one row
    step_timeout_s  seconds that a forward pass may take
    """

    enable_lora: bool = False
    adapters: tuple[Adapter, ...] = ()
    lookahead: bool = True
    shared_kv: bool = False
    draft_model: str | None = None
    draft_tokens: int = 0
    step_timeout_s: float = 600.0

    def verify(self) -> RunnerConfig:
        """Return self, or raise BadRequest naming the option, its value and the rule."""
        check(self)
        if not 0.0 < self.memory_fraction <= 0.95:
            raise BadRequest(f"must be in (0, 0.95], got {self.memory_fraction}", where="memory_fraction")
        if re.fullmatch(r"auto|cpu|cuda(:[0-9]+)?", self.device) is None:
            raise BadRequest(f"must be auto, cpu, cuda or cuda:<n>, got {self.device!r}", where="device")
        if self.tp_size > 1 and self.device.startswith("cuda:"):
            raise BadRequest(
                "must be auto, cpu or cuda if several ranks share the model, because each takes a GPU of its "
                f"own; got {self.device!r}",
                where="device",
            )
        return self
