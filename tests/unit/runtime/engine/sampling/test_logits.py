"""Logits equal transformers' for every family, however the tokens arrive and wherever their KV lies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from runtime.attention.base import choose
from runtime.attention.pool import KVShape
from runtime.config.model import ModelSpec
from runtime.engine.batch import Batch
from runtime.layers.dense import Dense
from runtime.layers.linear import Linear, LinearMethod, Projection
from runtime.layers.weights import Weights
from runtime.models.decoder import Decoder
from runtime.plan import RowResult, StepPlan, StepResult

TOLERANCE = 1e-4


class AllLogits:
    """A runner that keeps the logits of all tokens of a step."""

    def __init__(
        self,
        path: Any,
        slots: int = 1024,
        attention: str = "auto",
        method: LinearMethod | None = None,
        spec: ModelSpec | None = None,
    ) -> None:
        self.spec = spec or ModelSpec.from_dir(path)
        cpu = torch.device("cpu")
        self.decoder = Decoder.load(path, self.spec, torch.float32, cpu, method or Dense(pack=True))
        spec = self.spec
        shape = KVShape(spec.num_layers, spec.num_kv_heads, spec.head_dim, torch.float32, cpu)
        scoring = self.decoder.scoring
        self.attention = choose(attention, cpu)(shape, slots, spec.num_heads, spec.windows, scoring)
        self.attention.pool.kv.fill_(torch.nan)  # what was never written must never matter
        self.slots, self.vocab_size = slots, spec.vocab_size
        self.seen: torch.Tensor | None = None

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> None:
        batch = Batch.of(plan, self.vocab_size, self.slots, self.decoder.device)
        self.seen = self.decoder.logits(
            self.decoder.hidden(batch.ids, batch.positions, self.attention.begin(plan))
        )
        self.rows = len(plan.rows)

    def done(self) -> bool:
        return True

    def finish(self, masks: Any) -> StepResult:
        return StepResult((RowResult(),) * self.rows)


def _close(got: torch.Tensor | None, right: torch.Tensor) -> None:
    assert got is not None
    assert got.shape == right.shape
    assert got.dtype == torch.float32
    assert (got - right).abs().max() < TOLERANCE


def test_prefill(case: Any, prompt: Any, drive: Any) -> None:
    ids = prompt(200)
    driver = drive(AllLogits(case.path))
    driver.step([driver.ask(driver.new(), ids)])
    right = case.logits(ids)
    assert right.std() > 0.5  # or the comparison would say little
    _close(driver.runner.seen, right)


def test_token_by_token(case: Any, prompt: Any, drive: Any) -> None:
    ids = prompt(90, seed=1)
    driver = drive(AllLogits(case.path), page=1, seed=1)
    seq, seen = driver.new(), []
    for token in ids:
        driver.step([driver.ask(seq, [token])])
        seen.append(driver.runner.seen)
    _close(torch.cat(seen), case.logits(ids))


@pytest.mark.parametrize("page", [0, 1, 4])
def test_chunks_of_odd_sizes(case: Any, prompt: Any, drive: Any, page: int) -> None:
    ids = prompt(200, seed=2)
    driver = drive(AllLogits(case.path), page=page, seed=2)
    seq, seen, first = driver.new(), [], 0
    for size in (1, 7, 33, 2, 64, 5, 88):
        driver.step([driver.ask(seq, ids[first : first + size])])
        seen.append(driver.runner.seen)
        first += size
    assert first == 200
    _close(torch.cat(seen), case.logits(ids))


@pytest.mark.parametrize("page", [0, 1])
def test_shared_prefixes(case: Any, prompt: Any, drive: Any, page: int) -> None:
    root_ids, ends = prompt(70, seed=3), [prompt(n, seed=4 + n) for n in (1, 2, 3, 20, 40, 1, 5)]
    driver = drive(AllLogits(case.path), page=page, seed=3)
    root = driver.new()
    driver.step([driver.ask(root, root_ids)])
    leaves = [driver.fork(root) for _ in ends]
    other, other_ids = driver.new(), prompt(30, seed=30)
    driver.step([*(driver.ask(leaf, end) for leaf, end in zip(leaves, ends)), driver.ask(other, other_ids)])
    right = [case.logits([*root_ids, *end])[70:] for end in ends]
    _close(driver.runner.seen, torch.cat([*right, case.logits(other_ids)]))
    # One more token for all: shared, own and mixed keys in one decode step.
    driver.step([driver.ask(leaf, [9]) for leaf in leaves])
    _close(driver.runner.seen, torch.stack([case.logits([*root_ids, *end, 9])[-1] for end in ends]))


@pytest.mark.parametrize("attention", ["reference", "torch_plain"])
def test_other_attention(tiny: Any, prompt: Any, drive: Any, attention: str) -> None:
    case, ids = tiny("mistral, window"), prompt(120, seed=5)
    driver = drive(AllLogits(case.path, attention=attention, method=Dense()))
    seq, seen = driver.new(), []
    for first in range(0, 120, 50):
        driver.step([driver.ask(seq, ids[first : first + 50])])
        seen.append(driver.runner.seen)
    _close(torch.cat(seen), case.logits(ids))


class Apart(Linear):
    """Each projection by itself, in whole numbers up to `most` and with a scale for each output."""

    def __init__(self, weights: Sequence[torch.Tensor], biases: Sequence[torch.Tensor], most: int) -> None:
        self.scales = [weight.abs().amax(1, keepdim=True) / most for weight in weights]
        self.numbers = [(weight / scale).round() for weight, scale in zip(weights, self.scales)]
        self.biases = biases

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        made = [F.linear(x, number) * scale.T for number, scale in zip(self.numbers, self.scales)]
        return torch.cat(made, -1) + torch.cat(list(self.biases)) if self.biases else torch.cat(made, -1)

    def some(self, x: torch.Tensor, outputs: torch.Tensor) -> torch.Tensor:
        return self(x)[:, outputs]


class Rounded(LinearMethod):
    """Weight-only quantisation as a stranger would add it. Remembers what it was asked for."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.asked: list[tuple[str, ...]] = []

    def load(self, weights: Weights, parts: Sequence[Projection], inputs: int, *, bias: bool) -> Linear:
        self.asked.append(tuple(part.name.split(".")[-1] for part in parts))
        biases = [weights.tensor(f"{part.name}.bias", (part.outputs,), part.local) for part in parts if bias]
        matrices = [
            weights.tensor(f"{part.name}.weight", (part.outputs, inputs), part.local) for part in parts
        ]
        return Apart(matrices, biases, self.most)

    def shared(self, table: torch.Tensor) -> Linear:
        self.asked.append(("shared",))
        return Apart([table], (), self.most)

    def tune(self) -> None:
        pass


