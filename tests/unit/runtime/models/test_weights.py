"""Checkpoints on disk: single or sharded, tied or not; what is broken is named with file and tensor."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from runtime.config.model import ModelSpec
from runtime.layers import weights
from runtime.layers.dense import Dense
from runtime.models.decoder import Decoder
from runtime.protocol.errors import ModelLoadError

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 20,
    "hidden_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 12,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5000.0,
    "max_position_embeddings": 64,
}


def tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = {"model.embed_tokens.weight": (20, 8), "model.norm.weight": (8,), "lm_head.weight": (20, 8)}
    for layer in range(2):
        for name, shape in {
            "input_layernorm": (8,),
            "post_attention_layernorm": (8,),
            "self_attn.q_proj": (8, 8),
            "self_attn.k_proj": (4, 8),
            "self_attn.v_proj": (4, 8),
            "self_attn.o_proj": (8, 8),
            "mlp.gate_proj": (12, 8),
            "mlp.up_proj": (12, 8),
            "mlp.down_proj": (8, 12),
        }.items():
            shapes[f"model.layers.{layer}.{name}.weight"] = shape
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def write(path: Path, data: dict[str, torch.Tensor], **changes: Any) -> Path:
    (path / "config.json").write_text(json.dumps({**CONFIG, **changes}))
    save_file(data, path / "model.safetensors")
    return path


def shard(path: Path, data: dict[str, torch.Tensor], **changes: Any) -> Path:
    (path / "config.json").write_text(json.dumps({**CONFIG, **changes}))
    names = sorted(data)
    files = {
        name: f"model-0000{1 + (index >= len(names) // 2)}-of-00002.safetensors"
        for index, name in enumerate(names)
    }
    for file in set(files.values()):
        save_file({name: data[name] for name in names if files[name] == file}, path / file)
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
    return path


def load(path: Path, dtype: torch.dtype = torch.float32) -> Decoder:
    return Decoder.load(path, ModelSpec.from_dir(path), dtype, torch.device("cpu"), Dense())


def same(one: Decoder, other: Decoder) -> bool:
    """By the numbers: one pass without attention's past."""
    ids, positions = torch.arange(5), torch.arange(5)
    outs = [
        model.logits(model.hidden(ids, positions, lambda layer, qkv: qkv[:, :2].flatten(1)))
        for model in (one, other)
    ]
    return torch.equal(outs[0], outs[1])


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    path = tmp_path / "whole"
    path.mkdir()
    return write(path, tensors())


def test_shards_are_the_single_file(tmp_path: Path, whole: Path) -> None:
    assert same(load(shard(tmp_path, tensors())), load(whole))


def test_tied(tmp_path: Path, whole: Path) -> None:
    data = tensors()
    tied = {name: data[name] for name in data if name != "lm_head.weight"}
    repeated = {**data, "lm_head.weight": data["model.embed_tokens.weight"].clone()}
    made = []
    for name, mine, tie in (("tied", tied, True), ("both", repeated, True), ("untied", repeated, False)):
        (tmp_path / name).mkdir()
        made.append(load(write(tmp_path / name, mine, tie_word_embeddings=tie)))
    assert same(made[0], made[1])
    assert same(made[0], made[2])
    assert not same(made[0], load(whole))
    with pytest.raises(ModelLoadError, match=r"model.safetensors: 'lm_head.weight' differs"):
        load(write(tmp_path / "both", data, tie_word_embeddings=True))
    with pytest.raises(ModelLoadError, match=r"'lm_head.weight' is missing"):
        load(write(tmp_path / "tied", tied))


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16])
def test_half_precision_is_widened(tmp_path: Path, stored: torch.dtype) -> None:
    half = {name: tensor.to(stored) for name, tensor in tensors().items()}
    (tmp_path / "half").mkdir()
    (tmp_path / "wide").mkdir()
    wide = {name: tensor.float() for name, tensor in half.items()}
    model = load(write(tmp_path / "half", half))
    assert model.dtype == torch.float32
    assert same(model, load(write(tmp_path / "wide", wide)))
    assert load(tmp_path / "wide", torch.bfloat16).dtype == torch.bfloat16


