"""Quantised checkpoints and KV pools in whole models: logits are transformers' with the numbers that the
codes stand for, tokens do not depend on how a text came to be computed."""

from __future__ import annotations

import contextlib
import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from runtime.attention.base import choose
from runtime.attention.pool import KVShape
from runtime.config.engine import EngineConfig
from runtime.config.model import ModelSpec
from runtime.config.runner import RunnerConfig
from runtime.engine import memory
from runtime.engine.runner import TorchRunner
from runtime.layers.dense import Dense
from runtime.layers.int8 import can_multiply
from runtime.layers.quantised.choose import method_for
from runtime.protocol.errors import BadRequest, ModelLoadError
from tests.unit.runtime.engine.ranks.ranks_here import RanksHere
from tests.unit.runtime.engine.sampling.test_logits import AllLogits
from tests.unit.runtime.layers.quantised_tensors import SCHEMES

SETTINGS: dict[str, Any] = {
    "max_total_tokens": 1024, "dtype": "float32", "device": "cpu", "threads": 1, "pack_weights": "never",
}  # fmt: skip
HERE = ("int8", "fp8 of transformers", "int4, zero points", "awq", "gptq")
KV = ("fp8_e4m3", "fp8_e5m2", "bfloat16")


@pytest.fixture(scope="module")
def quantised(tmp_path_factory: pytest.TempPathFactory, tiny: Any) -> Callable[..., Any]:
    """A checkpoint whose layers' matrices are in codes; beside it, in transformers, the numbers they stand
    for."""
    made: dict[tuple[str, str], Any] = {}

    def get(scheme: str, case: str = "llama, tied, biased") -> Any:
        if (scheme, case) in made:
            return made[scheme, case]
        source, path = tiny(case), tmp_path_factory.mktemp("quantised")
        model, tensors = copy.deepcopy(source.model), load_file(source.path / "model.safetensors")
        config, write = SCHEMES[scheme]
        for name, module in model.named_modules():
            if isinstance(module, torch.nn.Linear) and name != "lm_head":
                matrix = write(tensors.pop(f"{name}.weight"))
                own = {part: one for part, one in matrix.tensors.items() if part != "bias"}
                tensors.update((f"{name}.{part}", one) for part, one in own.items())
                module.weight.data.copy_(matrix.numbers)
        save_file(tensors, path / "model.safetensors")
        plain = json.loads((source.path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps({**plain, "quantization_config": config}))
        made[scheme, case] = type(source)(path, model)
        return made[scheme, case]

    return get


def all_logits(path: Path, *, wished: str | None = None, expand: bool = False) -> AllLogits:
    method = method_for(ModelSpec.from_dir(path), wished, Dense(), expand=expand)
    return AllLogits(path, method=method)


@pytest.mark.parametrize("scheme", HERE)
def test_logits_are_those_of_the_numbers(quantised: Any, prompt: Any, drive: Any, scheme: str) -> None:
    case, ids = quantised(scheme), prompt(60, seed=8)
    for expand in (False, True):
        driver = drive(all_logits(case.path, expand=expand))
        seq, seen = driver.new(), []
        for part in (ids[:40], ids[40:59], ids[59:]):
            driver.step([driver.ask(seq, part)])
            seen.append(driver.runner.seen)
        right = case.logits(ids)
        assert right.std() > 0.5
        torch.testing.assert_close(torch.cat(seen), right, atol=3e-4, rtol=1e-4)


@pytest.mark.parametrize("case", ["qwen2", "qwen3", "mistral, window", "phi3", "gemma2", "glm4", "cohere"])
def test_in_other_families(quantised: Any, prompt: Any, drive: Any, case: str) -> None:
    found, ids = quantised("gptq", case), prompt(60, seed=9)
    driver = drive(all_logits(found.path))
    driver.step([driver.ask(driver.new(), ids)])
    torch.testing.assert_close(driver.runner.seen, found.logits(ids), atol=3e-4, rtol=1e-4)


def rewritten(source: Path, path: Path, scheme: str) -> Any:
    """The checkpoint in `source` with its layers' matrices in codes, in `path`; what they stand for, as a
    model of transformers. Routers stay as they are."""
    config, write = SCHEMES[scheme]
    coded, plain = {}, {}
    for name, tensor in load_file(source / "model.safetensors").items():
        stem = name.removesuffix(".weight")
        if stem.endswith("_proj") and tensor.ndim == 2:
            matrix = write(tensor)
            coded |= {f"{stem}.{part}": one for part, one in matrix.tensors.items() if part != "bias"}
            plain[name] = matrix.numbers.contiguous()
        else:
            coded[name] = plain[name] = tensor
    (path / "plain").mkdir()
    values = json.loads((source / "config.json").read_text())
    for tensors, folder, more in (
        (coded, path, {"quantization_config": config}),
        (plain, path / "plain", {}),
    ):
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        (folder / "config.json").write_text(json.dumps({**values, **more}))
    return transformers.AutoModelForCausalLM.from_pretrained(
        path / "plain", dtype=torch.float32, attn_implementation="eager"
    ).eval()


@pytest.mark.parametrize(
    ("case", "scheme"),
    [("qwen3 moe", "fp8, channels"), ("mixtral", "gptq, one group"), ("deepseek v3", "fp8 of transformers")],
)
def test_mixtures_of_experts(
    tiny: Any, tmp_path: Path, prompt: Any, drive: Any, case: str, scheme: str
) -> None:
    """And latent attention."""
    source, ids = tiny(case), prompt(40, seed=4)
    made = type(source)(tmp_path, rewritten(source.path, tmp_path, scheme))
    driver = drive(all_logits(tmp_path))
    driver.step([driver.ask(driver.new(), ids)])
    torch.testing.assert_close(driver.runner.seen, made.logits(ids), atol=5e-4, rtol=1e-3)
    config = RunnerConfig(**{**SETTINGS, "tp_size": 2, "expand_weights": "never"})
    with contextlib.closing(RanksHere(tmp_path, 2, config)) as ranks:
        assert drive(ranks).generate([ids], 6) == [made.greedy(ids, 6)]


@pytest.mark.parametrize("scheme", HERE)
def test_ranks_share_it(quantised: Any, prompt: Any, drive: Any, scheme: str) -> None:
    case = quantised(scheme)
    config = RunnerConfig(**{**SETTINGS, "tp_size": 2, "expand_weights": "never"})
    ids = prompt(30, seed=2)
    with contextlib.closing(RanksHere(case.path, 2, config)) as ranks:
        assert drive(ranks).generate([ids], 8) == [case.greedy(ids, 8)]


def test_ordered_inputs_are_not_shared_out(quantised: Any) -> None:
    config = RunnerConfig(**{**SETTINGS, "tp_size": 2, "expand_weights": "never"})
    with pytest.raises(ModelLoadError, match=r"o_proj' cannot be shared out by its inputs"):
        RanksHere(quantised("gptq, ordered").path, 2, config)


def test_plain_weights_rounded_while_loading(tiny: Any, prompt: Any, drive: Any) -> None:
    """As a model with the rounded numbers, whichever number of ranks shares it."""
    case, ids = tiny("llama"), prompt(30, seed=3)
    model = copy.deepcopy(case.model)
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and name != "lm_head":
            weight = module.weight.data
            scale = weight.abs().amax(1, keepdim=True) / 448
            weight.copy_((weight / scale).to(torch.float8_e4m3fn).float() * scale)
    rounded = type(case)(case.path, model)
    driver = drive(all_logits(case.path, wished="fp8"))
    driver.step([driver.ask(driver.new(), ids)])
    torch.testing.assert_close(driver.runner.seen, rounded.logits(ids), atol=3e-4, rtol=1e-4)
    assert (rounded.logits(ids) - case.logits(ids)).abs().max() > 0.01
    config = RunnerConfig(**{**SETTINGS, "tp_size": 2, "quantization": "fp8"})
    with contextlib.closing(RanksHere(case.path, 2, config)) as ranks:
        assert drive(ranks).generate([ids], 8) == [rounded.greedy(ids, 8)]


@pytest.mark.skipif(not can_multiply(), reason="no products of integers here")
def test_codes_of_int8_are_multiplied_as_integers(quantised: Any, prompt: Any, drive: Any) -> None:
    """With inputs rounded to 8 bits as well: near the numbers' logits, and the same whatever the batch."""
    case, ids = quantised("int8"), prompt(40, seed=5)
    driver = drive(all_logits(case.path, wished="w8a8_int8"))
    driver.step([driver.ask(driver.new(), ids)])
    whole, right = driver.runner.seen, case.logits(ids)
    assert (whole - right).abs().mean() < 0.05 * right.std()
    driver = drive(all_logits(case.path, wished="w8a8_int8"))
    seq, seen = driver.new(), []
    for token in ids:
        driver.step([driver.ask(seq, [token])])
        seen.append(driver.runner.seen)
    apart = (torch.cat(seen) - whole).abs().amax(1)
    # Another order of attention's sums changes last digits, and now and then a number's level.
    assert (apart < 1e-3).float().mean() > 0.8
    assert apart.max() < right.std()


@pytest.mark.parametrize("kept", KV)
def test_a_pool_of_fewer_bits(tiny: Any, prompt: Any, drive: Any, kept: str) -> None:
    """The same tokens in one piece, in chunks and after a shared prefix; and not those of float32's keys."""
    case = tiny("llama")
    config = RunnerConfig(**{**SETTINGS, "kv_cache_dtype": kept})
    ids, ends = prompt(150, seed=11), (prompt(1, seed=12), prompt(9, seed=13))
    with contextlib.closing(TorchRunner.load(case.path, ModelSpec.from_dir(case.path), config)) as runner:
        whole = [drive(runner).generate([[*ids, *end]], 12)[0] for end in ends]
        driver = drive(runner, page=4, seed=1)
        root = driver.new()
        for first, last in ((0, 7), (7, 71), (71, 150)):
            driver.step([driver.ask(root, ids[first:last], sample=False)])
        assert driver.go_on([driver.fork(root) for _ in ends], ends, 12) == whole


def test_a_pool_takes_the_memory_of_its_numbers(tiny: Any) -> None:
    spec, cpu = ModelSpec.from_dir(tiny("llama").path), torch.device("cpu")
    kind = choose("auto", cpu)
    each = {
        dtype: kind.bytes_per_slot(KVShape(spec.num_layers, spec.num_kv_heads, spec.head_dim, dtype, cpu))
        for dtype in (torch.float32, torch.bfloat16, torch.float8_e4m3fn)
    }
    assert each[torch.float32] == 2 * each[torch.bfloat16] == 4 * each[torch.float8_e4m3fn]


def test_memory_of_codes_is_counted(quantised: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    spec, cpu = ModelSpec.from_dir(quantised("awq").path), torch.device("cpu")
    assert memory.code_bits(spec, None, expand=False) == 4
    assert memory.code_bits(spec, None, expand=True) is None
    whole, codes = memory.weight_bytes(spec, torch.float32), memory.weight_bytes(spec, torch.float32, 4)
    embedding = spec.vocab_size * spec.hidden_size * 4
    assert codes - embedding == pytest.approx((whole - embedding) / 8, rel=0.1)
    monkeypatch.setattr(memory, "available_bytes", lambda device: (whole + codes) // 2)
    memory.check_weights_fit(spec, torch.float32, cpu, "here", 1, 4)
    with pytest.raises(ModelLoadError, match="the weights need"):
        memory.check_weights_fit(spec, torch.float32, cpu, "here")
    assert not memory.expands("auto", whole, cpu)
    assert memory.expands("always", whole, cpu)
    assert memory.expands("auto", codes // 2, cpu)
    assert not memory.expands("auto", 1, torch.device("cuda"))


def test_wishes_that_cannot_be_had(quantised: Any, tiny: Any) -> None:
    awq, plain = str(quantised("awq").path), str(tiny("llama").path)
    EngineConfig.of({"model": awq, "quantization": "awq"}).locate()
    EngineConfig.of({"model": plain, "quantization": "fp8"}).locate()
    EngineConfig.of({"model": awq, "quantization": "w8a8_int8"}).locate()
    with pytest.raises(BadRequest, match="quantization: is 'fp8', but the checkpoint is quantised as 'awq'"):
        EngineConfig.of({"model": awq, "quantization": "fp8"}).locate()
    with pytest.raises(BadRequest, match=r"is 'awq', but the checkpoint is not quantised; possible.*fp8"):
        EngineConfig.of({"model": plain, "quantization": "awq"}).locate()
    with pytest.raises(BadRequest, match="kv_cache_dtype: must be one of auto, bfloat16, fp8_e4m3, fp8_e5m2"):
        EngineConfig.of({"model": plain, "kv_cache_dtype": "int4"})
    with pytest.raises(BadRequest, match="expand_weights: must be one of auto, always, never"):
        EngineConfig.of({"model": plain, "expand_weights": "sometimes"})
