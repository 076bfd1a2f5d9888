"""process/runtime/vision/test_engine.py, at length."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.process.runtime.vision.test_engine import PROMPTS, asked, case, engine, made, right
from tests.unit.runtime.vision.making import TOWERS, Case

SETUPS: list[dict[str, Any]] = [
    {"chunked_prefill_size": 7},
    {"page_size": 4, "chunked_prefill_size": 3, "schedule_policy": "fcfs"},
    {"radix_cache": False, "image_cache_tokens": 1, "chunked_prefill_size": 5},
    {"max_total_tokens": 160, "chunked_prefill_size": 16},  # too small for all: they take turns
    {"speculative_algorithm": "NGRAM"},
    {"runner_process": False},
]


@pytest.mark.parametrize("setup", SETUPS, ids=str)
def test_in_any_set_up(setup: dict[str, Any], case: Case) -> None:
    wanted = right(case)
    with made(case, **setup) as engine:
        for _ in range(2):
            assert [one.output_ids for one in asked(engine, PROMPTS)] == wanted


@pytest.mark.parametrize("words", [{"layout": "new"}, {"tied": True}, {"family": "Qwen2VL"}], ids=str)
def test_other_checkpoints(words: dict[str, Any], checkpoint: Callable[..., Case]) -> None:
    case = checkpoint(**words)
    assert len(TOWERS) == 2
    with made(case, chunked_prefill_size=9) as engine:
        assert [one.output_ids for one in asked(engine, PROMPTS)] == right(case)


def test_two_ranks(case: Case) -> None:
    with made(case, tp_size=2, chunked_prefill_size=7) as engine:
        assert [one.output_ids for one in asked(engine, PROMPTS)] == right(case)


def test_new_weights_make_new_features(case: Case, checkpoint: Callable[..., Case], tmp_path: Any) -> None:
    """What was held of pictures is of no use then."""
    other = checkpoint(layout="new", seed=3)
    with made(case) as engine:
        assert [one.output_ids for one in asked(engine, PROMPTS)] == right(case)
        engine.update_weights_from_disk(str(other.path))
        assert [one.output_ids for one in asked(engine, PROMPTS)] == right(other)
