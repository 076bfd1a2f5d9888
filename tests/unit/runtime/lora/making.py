"""Adapters as peft writes them, and models with their product merged in."""

from __future__ import annotations

import copy
import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers.pytorch_utils import Conv1D

EVERY = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
HEADS = ("lm_head", "embed_out")
NOT_ADAPTED = re.compile(r"\.experts\.|\.router$|mlp\.gate$|shared_expert_gate$|kv_b_proj$|vision|projector")
CONFIG = {
    "peft_type": "LORA",
    "task_type": "CAUSAL_LM",
    "base_model_name_or_path": "somewhere",
    "inference_mode": True,
    "bias": "none",
    "fan_in_fan_out": False,
    "init_lora_weights": True,
    "layers_to_transform": None,
    "modules_to_save": None,
    "use_dora": False,
    "use_rslora": False,
    "rank_pattern": {},
    "alpha_pattern": {},
}


@dataclass(frozen=True)
class Made:
    path: Path
    model: Any  # of transformers, the adapter merged in


def make_adapter(
    path: Path,
    model: Any,
    rank: int = 4,
    alpha: float = 8.0,
    modules: Sequence[str] | None = EVERY,
    layers: Sequence[int] | None = None,
    seed: int = 0,
    std: float = 0.15,
    dtype: torch.dtype = torch.float32,
    **config: Any,
) -> Made:
    """An adapter with random weights for a model of transformers, which stays as it is. modules: None: all
    linear layers but the head and NOT_ADAPTED."""
    path.mkdir(parents=True, exist_ok=True)
    merged, random = copy.deepcopy(model), torch.Generator().manual_seed(seed)
    ranks, alphas = config.get("rank_pattern", {}), config.get("alpha_pattern", {})
    tensors: dict[str, torch.Tensor] = {}
    with torch.no_grad():
        for name, module in merged.named_modules():
            short = name.rsplit(".", 1)[-1]
            if not isinstance(module, (torch.nn.Linear, Conv1D)) or short in HEADS:
                continue
            if short not in modules if modules is not None else NOT_ADAPTED.search(name):
                continue
            if layers is not None and int(name.split(".layers.")[1].split(".")[0]) not in layers:
                continue
            r, a = ranks.get(short, rank), alphas.get(short, alpha)
            scale = a / (math.sqrt(r) if config.get("use_rslora") else r)
            weight = module.weight if isinstance(module, torch.nn.Linear) else module.weight.T
            outputs, inputs = weight.shape
            down = torch.randn(r, inputs, generator=random).mul_(std).to(dtype)
            up = torch.randn(outputs, r, generator=random).mul_(std).to(dtype)
            weight += scale * (up.float() @ down.float())
            tensors[f"base_model.model.{name}.lora_A.weight"] = down
            tensors[f"base_model.model.{name}.lora_B.weight"] = up
    save_file(tensors, path / "adapter_model.safetensors")
    write_config(path, r=rank, lora_alpha=alpha, target_modules=sorted(modules or ()), **config)
    return Made(path, merged)


def write_config(path: Path, **fields: Any) -> None:
    text = json.dumps({**CONFIG, **fields})
    (path / "adapter_config.json").write_text(text, encoding="utf-8")
