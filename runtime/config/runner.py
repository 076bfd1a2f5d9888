"""RunnerConfig: how the compute plane computes. Torch-free: the control plane and command lines hold one."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from runtime.config.parts.quantization import KV_DTYPES
from runtime.plan import Adapter
from runtime.protocol.errors import BadRequest

COMPUTE_DTYPES = ("auto", "float32", "bfloat16")
LOAD_FORMATS = ("auto", "dummy")
MAX_RANKS = 64
MAX_LORAS = 64


@dataclass(frozen=True, slots=True)
class World:
    """Which of the ranks that compute one model a process is. file: a path that all name, and nothing is at
    yet, by which they find one another within timeout_s."""

    rank: int = 0
    size: int = 1
    file: str = ""
    timeout_s: float = 1800.0


def read_adapters(paths: Sequence[str]) -> tuple[Adapter, ...]:
    """NAME=DIRECTORY, or a directory that is its own name; numbered from 1 on. Raises BadRequest."""
    made: dict[str, Adapter] = {}
    for number, text in enumerate(paths, 1):
        name, equals, path = text.partition("=")
        path = path if equals else name
        if not name or not path:
            raise BadRequest(f"must be NAME=DIRECTORY, got {text!r}", where="lora_paths")
        if name in made:
            raise BadRequest(f"the name {name!r} occurs twice", where="lora_paths")
        made[name] = Adapter(number, name, path)
    return tuple(made.values())


@dataclass(frozen=True, slots=True)
class RunnerConfig:
    """dtype              "auto" = bfloat16 on CUDA, float32 on CPU (see the decision 004)
    device             "auto" = CUDA where there is one, else CPU
    max_total_tokens   slots of the KV pool; None = from free memory
    memory_fraction    share of the memory that is free after loading which the KV pool may take
    attention          name in the table of attention implementations
    cuda_graph         record decoding steps as CUDA graphs, where there is a GPU and one rank
    cuda_graph_max_bs  rows of a recorded step, at most
    lookahead          where steps are recorded, queue the next one before its plan is there
    pack_weights       keep the matrices in a layout made for the CPU: "auto" = in bfloat16, where there are
                       two fast ones, in both if they fit comfortably, and passes use what is timed to be
                       faster; "always" = in one; "never"
    quantization       what to quantise plain weights to while they are loaded (quantization.ON_LOAD), or
                       the name of the checkpoint's own quantisation; None = as the checkpoint has them
    load_format        "auto" = the checkpoint's safetensors files; "dummy" = random weights, to measure with
    expand_weights     make the numbers of a quantised checkpoint when it is loaded, for speed: "auto" =
                       on the CPU, where they fit comfortably; "always"; "never"
    kv_cache_dtype     in what keys and values are kept; "auto" = `dtype`
    threads            of one operation on the CPU; None = torch's own choice, and one where a pass of a model
                       that has a process of its own is too small to be shared out
    tp_size            processes that share the model, each with a part of every matrix and of the KV pool
    step_timeout_s     how long finish() waits for a forward pass
    seed               keys the draws of requests that give no seed; None = fresh
    scaled_logprobs    tell output tokens' log-probabilities at the temperature they were sampled with, not at
                       temperature 1
    enable_lora        take LoRA adapters
    max_loras_per_batch  how many different ones a pass may have; each takes memory on the device
    max_lora_rank      of an adapter, at most; None: no limit
    adapters           those to load at the start
    shared_kv          keep the KV pool where other processes of this machine can map it, for KV transfers
    draft_model        checkpoint of a smaller model that guesses tokens; None: there is none
    draft_tokens       how many it guesses for one row, at most
    """

    dtype: str = "auto"
    device: str = "auto"
    max_total_tokens: int | None = None
    memory_fraction: float = 0.25
    attention: str = "auto"
    cuda_graph: bool = True
    cuda_graph_max_bs: int = 256
    lookahead: bool = True
    pack_weights: str = "auto"
    quantization: str | None = None
    load_format: str = "auto"
    expand_weights: str = "auto"
    kv_cache_dtype: str = "auto"
    threads: int | None = None
    tp_size: int = 1
    step_timeout_s: float = 600.0
    seed: int | None = None
    scaled_logprobs: bool = False
    enable_lora: bool = False
    max_loras_per_batch: int = 8
    max_lora_rank: int | None = None
    adapters: tuple[Adapter, ...] = ()
    shared_kv: bool = False
    draft_model: str | None = None
    draft_tokens: int = 0

    def verify(self) -> RunnerConfig:
        """Return self, or raise BadRequest naming the field, its value and the rule."""
        checks: tuple[tuple[str, bool, str], ...] = (
            (
                "device",
                re.fullmatch(r"auto|cpu|cuda(:[0-9]+)?", self.device) is not None,
                "must be auto, cpu, cuda or cuda:<n>",
            ),
            ("dtype", self.dtype in COMPUTE_DTYPES, f"must be one of {', '.join(COMPUTE_DTYPES)}"),
            (
                "max_total_tokens",
                self.max_total_tokens is None or self.max_total_tokens >= 1,
                "must be at least 1",
            ),
            ("memory_fraction", 0.0 < self.memory_fraction <= 0.95, "must be in (0, 0.95]"),
            (
                "pack_weights",
                self.pack_weights in ("auto", "always", "never"),
                "must be auto, always or never",
            ),
            ("load_format", self.load_format in LOAD_FORMATS, f"must be one of {', '.join(LOAD_FORMATS)}"),
            (
                "expand_weights",
                self.expand_weights in ("auto", "always", "never"),
                "must be auto, always or never",
            ),
            (
                "kv_cache_dtype",
                self.kv_cache_dtype in KV_DTYPES,
                f"must be one of {', '.join(KV_DTYPES)}",
            ),
            ("cuda_graph_max_bs", 1 <= self.cuda_graph_max_bs <= 4096, "must be in 1 to 4096"),
            ("threads", self.threads is None or self.threads >= 1, "must be at least 1"),
            ("tp_size", 1 <= self.tp_size <= MAX_RANKS, f"must be in 1 to {MAX_RANKS}"),
            (
                "device",
                self.tp_size == 1 or not self.device.startswith("cuda:"),
                "must be auto, cpu or cuda where several ranks share the model: each takes a GPU of its own",
            ),
            (
                "max_loras_per_batch",
                1 <= self.max_loras_per_batch <= MAX_LORAS,
                f"must be in 1 to {MAX_LORAS}",
            ),
            ("max_lora_rank", self.max_lora_rank is None or self.max_lora_rank >= 1, "must be at least 1"),
            ("step_timeout_s", self.step_timeout_s > 0, "must be above 0"),
        )
        for name, ok, rule in checks:
            if not ok:
                raise BadRequest(f"{name} {rule}, got {getattr(self, name)!r}", where=f"runner.{name}")
        return self