def test_a_linear_method_decides_how_matrices_are_kept(case: Any, prompt: Any, drive: Any) -> None:
    """The models know none: fine steps give their logits, coarse ones others."""
    ids, right, spread = prompt(40, seed=6), case.logits(prompt(40, seed=6)), {}
    for most in (1 << 22, 15):
        method = Rounded(most)
        driver = drive(AllLogits(case.path, method=method))
        driver.step([driver.ask(driver.new(), ids)])
        spread[most] = float((driver.runner.seen - right).abs().max())
    assert spread[1 << 22] < TOLERANCE < 0.01 < spread[15]
    layer = [("q_proj", "k_proj", "v_proj"), ("o_proj",), ("gate_proj", "up_proj"), ("down_proj",)]
    head = ("shared",) if driver.runner.spec.tie_embeddings else ("lm_head",)
    assert method.asked == [*layer * driver.runner.spec.num_layers, head]


def test_only_wanted_tokens(tiny: Any, prompt: Any, drive: Any) -> None:
    case, ids = tiny("llama"), prompt(20)
    runner = AllLogits(case.path)
    driver = drive(runner)
    plan = driver.plan([driver.ask(driver.new(), ids)])
    batch = Batch.of(plan, runner.vocab_size, runner.slots, runner.decoder.device)
    with torch.inference_mode():
        wanted = torch.tensor([3, 19, 3])
        step = runner.attention.begin(plan)
        hidden = runner.decoder.hidden(batch.ids, batch.positions, step, wanted)
        _close(runner.decoder.logits(hidden), case.logits(ids)[wanted])
        nothing = runner.decoder.hidden(batch.ids, batch.positions, step, wanted[:0])
        assert runner.decoder.logits(nothing).shape == (0, 160)
