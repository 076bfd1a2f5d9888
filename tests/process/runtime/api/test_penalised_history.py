"""Penalties from the request down to the draw: which text they are counted over, whatever happened to the
request meanwhile. The draws are made again with numpy."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from torch import Tensor

from runtime.api import Engine
from runtime.engine.sampling.sampler import Sampler
from runtime.plan import Row, TokenMask
from runtime.protocol.io_struct import GenerateOutput

PENALTIES = {"frequency_penalty": 0.6, "presence_penalty": 0.3, "repetition_penalty": 1.4, "temperature": 0}
FORCED = "([a-z]{2,6} is a very good thing; ){3}the end"


class Watched:
    """What a sampler was given and what it drew, by prompt."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.outputs: dict[tuple[int, ...], list[list[int]]] = {}
        self.drawn: list[tuple[int | str, int]] = []  # and what numpy draws
        inner = Sampler.sample

        def sample(
            sampler: Sampler, logits: Tensor, rows: Sequence[Row], masks: Mapping[int, TokenMask], draws: Any
        ) -> list[int | str]:
            before = logits.numpy().astype(np.float64)
            found = inner(sampler, logits, rows, masks, draws)
            for index, row in enumerate(rows):
                self.outputs.setdefault(tuple(row.prompt), []).append(list(row.output))
                best = int(penalised(before[index], row, masks.get(index)).argmax())
                self.drawn.append((found[index], best))
            return found

        monkeypatch.setattr(Sampler, "sample", sample)


def penalised(logits: npt.NDArray[Any], row: Row, mask: TokenMask | None) -> npt.NDArray[Any]:
    params = row.sampling
    seen = sorted({*row.prompt, *row.output})
    factor = params.repetition_penalty
    logits[seen] = np.where(logits[seen] > 0, logits[seen] / factor, logits[seen] * factor)
    counts = np.bincount(np.asarray(row.output, dtype=np.int64), minlength=len(logits))
    logits -= counts * params.frequency_penalty + (counts > 0) * params.presence_penalty
    if mask is not None:
        bits = np.unpackbits(mask.bits.view(np.uint8), bitorder="little")[: len(logits)]
        logits[bits == 0] = -np.inf
    return logits


@pytest.mark.parametrize("retract", [False, True])
def test_the_history_is_the_whole_text(retract: bool, monkeypatch: pytest.MonkeyPatch, pace: Any) -> None:
    watched = Watched(monkeypatch)
    prompts = ["The capital of France is", "Once upon a time a good thing", "1 + 2 =", "Dogs and cats"]
    params: list[dict[str, Any]] = [
        {**PENALTIES, "max_new_tokens": 40, "ignore_eos": True},
        {**PENALTIES, "max_new_tokens": 90, "regex": FORCED},
        {**PENALTIES, "max_new_tokens": 40, "repetition_penalty": 0.7, "min_new_tokens": 20},
        {**PENALTIES, "max_new_tokens": 90, "regex": FORCED, "frequency_penalty": -0.5},
    ]
    here: dict[str, Any] = {"runner_process": False, "threads": 1}  # where its sampler can be watched
    with Engine("pocket", dtype="float32", device="cpu", max_total_tokens=2048, **here) as engine:
        over = threading.Event()

        def disturb() -> None:
            while not over.wait(0.02):
                engine.pause("retract")
                engine.resume()
                if engine.state()["retractions"] > 4:
                    pace.free()

        disturber = threading.Thread(target=disturb)
        if retract:
            pace.hold(0.1)  # so slow until enough was disturbed
            disturber.start()
        outputs: list[GenerateOutput] = engine.generate(prompts, params)
        over.set()
        if retract:
            disturber.join(300)
            assert engine.state()["retractions"] > 4
        ids = [tuple(engine.encode(prompt)) for prompt in prompts]
    for token, best in watched.drawn:
        assert token == best
    assert set(watched.outputs) == set(ids)
    for prompt, output, words in zip(ids, outputs, params, strict=True):
        told = watched.outputs[prompt]
        assert all(seen == output.output_ids[: len(seen)] for seen in told)
        assert all(len(before) < len(after) for before, after in pairwise(told))
        if "regex" in words:
            # Where the regex leaves one token only, nothing is drawn.
            assert 0 < len(told) <= output.meta["decode_steps"]
            assert output.meta["jumped_tokens"] > 10
        else:
            assert len(told) == output.meta["decode_steps"]
            assert [len(seen) for seen in told] == list(range(len(output.output_ids)))
