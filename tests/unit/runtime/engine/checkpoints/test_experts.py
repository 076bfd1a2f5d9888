"""Mixtures of experts: logits and greedy tokens of every family equal transformers', also on two ranks."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from runtime.config.model import ModelSpec
from runtime.config.runner import RunnerConfig
from runtime.disagg.transfer.memory import JoinedMemory
from runtime.engine.runner import TorchRunner
from runtime.kernels.moe import plain_fused_experts
from runtime.layers.dense import Dense
from runtime.layers.lora.linear import Adapted
from runtime.layers.quantised.choose import method_for
from runtime.models import experts
from runtime.plan import Row, Run, Segment, StepPlan
from runtime.protocol.errors import ModelLoadError
from runtime.protocol.sampling import SamplingParams
from tests.process.runtime.engine.test_runners import ask
from tests.unit.runtime.engine.checkpoints.expert_families import EXPERTS
from tests.unit.runtime.engine.ranks.ranks_here import ranks
from tests.unit.runtime.engine.sampling.test_logits import AllLogits
from tests.unit.runtime.layers.quantised_tensors import SCHEMES

TOLERANCE = 2e-4
GREEDY = SamplingParams(temperature=0.0)


def _close(got: torch.Tensor, right: torch.Tensor) -> None:
    assert got.shape == right.shape
    assert (got - right).abs().max() < TOLERANCE


@pytest.mark.parametrize("name", EXPERTS)
def test_logits(name: str, tiny: Any, prompt: Any, drive: Any) -> None:
    """A prompt in chunks of odd sizes, rows that share it in one batch, and a step of all of them."""
    case, ids, ends = tiny(name), prompt(90, seed=1), [prompt(n, seed=4 + n) for n in (1, 3, 20)]
    driver = drive(AllLogits(case.path), page=4, seed=2)
    root, seen, first = driver.new(), [], 0
    for size in (1, 7, 50, 32):
        driver.step([driver.ask(root, ids[first : first + size])])
        seen.append(driver.runner.seen)
        first += size
    right = case.logits(ids)
    assert right.std() > 0.5  # or the comparison would say little
    _close(torch.cat(seen), right)
    leaves = [driver.fork(root) for _ in ends]
    driver.step([driver.ask(leaf, end) for leaf, end in zip(leaves, ends)])
    _close(driver.runner.seen, torch.cat([case.logits([*ids, *end])[90:] for end in ends]))
    driver.step([driver.ask(leaf, [9]) for leaf in leaves])
    _close(driver.runner.seen, torch.stack([case.logits([*ids, *end, 9])[-1] for end in ends]))


@pytest.mark.parametrize("size", [2])
@pytest.mark.parametrize("name", EXPERTS)
def test_greedy_text_of_ranks_is_the_models(name: str, size: int, tiny: Any, drive: Any, prompt: Any) -> None:
    case, prompts = tiny(name), [prompt(length, seed=length) for length in (1, 40)]
    right = [case.greedy(ids, 8) for ids in prompts]
    with ranks(case.path, size) as made:
        assert drive(made, page=1, seed=1).generate(prompts, 8, chunk=17) == right


@pytest.mark.parametrize(("prefill", "decode"), [(1, 2), (2, 1)])
def test_latents_go_on_with_another_number_of_ranks(
    tiny: Any, prompt: Any, prefill: int, decode: int
) -> None:
    """Each rank keeps the one key head, whole."""
    case, ids = tiny("deepseek v3"), prompt(30)
    right = case.greedy(ids, 2)
    with ranks(case.path, prefill) as source, ranks(case.path, decode) as target:
        there, here = (
            JoinedMemory([runner.kv_memory for runner in made.runners]) for made in (source, target)
        )
        (first,) = ask(source, StepPlan((Row(1, tuple(ids), 0, (Run(10, 30),), GREEDY),), ()))
        order = here.layout.order
        data = there.read([Run(10, 30)], there.layout.span, order)
        here.write([Run(50, 30)], here.layout.span, order, data)
        row = Row(1, (right[0],), 30, (Run(90, 1),), GREEDY)
        (second,) = ask(target, StepPlan((row,), (Segment((Run(50, 30),), (0,), 0),)))
    assert [first.token, second.token] == right


def test_codes_of_four_bits_are_the_numbers_they_stand_for(
    tmp_path: Path, make: Any, prompt: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """gpt-oss as it is published, beside the same with plain weights; on one rank and on two, whose parts of
    the width do not end where codes do that share a scale."""
    family, fields = EXPERTS["gpt oss"]
    monkeypatch.setitem(EXPERTS, "wide", (family, {**fields, "hidden_size": 64, "intermediate_size": 96}))
    plain, codes = tmp_path / "plain", tmp_path / "codes"
    make(plain, "wide")
    data, random = load_file(plain / "model.safetensors"), torch.Generator().manual_seed(3)
    coded = dict(data)
    for name in [name for name in data if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        count, inputs, outputs = data[name].shape
        shape = (count, outputs, inputs // 32)
        blocks = torch.randint(0, 256, (*shape, 16), generator=random, dtype=torch.uint8)
        scales = torch.randint(122, 126, shape, generator=random, dtype=torch.uint8)
        coded |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        del coded[name]
        data[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32).contiguous()
    codes.mkdir()
    save_file(data, plain / "model.safetensors")
    save_file(coded, codes / "model.safetensors")
    config = json.loads((plain / "config.json").read_text())
    (codes / "config.json").write_text(
        json.dumps({**config, "quantization_config": {"quant_method": "mxfp4"}})
    )
    ids, found = prompt(20), []
    for path, size in ((plain, 1), (codes, 1), (codes, 2)):
        with ranks(path, size) as made:
            row = Row(
                1, tuple(ids), 0, (Run(0, 20),), SamplingParams(), scores=tuple((at, 7) for at in range(20))
            )
            (result,) = ask(made, StepPlan((row,), ()))
            found.append(result.scores)
    assert found[0] == found[1] == pytest.approx(found[2], abs=1e-4)
    assert len({round(score, 3) for score in found[0]}) > 10


def test_layers_that_predict_further_tokens_are_left_out(tmp_path: Path, make: Any) -> None:
    case = make(tmp_path, "deepseek v3")
    data = load_file(tmp_path / "model.safetensors")
    save_file({**data, "model.layers.3.eh_proj.weight": torch.ones(2)}, tmp_path / "model.safetensors")
    AllLogits(case.path)
    save_file({**data, "model.layers.4.eh_proj.weight": torch.ones(2)}, tmp_path / "model.safetensors")
    with pytest.raises(ModelLoadError, match=r"no place for: 'model.layers.4.eh_proj.weight'"):
        AllLogits(case.path)


def test_the_pool_keeps_latents_alone(tiny: Any) -> None:
    runner = AllLogits(tiny("deepseek v3").path)
    assert runner.attention.pool.kv.shape[1:] == (3, 2, 28)  # latent 20 and turned key 8, for 4 heads


@pytest.mark.parametrize("name", ["qwen2 moe", "llama4", "deepseek v2"])
def test_adapters_are_for_matrices_that_all_tokens_go_through(name: str, tiny: Any) -> None:
    method = Adapted(Dense())
    AllLogits(tiny(name).path, method=method)
    names = {part.name for linear in method.linears for part in linear.parts}
    assert not any(".experts." in name for name in names)
    assert any(".shared_expert" in name for name in names)
    assert any(name.endswith("self_attn.o_proj") for name in names)


@pytest.mark.parametrize(
    ("name", "fields", "told"),
    [
        ("olmoe", {"clip_qkv": 8.0}, "'clip_qkv' is not supported"),
        ("deepseek v2", {"topk_method": "noisy"}, "'topk_method' 'noisy' is not supported; known: greedy"),
        ("deepseek v2", {"norm_topk_prob": True}, "'norm_topk_prob' true is not supported"),
        ("deepseek v2", {"attention_bias": True}, "'attention_bias' true is not supported"),
        ("deepseek v2", {"qk_rope_head_dim": 7}, "'qk_rope_head_dim' must be even"),
        ("deepseek v3", {"rope_interleave": False}, "'rope_interleave' false is not supported"),
        (
            "deepseek v3",
            {"topk_method": "greedy"},
            "'topk_method' 'greedy' is not supported; known: noaux_tc",
        ),
        ("deepseek v3", {"scoring_func": "softmax"}, "'scoring_func' 'softmax' is not supported"),
        ("llama4", {"no_rope_layers": [1]}, "'no_rope_layers' has 1 entries for 3 layers"),
        ("mixtral", {"num_experts_per_tok": 6}, r"\(6\) is more than the 5 experts"),
        ("mixtral", {"quantization_config": {"quant_method": "mxfp5"}}, "'mxfp5' is not supported"),
    ],
)
def test_what_is_not_computed_is_refused(
    name: str, fields: dict[str, Any], told: str, tiny: Any, tmp_path: Path
) -> None:
    config = json.loads((tiny(name).path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, **fields}))
    with pytest.raises(ModelLoadError, match=told):
        ModelSpec.from_dir(tmp_path)


def test_llama_4_beside_a_tower(tiny: Any, prompt: Any, drive: Any, tmp_path: Path) -> None:
    """As transformers 5.23 saves Llama4ForConditionalGeneration; what the tower is made of is left out."""
    case, ids = tiny("llama4"), prompt(20)
    data = load_file(case.path / "model.safetensors")
    tower = {
        "vision_model.class_embedding": torch.ones(3),
        "multi_modal_projector.linear_1.weight": torch.ones(2),
    }
    save_file(
        {f"language_model.{name}": one for name, one in data.items()} | tower, tmp_path / "model.safetensors"
    )
    config = json.loads((case.path / "config.json").read_text())
    config["attn_temperature_tuning"] = 4  # a word of older files
    whole = {"architectures": ["Llama4ForConditionalGeneration"], "text_config": config, "vision_config": {}}
    (tmp_path / "config.json").write_text(json.dumps(whole))
    driver = drive(AllLogits(tmp_path))
    driver.step([driver.ask(driver.new(), ids)])
    _close(driver.runner.seen, case.logits(ids))


def test_contexts_of_llama_4_end_with_the_first_chunk(tiny: Any, tmp_path: Path) -> None:
    config = json.loads((tiny("llama4").path / "config.json").read_text())
    for chunk, longest in ((100, 100), (9000, 512), (None, 512)):
        (tmp_path / "config.json").write_text(json.dumps({**config, "attention_chunk_size": chunk}))
        assert ModelSpec.from_dir(tmp_path).max_position_embeddings == longest


@pytest.mark.parametrize("name", ["qwen2 moe", "deepseek v3"])
def test_experts_and_latents_in_codes(name: str, tiny: Any, prompt: Any, drive: Any, tmp_path: Path) -> None:
    """The same logits as with the numbers that the codes stand for."""
    case, seen = tiny(name), []
    config, write = SCHEMES["fp8 of transformers"]
    numbers = load_file(case.path / "model.safetensors")
    coded = dict(numbers)
    for matrix in [
        one.removesuffix(".weight") for one in numbers if one.endswith(("proj.weight", "mqa.weight"))
    ]:
        made = write(coded.pop(f"{matrix}.weight"))
        coded |= {f"{matrix}.{part}": tensor for part, tensor in made.tensors.items()}
        numbers[f"{matrix}.weight"] = made.numbers
    plain = json.loads((case.path / "config.json").read_text())
    for data, more in ((numbers, {}), (coded, {"quantization_config": config})):
        save_file(
            {name: tensor.contiguous() for name, tensor in data.items()}, tmp_path / "model.safetensors"
        )
        (tmp_path / "config.json").write_text(json.dumps({**plain, **more}))
        method = method_for(ModelSpec.from_dir(tmp_path), None, Dense(), expand=False)
        driver = drive(AllLogits(tmp_path, method=method))
        driver.step([driver.ask(driver.new(), prompt(40))])
        seen.append(driver.runner.seen)
    _close(*seen)


@pytest.mark.parametrize("name", ["qwen3 moe", "gpt oss", "llama4"])
def test_experts_side_by_side(
    name: str, tiny: Any, prompt: Any, drive: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on GPUs, with the kernel's twin."""
    asked: list[str] = []

    def twin(kernel: str, device: torch.device) -> Any:
        asked.append(kernel)
        return plain_fused_experts

    monkeypatch.setattr(experts, "kernel", twin)
    case, ids = tiny(name), prompt(20)
    driver = drive(AllLogits(case.path, method=Dense()))
    driver.step([driver.ask(driver.new(), ids)])
    _close(driver.runner.seen, case.logits(ids))
    assert set(asked) == {"fused_experts"}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", EXPERTS)
def test_greedy_text_on_a_gpu_is_the_models(name: str, tiny: Any, prompt: Any, drive: Any) -> None:
    case, prompts = tiny(name), [prompt(length, seed=length) for length in (1, 40)]
    config = RunnerConfig(max_total_tokens=1024, dtype="float32", device="cuda", seed=7)
    with contextlib.closing(TorchRunner.load(case.path, ModelSpec.from_dir(case.path), config)) as runner:
        assert drive(runner).generate(prompts, 8, chunk=17) == [case.greedy(ids, 8) for ids in prompts]