def test_frequencies_of_old_checkpoints_are_left_out(whole: Path) -> None:
    data = {**tensors(), "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(2)}
    assert same(load(write(whole, data)), load(write(whole, tensors())))


@pytest.mark.parametrize(
    ("name", "tensor", "told"),
    [
        ("model.layers.1.mlp.up_proj.weight", None, "'model.layers.1.mlp.up_proj.weight' is missing"),
        ("model.norm.weight", None, "'model.norm.weight' is missing"),
        (
            "model.layers.0.self_attn.k_proj.weight",
            torch.ones(8, 8),
            r"model.safetensors: 'model.layers.0.self_attn.k_proj.weight' has shape \[8, 8\].*\[4, 8\]",
        ),
        ("model.embed_tokens.weight", torch.ones(24, 8), r"shape \[24, 8\].*\[20, 8\].*vocab_size"),
        (
            "model.layers.2.mlp.up_proj.weight",
            torch.ones(12, 8),
            "1 tensors the model has no place for.*layers.2",
        ),
        ("model.layers.0.self_attn.q_proj.bias", torch.ones(8), "no place for.*q_proj.bias"),
        ("model.norm.weight", torch.ones(8, dtype=torch.int8), "'model.norm.weight' has type torch.int8"),
    ],
)
def test_a_wrong_tensor_is_named(whole: Path, name: str, tensor: torch.Tensor | None, told: str) -> None:
    data = tensors()
    data.pop(name, None)
    if tensor is not None:
        data[name] = tensor
    with pytest.raises(ModelLoadError, match=told):
        load(write(whole, data))


@pytest.mark.parametrize("left", [0, 5, 8, 200, 3000])
def test_a_truncated_file_is_named(whole: Path, left: int) -> None:
    file = whole / "model.safetensors"
    file.write_bytes(file.read_bytes()[:left])
    with pytest.raises(ModelLoadError, match=r"model.safetensors: is not a whole safetensors file"):
        load(whole)


@pytest.mark.parametrize(
    "junk", [b"\xff" * 64, b"\x10\0\0\0\0\0\0\0{not json at all}" + b"\0" * 50, b"<html>" * 100]
)
def test_a_bad_header_is_named(whole: Path, junk: bytes) -> None:
    (whole / "model.safetensors").write_bytes(junk)
    with pytest.raises(ModelLoadError, match="not a whole safetensors file"):
        load(whole)


def test_no_weights(whole: Path) -> None:
    (whole / "model.safetensors").rename(whole / "pytorch_model.bin")
    with pytest.raises(ModelLoadError, match=r"neither model.safetensors nor.*pickled"):
        load(whole)


def test_broken_shards(tmp_path: Path) -> None:
    index = tmp_path / "model.safetensors.index.json"
    second = tmp_path / "model-00002-of-00002.safetensors"

    def change(**entries: Any) -> None:
        data = json.loads(index.read_text())
        data["weight_map"].update(entries)
        index.write_text(
            json.dumps({**data, "weight_map": {k: v for k, v in data["weight_map"].items() if v}})
        )

    shard(tmp_path, tensors())
    change(**{"model.norm.weight": "model-00001-of-00002.safetensors"})
    with pytest.raises(ModelLoadError, match=r"model-00001-of-00002.safetensors: lacks 'model.norm.weight'"):
        load(tmp_path)
    shard(tmp_path, tensors())
    change(**{"model.norm.weight": None})
    with pytest.raises(ModelLoadError, match=r"00002.safetensors: holds 'model.norm.weight'.*does not list"):
        load(tmp_path)
    shard(tmp_path, tensors())
    change(**{"model.norm.weight": "../elsewhere.safetensors"})
    with pytest.raises(ModelLoadError, match="outside the directory"):
        load(tmp_path)
    shard(tmp_path, tensors())
    second.write_bytes(second.read_bytes()[:-9])
    with pytest.raises(ModelLoadError, match=r"model-00002-of-00002.safetensors: is not a whole"):
        load(tmp_path)
    second.unlink()
    with pytest.raises(ModelLoadError, match=r"model-00002-of-00002.safetensors: the shard is missing"):
        load(tmp_path)
    index.write_text("{")
    with pytest.raises(ModelLoadError, match=r"index.json: is not valid JSON at line 1"):
        load(tmp_path)
    index.write_text("{}")
    with pytest.raises(ModelLoadError, match="names no tensors"):
        load(tmp_path)


def test_large_files_show_progress(
    whole: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    load(whole)
    assert "loading" not in capsys.readouterr().err
    monkeypatch.setattr(weights, "SHOW_PROGRESS_FROM", 1)
    load(whole)
    assert "loading whole" in capsys.readouterr().err


def test_the_file_on_disk_may_change_after_loading(whole: Path) -> None:
    model, again = load(whole), load(whole)
    zeros = {
        name: torch.zeros_like(tensor) for name, tensor in load_file(whole / "model.safetensors").items()
    }
    write(whole, zeros)
    assert same(model, again)
    assert not same(model, load(whole))
