"""What is wrong with an adapter's files is an error that names file, tensor or field."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from runtime.layers.linear import Projection
from runtime.layers.lora import peft
from runtime.layers.lora.peft import Target, read
from runtime.protocol.errors import AdapterError
from tests.unit.runtime.lora.making import make_adapter, write_config

NAME = "model.layers.0.self_attn.q_proj"
KEY = f"base_model.model.{NAME}"
FIELDS = {"r": 4, "lora_alpha": 8.0}


@pytest.fixture(scope="module")
def original(tiny: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_adapter(
        tmp_path_factory.mktemp("peft") / "a", tiny("llama").model, modules=["q_proj"], layers=[0]
    ).path


@pytest.fixture
def copied(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "copy"))


def load(path: Path, max_rank: int | None = None, own: range | None = None) -> Any:
    targets = {peft.plain(NAME): [Target(Projection(NAME, 64, own), 48, None)]}
    return {one.name: made for one, made in read(path, targets, torch.float32, max_rank).items()}


def change(path: Path, act: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    tensors = load_file(path / peft.WEIGHTS)
    act(tensors)
    save_file(tensors, path / peft.WEIGHTS)


def test_the_scale_is_in_the_second_factor(copied: Path) -> None:
    tensors = load_file(copied / peft.WEIGHTS)
    up = tensors[f"{KEY}.lora_B.weight"]
    for fields, scale in (
        (FIELDS, 2.0),
        ({**FIELDS, "use_rslora": True}, 4.0),
        ({**FIELDS, "r": 9, "rank_pattern": {"q_proj": 4}}, 2.0),
        ({**FIELDS, "alpha_pattern": {r"layers\.[01]\.self_attn\..*": 2.0, "q_proj": 1.0}}, 0.5),
        ({**FIELDS, "alpha_pattern": {"proj": 1.0, r"layers\.1\..*": 2.0}}, 2.0),
    ):
        write_config(copied, **fields)
        found = load(copied)[NAME]
        assert found.down.equal(tensors[f"{KEY}.lora_A.weight"])
        assert found.up.equal(up * scale)
    assert load(copied, own=range(8, 24))[NAME].up.equal((up * 2.0)[8:24])


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"peft_type": "IA3"}, "IA3"),
        ({"r": 0}, "r must be"),
        ({"r": 8}, r"lora_A.weight' has shape \[4, 48\], \[8, 48\] fits"),
        ({"lora_alpha": "8"}, "lora_alpha"),
        ({"bias": "all"}, "bias"),
        ({"use_dora": True}, "use_dora"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"target_parameters": ["experts"]}, "target_parameters"),
        ({"init_lora_weights": "pissa_niter_16"}, "pissa"),
        ({"alpha_pattern": {"(": 3}}, "no regular expression"),
        ({"alpha_pattern": {"q_proj": "3"}}, "has the value '3'"),
        ({"rank_pattern": ["q_proj"]}, "must be objects"),
    ],
)
def test_configurations_that_are_refused(copied: Path, fields: dict[str, Any], said: str) -> None:
    write_config(copied, **{**FIELDS, **fields})
    with pytest.raises(AdapterError, match=said) as found:
        load(copied)
    assert str(copied) in str(found.value)


@pytest.mark.parametrize(
    ("act", "said"),
    [
        (lambda tensors: tensors.clear(), "no tensors"),
        (lambda tensors: tensors.pop(f"{KEY}.lora_B.weight"), "q_proj.lora_B.weight' is missing"),
        (lambda tensors: tensors.update({"x": torch.zeros(1)}), "holds 'x'"),
        (
            lambda tensors: tensors.update({"base_model.model.lm_head.lora_A.weight": torch.zeros(4, 48)}),
            "adapts 'lm_head'",
        ),
        (
            lambda tensors: tensors.update({f"{KEY}.lora_B.weight": torch.zeros(63, 4)}),
            r"\[63, 4\], \[64, 4\] fits",
        ),
        (
            lambda tensors: tensors.update({f"{KEY}.lora_A.weight": torch.zeros(4, 48).int()}),
            "torch.int32",
        ),
        (
            lambda tensors: tensors.update({f"{KEY}.lora_A.weight": torch.full((4, 48), torch.nan)}),
            "not finite",
        ),
    ],
)
def test_tensors_that_are_refused(copied: Path, act: Any, said: str) -> None:
    change(copied, act)
    with pytest.raises(AdapterError, match=said):
        load(copied)


def test_the_text_model_has_several_names(copied: Path) -> None:
    """Of towers beside it only their own."""
    whole = load(copied)[NAME]
    for name, there in (
        ("model.language_model.layers.0.self_attn.q_proj", True),
        ("language_model.model.layers.0.self_attn.q_proj", True),
        ("model.vision_tower.layers.0.self_attn.q_proj", False),
        ("model.layers.1.self_attn.q_proj", False),
    ):
        tensors = {key.replace(NAME, name): value for key, value in load_file(copied / peft.WEIGHTS).items()}
        changed = Path(shutil.copytree(copied, copied / name))
        save_file(tensors, changed / peft.WEIGHTS)
        if there:
            assert load(changed)[NAME].up.equal(whole.up)
        else:
            with pytest.raises(AdapterError, match="cannot be adapted"):
                load(changed)


def test_files_that_are_missing_or_broken(copied: Path, tmp_path: Path) -> None:
    with pytest.raises(AdapterError, match="max_lora_rank is 3"):
        load(copied, max_rank=3)
    (copied / peft.WEIGHTS).write_bytes(b"no tensors")
    with pytest.raises(AdapterError, match="not a whole safetensors file"):
        load(copied)
    (copied / peft.WEIGHTS).unlink()
    with pytest.raises(AdapterError, match=r"holds no adapter_model.safetensors.*pickled"):
        load(copied)
    (copied / peft.CONFIG).write_text("{")
    with pytest.raises(AdapterError, match="not valid JSON"):
        load(copied)
    with pytest.raises(AdapterError, match=r"holds no adapter_config\.json"):
        load(tmp_path / "nowhere")
