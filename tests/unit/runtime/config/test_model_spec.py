"""ModelSpec: what config.json says, or an error that names file, field and value."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from runtime.config.model import ModelSpec, RopeSpec
from runtime.protocol.errors import ModelLoadError

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5000.0,
    "max_position_embeddings": 2048,
    "torch_dtype": "bfloat16",
    "eos_token_id": 2,
    "bos_token_id": 1,
}
MISTRAL = {**LLAMA, "architectures": ["MistralForCausalLM"], "sliding_window": 512}
QWEN2 = {**LLAMA, "architectures": ["Qwen2ForCausalLM"], "use_sliding_window": False, "sliding_window": 32}
QWEN3 = {**LLAMA, "architectures": ["Qwen3ForCausalLM"], "head_dim": 32}


def spec(tmp_path: Path, config: dict[str, Any], generation: Any = None) -> ModelSpec:
    (tmp_path / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    return ModelSpec.from_dir(tmp_path)


def without(config: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in config.items() if name not in names}


def test_llama(tmp_path: Path) -> None:
    assert spec(tmp_path, LLAMA) == ModelSpec(
        architecture="LlamaForCausalLM",
        vocab_size=100,
        hidden_size=64,
        num_layers=3,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        ffn_size=96,
        norm_eps=1e-5,
        rope=RopeSpec(5000.0),
        windows=(None, None, None),
        qkv_bias=False,
        output_bias=False,
        mlp_bias=False,
        qk_norm=False,
        tie_embeddings=False,
        max_position_embeddings=2048,
        eos_ids=(2,),
        bos_id=1,
        dtype="bfloat16",
    )


def test_first_llama_leaves_two_fields_out(tmp_path: Path) -> None:
    old = spec(tmp_path, without(LLAMA, "num_key_value_heads", "rope_theta"))
    assert (old.num_kv_heads, old.rope.theta) == (4, 10000.0)
    with pytest.raises(ModelLoadError, match="num_key_value_heads"):
        spec(tmp_path, without(QWEN2, "num_key_value_heads"))
    with pytest.raises(ModelLoadError, match="rope_theta"):
        spec(tmp_path, without(QWEN3, "rope_theta"))


def test_biases_and_norms(tmp_path: Path) -> None:
    llama = spec(tmp_path, {**LLAMA, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True})
    assert (llama.qkv_bias, llama.output_bias, llama.mlp_bias, llama.tie_embeddings) == (True,) * 4
    qwen2 = spec(tmp_path, QWEN2)
    assert (qwen2.qkv_bias, qwen2.output_bias, qwen2.mlp_bias, qwen2.qk_norm) == (True, False, False, False)
    qwen3 = spec(tmp_path, QWEN3)
    assert (qwen3.qkv_bias, qwen3.qk_norm, qwen3.head_dim) == (False, True, 32)


def test_windows(tmp_path: Path) -> None:
    assert spec(tmp_path, MISTRAL).windows == (512,) * 3
    assert spec(tmp_path, {**MISTRAL, "sliding_window": None}).windows == (None,) * 3
    assert spec(tmp_path, QWEN2).windows == (None,) * 3
    on = {**QWEN2, "use_sliding_window": True}
    assert spec(tmp_path, {**on, "max_window_layers": 1}).windows == (None, 32, 32)
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    assert spec(tmp_path, {**on, "layer_types": kinds}).windows == (32, None, 32)
    for bad, told in (
        (without(MISTRAL, "sliding_window"), "sliding_window"),
        ({**MISTRAL, "sliding_window": 0}, "at least 1"),
        ({**on, "layer_types": kinds[:2]}, "2 entries for 3 layers"),
        ({**on, "layer_types": [*kinds[:2], "odd"]}, "odd"),
        (on, "max_window_layers"),
    ):
        with pytest.raises(ModelLoadError, match=told):
            spec(tmp_path, bad)


@pytest.mark.parametrize(
    ("scaling", "right"),
    [
        ({"rope_type": "default"}, RopeSpec(5000.0)),
        ({"type": "linear", "factor": 4}, RopeSpec(5000.0, "linear", 4.0)),
        ({"type": "dynamic", "factor": 4.0}, RopeSpec(5000.0, "dynamic")),
        (
            {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 512,
            },
            RopeSpec(5000.0, "llama3", 8.0, 512, low_freq_factor=1.0, high_freq_factor=4.0),
        ),
        (
            {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512},
            RopeSpec(5000.0, "yarn", 4.0, 512, attention_factor=1.1386294361119891),
        ),
        (
            {
                "rope_type": "yarn",
                "original_max_position_embeddings": 512,
                "attention_factor": 1.5,
                "beta_fast": 16,
            },
            RopeSpec(5000.0, "yarn", 4.0, 512, beta_fast=16.0, attention_factor=1.5),
        ),
        (
            {"rope_type": "yarn", "factor": 40.0, "mscale": 1.0, "mscale_all_dim": 1.0, "truncate": False},
            RopeSpec(5000.0, "yarn", 40.0, 2048, truncate=False),
        ),
    ],
)
def test_rope_in_both_layouts(tmp_path: Path, scaling: dict[str, Any], right: RopeSpec) -> None:
    assert spec(tmp_path, {**LLAMA, "rope_scaling": scaling}).rope == right
    inside = {**without(LLAMA, "rope_theta"), "rope_parameters": {**scaling, "rope_theta": 5000.0}}
    assert spec(tmp_path, inside).rope == right


@pytest.mark.parametrize(
    ("scaling", "told"),
    [
        ({"rope_type": "spiral"}, "unknown rope type 'spiral'.*default, linear, dynamic, llama3, yarn"),
        ({"rope_type": "linear"}, "'factor' is missing"),
        ({"rope_type": "linear", "factor": "4"}, "'factor' must be a finite number"),
        ({"rope_type": "linear", "factor": 0}, "above 0"),
        ({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0}, "high_freq_factor"),
        (
            {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 4.0, "high_freq_factor": 3.0},
            "not be below",
        ),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"full_attention": {"rope_type": "default"}}, "rotary embeddings per layer type"),
        ([], "must be an object"),
    ],
)
def test_rope_that_is_not_understood(tmp_path: Path, scaling: Any, told: str) -> None:
    with pytest.raises(ModelLoadError, match=told):
        spec(tmp_path, {**LLAMA, "rope_scaling": scaling})


def test_ends_come_from_both_files(tmp_path: Path) -> None:
    assert spec(tmp_path, LLAMA, {"eos_token_id": [7, 2]}).eos_ids == (2, 7)
    assert spec(tmp_path, without(LLAMA, "eos_token_id"), {"eos_token_id": 9}).eos_ids == (9,)
    assert spec(tmp_path, {**LLAMA, "eos_token_id": None}, {}).eos_ids == ()
    with pytest.raises(ModelLoadError, match=r"generation_config.json.*\[100\]"):
        spec(tmp_path, LLAMA, {"eos_token_id": 100})
    with pytest.raises(ModelLoadError, match="JSON object"):
        spec(tmp_path, LLAMA, [])


@pytest.mark.parametrize(
    "name",
    [
        "architectures", "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads",
        "intermediate_size", "rms_norm_eps", "max_position_embeddings",
    ],
)  # fmt: skip
def test_a_missing_field_is_named(tmp_path: Path, name: str) -> None:
    for config in (without(LLAMA, name), {**LLAMA, name: None}):
        with pytest.raises(ModelLoadError, match=f"config.json.*{name}"):
            spec(tmp_path, config)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"vocab_size": "100"}, "'vocab_size' must be an integer.*'100'"),
        ({"num_hidden_layers": 0}, "at least 1, got 0"),
        ({"hidden_size": True}, "got True"),
        ({"num_key_value_heads": 3}, "multiple"),
        ({"hidden_size": 66}, "multiple of the 4 heads"),
        ({"head_dim": 15}, "even"),
        ({"rms_norm_eps": float("nan")}, "finite"),
        ({"tie_word_embeddings": "yes"}, "true or false"),
        ({"hidden_act": "snake"}, "hidden_act.*snake.*known: gelu"),
        ({"torch_dtype": "int8"}, "int8"),
        ({"eos_token_id": "</s>"}, "token id"),
        ({"bos_token_id": 100}, "vocabulary of 100"),
        ({"quantization_config": {"bits": 4}}, "the quantisation '' is not supported"),
        ({"architectures": ["GPT9"]}, "unknown architecture 'GPT9'.*GPT2LMHeadModel.*LlamaForCausalLM"),
        ({"architectures": []}, "architectures"),
        ({"architectures": "LlamaForCausalLM"}, "list of strings"),
    ],
)
def test_an_invalid_field_is_named(tmp_path: Path, changes: dict[str, Any], told: str) -> None:
    with pytest.raises(ModelLoadError, match=told):
        spec(tmp_path, {**LLAMA, **changes})


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="no such directory"):
        ModelSpec.from_dir(tmp_path / "nowhere")
    with pytest.raises(ModelLoadError, match=r"no config\.json"):
        ModelSpec.from_dir(tmp_path)
    config = tmp_path / "config.json"
    config.write_text('{\n  "a": 1,\n  "b": }\n')
    with pytest.raises(ModelLoadError, match="line 3 column 8"):
        ModelSpec.from_dir(tmp_path)
    config.write_bytes(b'{"a": "\xff"}')
    with pytest.raises(ModelLoadError, match=r"UTF-8.*offset 7"):
        ModelSpec.from_dir(tmp_path)
    config.write_text("[1]")
    with pytest.raises(ModelLoadError, match="must contain a JSON object"):
        ModelSpec.from_dir(str(tmp_path))
    config.write_text("[" * 100_000)
    with pytest.raises(ModelLoadError, match=r"config\.json"):
        ModelSpec.from_dir(tmp_path)
    with pytest.raises(ModelLoadError, match="is a file"):
        ModelSpec.from_dir(config)


def test_reading_a_spec_loads_no_torch(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN3))
    code = (
        "import sys; import runtime.config.runner; from runtime.config.model import ModelSpec;"
        f"ModelSpec.from_dir({str(tmp_path)!r}); print('torch' in sys.modules, 'numpy' in sys.modules)"
    )
    root = Path(__file__).parents[4]
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=300, check=True)
    assert done.stdout.split() == ["False", "False"]
