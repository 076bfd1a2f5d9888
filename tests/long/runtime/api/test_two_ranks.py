"""process/runtime/api/test_two_ranks.py, at length."""

from __future__ import annotations

import os
import random
import signal
from concurrent.futures import ThreadPoolExecutor

import pytest

from runtime.api import Engine
from runtime.protocol.errors import RuntimeFault
from tests.process.runtime.api.test_two_ranks import GREEDY, OPTIONS, pair
from tests.unit.runtime.engine.ranks.ranks_here import rank_processes

LONG_S = 300.0


@pytest.mark.parametrize("seed", range(4))
def test_whatever_befalls_a_rank_every_request_ends_rightly_or_says_why(
    pair: tuple[Engine, Engine], seed: int
) -> None:
    """A rank is killed or stopped at some moment of a batch; the engines of the other tests are spared."""
    dice = random.Random(seed)
    how, victim = (signal.SIGKILL, signal.SIGSTOP)[seed % 2], dice.randrange(2)
    requests = [
        {"input_ids": [dice.randrange(5, 300) for _ in range(dice.randrange(1, 80))],
         "sampling_params": {**GREEDY, "max_new_tokens": dice.randrange(1, 120)}}
        for _ in range(24)
    ]  # fmt: skip
    prompts = [one["input_ids"] for one in requests]
    params = [one["sampling_params"] for one in requests]
    right = [list(one.output_ids) for one in pair[0].generate(prompts, params)]
    others = {one.pid for one in rank_processes()}
    with Engine("pocket", tp_size=2, step_timeout_s=20.0, **OPTIONS) as engine:
        ranks = [one.pid for one in rank_processes() if one.pid not in others]
        with ThreadPoolExecutor(2) as pool:
            batch = pool.submit(engine.generate, prompts, params, on_error="return")
            stream = engine.generate(prompts[0], {**GREEDY, "max_new_tokens": 1500}, stream=True)
            for _ in range(dice.randrange(1, 60)):
                next(stream)
            os.kill(ranks[victim], how)
            found = batch.result(LONG_S)
        told = {
            signal.SIGKILL: f"rank {victim} of the model's process was killed by SIGKILL",
            signal.SIGSTOP: f"did not end on rank {victim} within 16 s",
        }[how]
        for one, ids in zip(found, right, strict=True):
            if isinstance(one, RuntimeFault):
                assert told in str(one)
            else:
                assert list(one.output_ids) == ids
        with pytest.raises(RuntimeFault, match=told):
            engine.generate("a", GREEDY)
