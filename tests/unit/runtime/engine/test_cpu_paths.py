"""The fast ways of the CPU give the tokens of the plain ones: packed matrices, attention and all between in
C, rows sampled one by one; random requests that share prefixes, greedy and drawn, in batches of two sizes.
All layers in one call give the numbers of the calls one by one."""

from __future__ import annotations

import contextlib
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from runtime.config.model import ModelSpec
from runtime.config.runner import RunnerConfig
from runtime.engine.runner import TorchRunner
from runtime.engine.sampling import sampler
from runtime.engine.sampling.draw import pick
from runtime.kernels.native import layers, products
from runtime.kernels.native.library import library
from runtime.models import native_layers
from runtime.protocol.sampling import SamplingParams
from tests.unit.runtime.engine.conftest import CASES
from tests.unit.runtime.engine.sampling.at_once import pick_at_once

needs_compiler = pytest.mark.skipif(library() is None, reason="there is no C compiler")
SETTINGS: dict[str, Any] = {"max_total_tokens": 8192, "dtype": "float32", "device": "cpu", "threads": 1}
FAST = {"attention": "native"}
PLAIN = {"attention": "torch_plain", "pack_weights": "never"}
AT_ONCE, FEW, TOKENS = 40, 3, 8


def batch(drive: Any, runner: TorchRunner, prompt: Any, seed: int, rows: int) -> list[list[int]]:
    """What requests of one batch are answered: below prefixes that some of them share, prompts of all
    lengths, each sampled in its own way."""
    draw = random.Random(seed)
    driver = drive(runner, page=draw.choice((0, 1, 16)), seed=seed)
    roots = [driver.new() for _ in range(3)]
    driver.step(
        [driver.ask(root, prompt(draw.choice((5, 90, 260)), seed=seed), sample=False) for root in roots]
    )
    seqs, feeds, sampling = [], [], []
    for number in range(rows):
        seqs.append(driver.fork(draw.choice(roots)) if draw.random() < 0.7 else driver.new())
        feeds.append(prompt(draw.choice((1, 2, 9, 40)), seed=seed + number))
        greedy, top_k, top_p = draw.random() < 0.4, draw.choice((-1, 5)), draw.choice((1.0, 0.8))
        words = {"temperature": 0.0} if greedy else {"seed": number, "top_k": top_k, "top_p": top_p}
        sampling.append(SamplingParams(**words))
    outs: list[list[int]] = [[] for _ in seqs]
    for step in range(TOKENS):
        asked = [
            driver.ask(seq, feed, step=step, sampling=mine) for seq, feed, mine in zip(seqs, feeds, sampling)
        ]
        feeds = [[result.token] for result in driver.step(asked)]
        for out, feed in zip(outs, feeds):
            out += feed
    return outs


