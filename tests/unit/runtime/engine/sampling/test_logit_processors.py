"""Logit processors: the bundled ones, and what happens when one misbehaves."""

from __future__ import annotations

import itertools
import math
import subprocess
import sys
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from runtime.engine.sampling.logit_processors import (
    OUTPUT_IDS,
    PROCESSORS,
    PROMPT_IDS,
    LogitProcessor,
    Processors,
)
from runtime.engine.sampling.sampler import Sampler
from runtime.plan import Row, Run, TokenMask
from runtime.protocol.errors import BadRequest
from runtime.protocol.registry import Registry
from runtime.protocol.sampling import SamplingParams

VOCAB = 50
_SEQS = itertools.count(1)


class Troubled(LogitProcessor):
    """Does what `how` says, so that a request can ask for trouble."""

    calls: ClassVar[list[int]] = []

    def process(self, logits: torch.Tensor, params: list[dict[str, Any]]) -> torch.Tensor:
        self.calls.append(len(params))
        for index, mine in enumerate(params):
            match mine.get("how"):
                case "raise":
                    logits[:] = 0.0  # what it did to the others before must not matter
                    raise RuntimeError("no luck")
                case "nan":
                    logits[index] = math.nan
                case "shape":
                    return logits[:, 1:]
                case "nothing":
                    logits[index] = -math.inf
                case "prompt":
                    logits[index, mine[PROMPT_IDS][0]] = 1e6
        return logits


TABLE: Registry[type[LogitProcessor]] = Registry(
    "logit processor",
    {**{name: PROCESSORS._lines[name] for name in PROCESSORS}, "troubled": f"{__name__}:Troubled"},
)


def row(name: str | None, output: Any = (), prompt: Any = (), **params: Any) -> Row:
    sampling = SamplingParams(temperature=0.0, custom_logit_processor=name, custom_params=params or None)
    return Row(next(_SEQS), (0,), 0, (Run(0, 1),), sampling, prompt=prompt, output=output)


def draw(*rows: Row, masks: Mapping[int, TokenMask] | None = None) -> list[int | str]:
    """Id 0 is the best, then 1, and so on."""
    logits = torch.arange(VOCAB, 0.0, -1.0).expand(len(rows), VOCAB).clone()
    return Sampler(Processors(TABLE)).sample(logits, rows, masks or {}, [0] * len(rows))


def mask(*ids: int) -> TokenMask:
    flags = np.zeros(64, dtype=np.uint8)
    flags[list(ids)] = 1
    return TokenMask(np.packbits(flags, bitorder="little").view(np.uint32), np.array(ids, dtype=np.int64))


def test_bundled_ones_side_by_side() -> None:
    assert draw(
        row(None),
        row("allowed_token_ids", allowed_token_ids=[9, 7, 8]),
        row("allowed_token_ids", allowed_token_ids=[33]),
        row("deterministic", token_id=41),
        row("bad_words", banned_token_ids=[0, 1]),
        row("bad_words", bad_words_ids=[[5, 0], [3, 1]], output=(4, 5)),
        row("bad_words", bad_words_ids=[[5, 0], [3, 1], [0]], output=(4, 3)),
        row("bad_words", bad_words_ids=[[6, 5, 0]], output=(5,)),
    ) == [0, 7, 33, 41, 2, 1, 2, 0]


@pytest.mark.parametrize(
    ("output", "token"),
    [
        ((), 0),
        ((1, 1), 0),
        ((1, 1, 1), 20),  # the budget is spent
        ((1, 1, 1, 20), 21),
        ((1, 1, 1, 20, 21), 0),  # it ended
        ((1, 20, 21, 1, 1, 1), 0),  # it ended by itself
        ((1, 1, 20), 21),  # it was about to
        ((1, 1, 1, 1, 1), 20),
        ((1, 1, 1, 20, 1), 20),  # cannot happen when forced; then once more
    ],
)
def test_thinking_budget(output: tuple[int, ...], token: int) -> None:
    assert draw(row("thinking_budget", output, thinking_budget=3, think_end_ids=[20, 21])) == [token]


