"""long/runtime/engine/test_graphs.py, at length."""

from __future__ import annotations

from typing import Any

import pytest

from tests.long.runtime.engine.test_graphs import ON_GPU, generated, load

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@pytest.mark.parametrize(
    "name",
    [
        "llama",
        "mistral, window",
        "gpt oss",
        "deepseek v3",
        "mixtral",
        "gemma2",
        "gpt_neox",
        "llama4",
        "cohere",
    ],
)
def test_kernels_say_what_transformers_says(name: str, tiny: Any, load: Any, drive: Any, prompt: Any) -> None:
    case = tiny(name)
    prompts, outs = generated(load(case.path, cuda_graph=ON_GPU), drive, prompt, 4)  # queued ahead, too
    assert outs == [case.greedy(ids, 4) for ids in prompts]
