"""Tiny checkpoints in the Hugging Face layout, and a hand-made scheduler that drives a Runner."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from runtime.plan import Row, RowResult, Run, Runner, Segment, StepPlan, TokenMask
from runtime.protocol.sampling import SamplingParams
from tests.unit.runtime.engine.checkpoints.expert_families import EXPERTS
from tests.unit.runtime.engine.checkpoints.families import BESIDE, CLASSES, CONFIGS, FAMILIES, LEFT_OUT

GREEDY = SamplingParams(temperature=0.0)
BASE = {
    "vocab_size": 160,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def _rope(kind: str, **fields: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **fields}}


LLAMA3 = _rope(
    "llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64
)
YARN = _rope("yarn", factor=4.0, original_max_position_embeddings=64)
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    # Those that the CPU's kernels in C are for.
    "llama, sizes of kernels": ("Llama", {"hidden_size": 64, "intermediate_size": 96, "head_dim": 32}),
    "llama, tied, biased": (
        "Llama",
        {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True, "num_key_value_heads": 4},
    ),
    "llama, llama3 rope": ("Llama", LLAMA3),
    "llama, yarn": ("Llama", YARN),
    "llama, linear rope": ("Llama", _rope("linear", factor=2.5)),
    "llama, dynamic rope": ("Llama", _rope("dynamic", factor=2.0)),
    "mistral, window": ("Mistral", {"sliding_window": 37}),
    "mistral, no window": ("Mistral", {"sliding_window": None}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen2, upper layers windowed": (
        "Qwen2",
        {"use_sliding_window": True, "sliding_window": 50, "max_window_layers": 1},
    ),
    "qwen3": ("Qwen3", {}),
}


@dataclass(frozen=True)
class Tiny:
    path: Path
    model: Any  # the same weights in transformers

    def logits(self, ids: Sequence[int]) -> torch.Tensor:
        """[tokens, vocab]"""
        with torch.inference_mode():
            return self.model(torch.tensor([list(ids)])).logits[0].clone()

    def greedy(self, ids: Sequence[int], count: int) -> list[int]:
        """The `count` most probable next tokens, one after the other."""
        found: list[int] = []
        feed, cache = torch.tensor([list(ids)]), None
        with torch.inference_mode():
            for _ in range(count):
                out = self.model(feed, past_key_values=cache, use_cache=True)
                feed, cache = out.logits[:, -1:].argmax(-1), out.past_key_values
                found.append(int(feed))
        return found


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def make_tiny(path: Path, case: str, dtype: torch.dtype = torch.float32, **save: Any) -> Tiny:
    family, changes = {**CASES, **EXPERTS, **FAMILIES}[case]
    given = {name: value for name, value in {**BASE, **changes}.items() if value is not LEFT_OUT}
    if family in BESIDE:
        model_type, besides = BESIDE[family]
        given = {"text_config": {**given, "model_type": model_type}, **besides}
    config = getattr(transformers, CONFIGS.get(family, f"{family}Config"))(**given)
    config._attn_implementation = "eager"
    torch.manual_seed(len(case))
    model = getattr(transformers, CLASSES.get(family, f"{family}ForCausalLM"))(config).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() == 2:
                weight.normal_(std=1.0 if "embed" in name else 0.2)
            else:
                weight.normal_(mean=1.0 if "norm" in name or "ln_" in name else 0.0, std=0.2)
        for name, buffer in model.named_buffers():
            if "correction" in name:
                buffer.normal_(std=0.2)
    model.to(dtype)
    model.save_pretrained(path, **save)
    if (
        dtype != torch.float32
    ):  # read back: only the saved weights are rounded, not what is computed from config
        model = type(model).from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()
    return Tiny(path, model)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Tiny]:
    """The checkpoint of a case, made once."""
    made: dict[str, Tiny] = {}

    def get(case: str) -> Tiny:
        if case not in made:
            made[case] = make_tiny(tmp_path_factory.mktemp("tiny"), case)
        return made[case]

    return get


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest, tiny: Callable[[str], Tiny]) -> Tiny:
    """Every case in turn."""
    return tiny(request.param)


@pytest.fixture(scope="session")
def make() -> Callable[..., Tiny]:
    """make(path, case, dtype, **arguments of save_pretrained)"""
    return make_tiny


@pytest.fixture(scope="session")
def prompt() -> Callable[..., list[int]]:
    def make(length: int, seed: int = 0) -> list[int]:
        return [random.Random(seed * 1000 + place).randrange(3, 160) for place in range(length)]

    return make


@dataclass(eq=False)
class Piece:
    position: int
    runs: list[Run] = field(default_factory=list)
    length: int = 0


@dataclass(eq=False)
class Seq:
    """One sequence: pieces of KV, the last of them its own."""

    handle: int
    path: list[Piece]
    length: int = 0


@dataclass
class Ask:
    seq: Seq
    tokens: Sequence[int]
    extra: dict[str, Any] = field(default_factory=dict)


class Driver:
    """Plays the scheduler: hands out slots (page 0: in order, else random pages) and names segments."""

    def __init__(self, runner: Runner, page: int = 0, seed: int = 0) -> None:
        self.runner = runner
        size = page or 1
        self._page = page
        self._free = [Run(start, size) for start in range(0, runner.slots - size + 1, size)]
        if page:
            random.Random(seed).shuffle(self._free)
        self._handles = itertools.count(1)

    def new(self) -> Seq:
        return Seq(next(self._handles), [Piece(0)])

    def fork(self, seq: Seq) -> Seq:
        """A sequence that shares all KV of `seq`."""
        child = Seq(next(self._handles), [*seq.path, Piece(seq.length)], seq.length)
        seq.path.append(Piece(seq.length))
        return child

    def _take(self, tokens: int) -> tuple[Run, ...]:
        runs = []
        while tokens > 0:
            run = self._free.pop(0)
            runs.append(Run(run.start, min(run.length, tokens)))
            tokens -= run.length
        return tuple(runs)

    def plan(self, asks: Sequence[Ask]) -> StepPlan:
        rows, users = [], {}
        for index, ask in enumerate(asks):
            for piece in ask.seq.path:
                if piece.length:
                    users.setdefault(piece, []).append(index)
            extra = {"sampling": GREEDY, **ask.extra}
            rows.append(
                Row(ask.seq.handle, tuple(ask.tokens), ask.seq.length, self._take(len(ask.tokens)), **extra)
            )
        segments = tuple(
            Segment(tuple(piece.runs), tuple(mine), piece.position) for piece, mine in users.items()
        )
        for ask, row in zip(asks, rows):
            ask.seq.path[-1].runs.extend(row.slots)
            ask.seq.path[-1].length += len(row.tokens)
            ask.seq.length += len(row.tokens)
        return StepPlan(tuple(rows), segments)

    @staticmethod
    def ask(seq: Seq, tokens: Sequence[int], **extra: Any) -> Ask:
        """`extra`: fields of Row; greedy sampling unless they say otherwise."""
        return Ask(seq, tokens, extra)

    def step(self, asks: Sequence[Ask], masks: dict[int, TokenMask] | None = None) -> tuple[RowResult, ...]:
        self.runner.launch(self.plan(asks))
        return self.runner.finish(masks or {}).rows

    def generate(
        self, prompts: Sequence[Sequence[int]], count: int, chunk: int = 0, **extra: Any
    ) -> list[list[int]]:
        """Each prompt in chunks (0 = whole), then `count` tokens for all at once."""
        seqs = [self.new() for _ in prompts]
        return self.go_on(seqs, prompts, count, chunk, **extra)

    def go_on(
        self, seqs: Sequence[Seq], prompts: Sequence[Sequence[int]], count: int, chunk: int = 0, **extra: Any
    ) -> list[list[int]]:
        feed = []
        for seq, ids in zip(seqs, prompts):
            size = chunk or len(ids)
            parts = [ids[first : first + size] for first in range(0, len(ids), size)]
            for part in parts[:-1]:
                self.step([self.ask(seq, part, **{**extra, "sample": False})])
            feed.append(parts[-1])
        outs: list[list[int]] = [[] for _ in seqs]
        for step in range(count):
            results = self.step([self.ask(seq, ids, step=step, **extra) for seq, ids in zip(seqs, feed)])
            feed = [[result.token] for result in results]
            for out, result in zip(outs, results):
                out.append(result.token)
        return outs


@pytest.fixture(scope="session")
def drive() -> Callable[..., Driver]:
    return Driver