@pytest.mark.parametrize("requests", [40])
def test_they_change_no_token(
    tiny: Any, drive: Any, prompt: Any, monkeypatch: pytest.MonkeyPatch, requests: int
) -> None:
    path = tiny("llama, sizes of kernels").path
    in_c = layers.library

    def load(ways: dict[str, Any]) -> contextlib.closing[TorchRunner]:
        config = RunnerConfig(**SETTINGS, **ways)
        return contextlib.closing(TorchRunner.load(path, ModelSpec.from_dir(path), config))

    asked: list[int] = []
    multiply = products.Product.__call__

    def counted(self: Any, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        asked.append(len(x))
        return multiply(self, x, bias)

    monkeypatch.setattr(products.Product, "__call__", counted)
    with load(FAST) as fast, monkeypatch.context() as patch:
        patch.setattr(layers, "library", lambda: None)
        with load(PLAIN) as plain:
            for seed in range(requests // AT_ONCE):
                for rows in (AT_ONCE - FEW, FEW):
                    patch.setattr(layers, "library", in_c)
                    patch.setattr(sampler, "pick", pick)
                    found = batch(drive, fast, prompt, seed, rows)
                    patch.setattr(layers, "library", lambda: None)
                    patch.setattr(sampler, "pick", pick_at_once)
                    assert found == batch(drive, plain, prompt, seed, rows)
                    assert torch.get_num_threads() == 1
    assert FEW in asked


SIZES = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 32}
ONE_CALL = {
    "biased": ("Llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    "heads normed": ("Qwen3", {}),
    "windows": ("Mistral", {"sliding_window": 37}),
    "layers without rope": ("SmolLM3", {"no_rope_layer_interval": 2}),
}
SEVERAL_CALLS = {
    "norms of what is added": ("Gemma2", {"query_pre_attn_scalar": 24}),
    "another activation": ("Llama", {"hidden_act": "gelu"}),
    "sizes that are not for kernels": ("Llama", {"hidden_size": 40}),
}


@pytest.fixture
def shaped(make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The runner of a family with such fields."""
    with contextlib.ExitStack() as stack:

        def load(family: str, fields: dict[str, Any], **settings: Any) -> TorchRunner:
            monkeypatch.setitem(CASES, family, (family, {**SIZES, **fields}))
            path = make(tmp_path, family).path
            config = RunnerConfig(**{**SETTINGS, **settings})
            return stack.enter_context(
                contextlib.closing(TorchRunner.load(path, ModelSpec.from_dir(path), config))
            )

        yield load


def states(drive: Any, runner: TorchRunner, prompt: Any) -> list[Any]:
    """What rows of one token, and one of several, are answered below a prefix that most of them share."""
    driver = drive(runner, page=4, seed=1)
    root, seen = driver.new(), []
    driver.step([driver.ask(root, prompt(60, seed=1))])
    for rows in (1, 2, 3, 4, 9):
        seqs = [driver.fork(root) for _ in range(rows - 1)] + [driver.new()]
        for step in range(3):
            asks = [driver.ask(seq, prompt(1, seed=step), hidden="all", sample=False) for seq in seqs]
            seen += [one.hidden for one in driver.step(asks)]
    more = driver.ask(driver.fork(root), prompt(4, seed=9), hidden="last", scores=((0, 5), (2, 7)))
    return [*seen, *[(one.samples, one.scores, one.hidden) for one in driver.step([more])]]


@needs_compiler
@pytest.mark.parametrize(
    ("dtype", "threads", "quantization"),
    [
        ("float32", 1, None), ("bfloat16", 1, None), ("float32", 3, None), ("float32", 1, "w8a8_int8"),
        ("bfloat16", 3, "w8a8_int8"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("name", ONE_CALL)
def test_all_layers_in_one_call(
    name: str,
    dtype: str,
    threads: int,
    quantization: str | None,
    shaped: Any,
    drive: Any,
    prompt: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if threads > 1:
        monkeypatch.setattr(layers, "SHARED", 1)  # whatever the size
    monkeypatch.setattr(native_layers, "ANGLES", (8, 62))  # positions are below these, and above
    runner = shaped(*ONE_CALL[name], dtype=dtype, threads=threads, quantization=quantization)
    decoder = runner._decoder
    if quantization and decoder._native is None:
        pytest.skip("this processor multiplies integers faster without the library")
    assert decoder._native.most > 4
    found = states(drive, runner, prompt)
    vars(decoder)["_native"] = None
    assert found == states(drive, runner, prompt)


@pytest.mark.parametrize("name", SEVERAL_CALLS)
def test_layers_that_are_not_for_one_call(name: str, shaped: Any) -> None:
    assert shaped(*SEVERAL_CALLS[name])._decoder._native is None


@needs_compiler
def test_matrices_as_they_are_are_not_in_it(shaped: Any) -> None:
    native = shaped("Llama", {})._decoder._native
    assert native is not None
    assert native.most == products.FEW_ROWS
    assert shaped("Llama", {}, pack_weights="never")._decoder._native is None
