"""Greedy output of the whole engine is transformers', whatever else is in the batch, in any set-up."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from runtime.api import Engine
from runtime.protocol.sampling import SamplingParams

VOCAB = 160
SETUPS: list[dict[str, Any]] = [
    {},
    {"radix_cache": False, "chunked_prefill_size": 7},
    {"page_size": 16, "chunked_prefill_size": 50},
    {"page_size": 4, "chunked_prefill_size": 1, "max_running_requests": 3},
    {
        "schedule_policy": "fcfs",
        "max_total_tokens": 384,
        "page_size": 2,
    },  # too small for all: they take turns
]


def with_tokenizer(path: Path) -> None:
    """Put one beside the weights; prompts are given as ids, so it need not be a sensible one."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())[:VOCAB]
    tokenizer = Tokenizer(models.BPE(vocab={letter: n for n, letter in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(path / "tokenizer.json"))


@pytest.fixture
def checkpoint(case: Any) -> Any:
    with_tokenizer(case.path)
    return case


def test_sixty_four_greedy_tokens(checkpoint: Any) -> None:
    draw = random.Random(len(str(checkpoint.path)))
    shared = [draw.randrange(3, VOCAB) for _ in range(70)]
    prompts = [shared[:cut] + [draw.randrange(3, VOCAB) for _ in range(own)] for cut, own in CUTS]
    params = SamplingParams(max_new_tokens=64, temperature=0.0, ignore_eos=True)
    wanted: list[list[int]] = []
    for setup in SETUPS:
        with Engine(str(checkpoint.path), dtype="float32", **{"max_total_tokens": 2048, **setup}) as engine:
            together = engine.generate(prompts, params)
            again = engine.generate(prompts[-1], params)
        if not wanted:
            wanted = [out.output_ids for out in together]
            for prompt, output in zip(prompts, wanted):
                # Each of them is the best after those before it: so transformers would generate them.
                best = checkpoint.logits(prompt + output)[len(prompt) - 1 : -1].argmax(-1)
                assert output == best.tolist()
                assert len(output) == 64
        assert [out.output_ids for out in together] == wanted, setup
        assert again.output_ids == wanted[-1], setup
        if setup.get("radix_cache", True) and "max_total_tokens" not in setup:
            assert again.meta["cached_tokens"] >= len(prompts[-1]) - setup.get("page_size", 1)


CUTS = ((70, 9), (70, 1), (33, 20), (0, 5), (70, 30))
"""How much of the shared prefix each prompt has, and how many tokens of its own."""
