"""What families write in config.json, in the layouts of published checkpoints; and what is refused."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from runtime.config.engine import EngineConfig
from runtime.config.family import QueryGrowth
from runtime.config.model import RopeSpec
from runtime.protocol.errors import BadRequest, ModelLoadError
from tests.unit.runtime.config.test_model_spec import LLAMA, spec, without

BASE = without(LLAMA, "rope_theta")
GEMMA3 = {**BASE, "architectures": ["Gemma3ForCausalLM"], "num_hidden_layers": 7}
GPT2 = {
    "architectures": ["GPT2LMHeadModel"], "vocab_size": 100, "n_embd": 64, "n_layer": 3, "n_head": 4,
    "n_positions": 128, "n_ctx": 128, "layer_norm_epsilon": 1e-5, "activation_function": "gelu_new",
}  # fmt: skip
NEOX = {
    **without(BASE, "rms_norm_eps", "num_key_value_heads"), "architectures": ["GPTNeoXForCausalLM"],
    "layer_norm_eps": 1e-5, "rotary_pct": 0.5, "rotary_emb_base": 5000, "hidden_act": "gelu",
}  # fmt: skip
PHI3 = {**BASE, "architectures": ["Phi3ForCausalLM"], "original_max_position_embeddings": 128}
LONG = {"type": "su", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}


def test_gemma3_of_the_hub(tmp_path: Path) -> None:
    """Bases of two kinds of layers beside each other, scaling for one of them."""
    found = spec(
        tmp_path,
        {
            **GEMMA3,
            "rope_theta": 1000000.0,
            "rope_local_base_freq": 10000.0,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
            "sliding_window": 512,
            "sliding_window_pattern": 3,
            "query_pre_attn_scalar": 64,
        },
    )
    whole = RopeSpec(1000000.0, "linear", 8.0)
    local = RopeSpec(10000.0)
    assert found.ropes == (local, local, whole, local, local, whole, local)
    assert found.windows == (512, 512, None, 512, 512, None, 512)
    assert found.rope == whole
    assert (found.attention_scale, found.embedding_scale) == (0.125, 8.0)
    assert (found.tie_embeddings, found.activation, found.logit_softcap) == (True, "gelu_tanh", None)


def test_gemma3_with_a_vision_tower_says_little(tmp_path: Path) -> None:
    """The published configuration of 4B."""
    config = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "eos_token_id": [1, 106],
        "text_config": {
            "hidden_size": 2560,
            "intermediate_size": 10240,
            "model_type": "gemma3_text",
            "num_hidden_layers": 34,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
            "sliding_window": 1024,
        },
        "torch_dtype": "bfloat16",
        "vision_config": {"hidden_size": 1152},
    }
    found = spec(tmp_path, config)
    assert (found.hidden_size, found.head_dim, found.num_heads, found.num_kv_heads) == (2560, 256, 8, 4)
    assert (found.eos_ids, found.dtype, found.tie_embeddings) == ((1, 106), "bfloat16", True)
    assert found.ropes[4:6] == (RopeSpec(10000.0), RopeSpec(1e6, "linear", 8.0))
    with pytest.raises(ModelLoadError, match="'text_config' is missing"):
        spec(tmp_path, without(config, "text_config"))
    with pytest.raises(ModelLoadError, match=r"config.json \[text_config\]: .*hidden_size"):
        spec(tmp_path, {**config, "text_config": without(config["text_config"], "hidden_size")})


def test_gemma2_caps_unless_it_says_null(tmp_path: Path) -> None:
    config = {**GEMMA3, "architectures": ["Gemma2ForCausalLM"]}
    found = spec(tmp_path, config)
    assert (found.attention_softcap, found.logit_softcap) == (50.0, 30.0)
    assert found.windows[:3] == (4096, None, 4096)
    found = spec(tmp_path, {**config, "attn_logit_softcapping": None, "final_logit_softcapping": 20.0})
    assert (found.attention_softcap, found.logit_softcap) == (None, 20.0)


def test_the_first_gemma_means_tanh(tmp_path: Path) -> None:
    config = {**BASE, "architectures": ["GemmaForCausalLM"], "hidden_act": "gelu", "hidden_activation": None}
    assert spec(tmp_path, config).activation == "gelu_tanh"


def test_gpt2(tmp_path: Path) -> None:
    found = spec(tmp_path, GPT2)
    assert (found.hidden_size, found.num_layers, found.num_heads, found.num_kv_heads) == (64, 3, 4, 4)
    assert (found.ffn_size, found.max_position_embeddings, found.tie_embeddings) == (256, 128, True)
    assert found.learned_positions
    assert found.ropes == (None,) * 3
    with pytest.raises(ModelLoadError, match="'n_embd' is missing"):
        spec(tmp_path, without(GPT2, "n_embd"))
    with pytest.raises(ModelLoadError, match="scale_attn_by_inverse_layer_idx"):
        spec(tmp_path, {**GPT2, "scale_attn_by_inverse_layer_idx": True})


def test_gpt_neox(tmp_path: Path) -> None:
    found = spec(tmp_path, NEOX)
    assert found.rope == RopeSpec(5000.0, dims=8)
    assert (found.parallel, found.gated, found.qkv_by_head, found.norm) == (True, False, True, "layer")
    with pytest.raises(ModelLoadError, match=r"rotates 3 of 16 .* even"):
        spec(tmp_path, {**NEOX, "rotary_pct": 0.2})


def test_phi3_with_two_sets_of_frequencies(tmp_path: Path) -> None:
    found = spec(tmp_path, {**PHI3, "rope_scaling": LONG})
    scale = math.sqrt(1 + math.log(16) / math.log(128))
    assert found.rope.attention_factor == pytest.approx(scale)
    assert (found.max_position_embeddings, found.long_positions) == (128, 2048)
    assert found.for_context(1000).rope.factors == (2.0,) * 8
    engine = EngineConfig(model=str(tmp_path), context_length=1000)
    located = engine.locate()[1]
    assert (located.max_position_embeddings, engine.context(located)) == (2048, 1000)
    with pytest.raises(BadRequest, match="at most 128"):
        EngineConfig(model=str(tmp_path), context_length=4000).locate()
    with pytest.raises(ModelLoadError, match="'long_factor' has 7 entries for 8 pairs"):
        spec(tmp_path, {**PHI3, "rope_scaling": {**LONG, "long_factor": [2.0] * 7}})
    with pytest.raises(ModelLoadError, match="'short_factor' must be a list of finite numbers"):
        spec(tmp_path, {**PHI3, "rope_scaling": {**LONG, "short_factor": [0.0] * 8}})


def test_layers_without_rotary_embedding(tmp_path: Path) -> None:
    smol = {**LLAMA, "architectures": ["SmolLM3ForCausalLM"]}
    turned = RopeSpec(5000.0)
    assert spec(tmp_path, smol).ropes == (turned,) * 3
    assert spec(tmp_path, {**smol, "no_rope_layer_interval": 2}).ropes == (turned, None, turned)
    assert spec(tmp_path, {**smol, "no_rope_layers": [0, 1, 0]}).ropes == (None, turned, None)
    with pytest.raises(ModelLoadError, match="'no_rope_layers' has 2 entries for 3 layers"):
        spec(tmp_path, {**smol, "no_rope_layers": [1, 1]})
    cohere = {
        **without(LLAMA, "rms_norm_eps"),
        "architectures": ["Cohere2ForCausalLM"],
        "layer_norm_eps": 1e-5,
    }
    found = spec(tmp_path, {**cohere, "sliding_window_pattern": 2})
    turned = RopeSpec(5000.0, pairs="neighbours")
    assert (found.ropes, found.windows) == ((turned, None, turned), (4096, None, 4096))


def test_queries_of_ministral3_grow(tmp_path: Path) -> None:
    rope = {
        "rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "original_max_position_embeddings": 128,
        "llama_4_scaling_beta": 0.1,
    }  # fmt: skip
    config = {**BASE, "architectures": ["Ministral3ForCausalLM"], "rope_parameters": rope}
    assert spec(tmp_path, config).query_growth == QueryGrowth(beta=0.1, every=128)


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ({**GEMMA3, "use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ({**GEMMA3, "hidden_activation": "snake"}, "'hidden_activation' 'snake'"),
        ({**GEMMA3, "layer_types": ["full_attention"]}, "1 entries for 7 layers"),
        ({**LLAMA, "architectures": ["Glm4ForCausalLM"], "partial_rotary_factor": 1.5}, "must be"),
    ],
)
def test_what_is_refused(tmp_path: Path, config: dict[str, Any], told: str) -> None:
    with pytest.raises(ModelLoadError, match=told):
        spec(tmp_path, config)