def test_thinking_that_begins_later() -> None:
    words = {"thinking_budget": 2, "think_end_ids": [20], "think_start_ids": [10, 11]}
    outputs = [(1, 1, 1, 1), (1, 1, 10, 11, 1), (1, 1, 10, 11, 1, 1), (20, 10, 11, 1, 1), (10, 11, 1, 1, 20)]
    assert draw(*(row("thinking_budget", output, **words) for output in outputs)) == [0, 0, 20, 20, 0]
    assert draw(row("thinking_budget", (), thinking_budget=0, think_end_ids=[20])) == [20]


def test_trouble_stays_with_its_request() -> None:
    Troubled.calls.clear()
    answers = draw(
        row("troubled"),
        row("troubled", how="raise"),
        row(None),
        row("troubled", how="nan"),
        row("troubled", how="prompt", prompt=(17,)),
        row("troubled", how="shape"),
        row("troubled", how="nothing"),
        row("deterministic", token_id=3),
    )
    assert [answer for answer in answers if isinstance(answer, int)] == [0, 0, 17, 3]
    assert "'troubled' failed: RuntimeError: no luck" in str(answers[1])
    assert "NaN" in str(answers[3])
    assert "shape" in str(answers[5])
    assert "'troubled' together allow no token" in str(answers[6])
    assert Troubled.calls == [6, 1, 1, 1, 1, 1, 1], "all at once, and one by one only when that fails"


def test_masks_have_the_last_word() -> None:
    allowed = mask(4, 5, 6)
    rows = [row("allowed_token_ids", allowed_token_ids=ids) for ids in ([6, 1], [1, 2])]
    answers = draw(*rows, masks={0: allowed, 1: TokenMask(allowed.bits)})
    assert answers[0] == 6
    assert "allow no token" in str(answers[1])


@pytest.mark.parametrize(
    ("words", "where"),
    [
        ({"custom_logit_processor": "nobody"}, "custom_logit_processor"),
        ({"custom_params": {"a": 1}}, "custom_params"),
        ({"custom_logit_processor": "troubled", "custom_params": {OUTPUT_IDS: [1]}}, "custom_params"),
        ({"custom_logit_processor": "deterministic"}, "token_id"),
        ({"custom_logit_processor": "deterministic", "custom_params": {"token_id": VOCAB}}, "token_id"),
        (
            {"custom_logit_processor": "deterministic", "custom_params": {"token_id": 1, "x": 1}},
            "custom_params",
        ),
        (
            {"custom_logit_processor": "allowed_token_ids", "custom_params": {"allowed_token_ids": []}},
            "allowed",
        ),
        ({"custom_logit_processor": "bad_words"}, "bad_words_ids"),
        ({"custom_logit_processor": "bad_words", "custom_params": {"bad_words_ids": [[]]}}, "bad_words_ids"),
        ({"custom_logit_processor": "bad_words", "custom_params": {"bad_words_ids": 3}}, "bad_words_ids"),
        ({"custom_logit_processor": "thinking_budget", "custom_params": {"thinking_budget": -1}}, "thinking"),
        (
            {"custom_logit_processor": "thinking_budget", "custom_params": {"thinking_budget": 1}},
            "think_end_ids",
        ),
    ],
)
def test_refused(words: dict[str, Any], where: str) -> None:
    with pytest.raises(BadRequest) as caught:
        Processors(TABLE).verify(SamplingParams(**words), VOCAB)
    assert where in str(caught.value.where)


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(BadRequest, match="allowed_token_ids, bad_words, deterministic, thinking_budget"):
        Processors().get("nobody")


def test_taken() -> None:
    for words in (
        {},
        {"custom_logit_processor": "troubled", "custom_params": {"how": "nan"}},
        {"custom_logit_processor": "bad_words", "custom_params": {"banned_token_ids": [1]}},
    ):
        Processors(TABLE).verify(SamplingParams(**words), VOCAB)


def test_names_are_known_without_torch() -> None:
    code = (
        "import sys; from runtime.engine.sampling.logit_processors import PROCESSORS; "
        "print(sorted(PROCESSORS), 'torch' in sys.modules)"
    )
    made = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=True
    )
    assert made.stdout.strip().endswith("False")
