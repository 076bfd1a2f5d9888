"""The same answers on CUDA as on the CPU."""

from __future__ import annotations

import pytest
import torch

from runtime.api import Engine
from runtime.protocol.constraint import Constraint
from runtime.protocol.sampling import SamplingParams

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

PROMPTS = [
    f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
    for question in ("Who rules Karsk?", "What is 47 + 38?", "Which river runs through Zembla?")
]


def test_greedy_output_equals_the_cpu() -> None:
    params = SamplingParams(max_new_tokens=32, temperature=0.0)
    outputs = {}
    for device in ("cpu", "cuda"):
        with Engine("pocket", device=device, dtype="float32", max_total_tokens=4096) as engine:
            outputs[device] = [out.output_ids for out in engine.generate(PROMPTS, params)]
    assert outputs["cpu"] == outputs["cuda"]


def test_constraint_and_bfloat16_on_cuda() -> None:
    with Engine("pocket", device="cuda", dtype="bfloat16", max_total_tokens=4096) as engine:
        out = engine.generate(
            PROMPTS[1], SamplingParams(max_new_tokens=16), constraint=Constraint("regex", "[0-9]{2}")
        )
    assert len(out.text) == 2
    assert out.text.isdigit()


def test_kernels_and_graphs_say_what_plain_torch_says() -> None:
    """Rows of padded numbers, a prefix in common, two draws."""
    params = [SamplingParams(max_new_tokens=24, temperature=0.0)] * 3
    params += [SamplingParams(max_new_tokens=24, temperature=0.8, top_p=0.9, seed=seed) for seed in (1, 2)]
    prompts = [*PROMPTS, PROMPTS[0], PROMPTS[1]]
    outputs = []
    for attention, graph in (("torch_views", False), ("triton", False), ("triton", True)):
        with Engine(
            "pocket",
            device="cuda",
            dtype="float32",
            max_total_tokens=4096,
            attention=attention,
            cuda_graph=graph,
        ) as engine:
            outputs.append([out.output_ids for out in engine.generate(prompts, params)])
    assert outputs[0] == outputs[1] == outputs[2]
