"""A compact Llama in plain PyTorch for training on a CPU, and its export to Hugging Face layout.

Parameter names and arithmetic follow transformers' `LlamaForCausalLM`, so a saved state dictionary
loads there unchanged. Knows nothing of data or optimisers.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["Cache", "Pocket", "Shape", "export", "greedy"]


@dataclass(frozen=True)
class Shape:
    """The sizes of the model."""

    vocab: int = 1280
    hidden: int = 192
    layers: int = 4
    heads: int = 4
    kv_heads: int = 2
    inner: int = 512
    head_dim: int = 64
    positions: int = 2048
    theta: float = 10000.0
    eps: float = 1e-5


Cache = list[tuple[Tensor, Tensor]]


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return x * cos + torch.cat((-x[..., half:], x[..., :half]), -1) * sin


def _causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention as plain matrix products: on short rows several times faster to differentiate on a
    CPU than the fused kernel. Shapes (rows, heads, length, size); fewer heads in `k` and `v` are shared."""
    rows, heads, length, size = q.shape
    few = k.shape[1]
    later = torch.full((length, length), -1e30, dtype=q.dtype).triu(1)
    scores = (q * size**-0.5).reshape(rows, few, -1, size) @ k.mT
    weights = (scores.view(rows, heads, length, length) + later).softmax(-1).to(v.dtype)
    return (weights.view(rows, few, -1, length) @ v).view(rows, heads, length, size)


class _Attention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        size = shape.head_dim
        self.q_proj = nn.Linear(shape.hidden, shape.heads * size, bias=False)
        self.k_proj = nn.Linear(shape.hidden, shape.kv_heads * size, bias=False)
        self.v_proj = nn.Linear(shape.hidden, shape.kv_heads * size, bias=False)
        self.o_proj = nn.Linear(shape.heads * size, shape.hidden, bias=False)

    def forward(
        self, x: Tensor, rope: tuple[Tensor, Tensor], mask: Tensor | None, past: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        batch, length, _ = x.shape
        shape, size = self.shape, self.shape.head_dim
        weight = torch.cat((self.q_proj.weight, self.k_proj.weight, self.v_proj.weight))
        mixed = F.linear(x, weight).view(batch, length, -1, size).transpose(1, 2)
        turned = _rotate(mixed[:, : shape.heads + shape.kv_heads], *rope).to(mixed.dtype)
        q, k = turned[:, : shape.heads], turned[:, shape.heads :]
        v = mixed[:, shape.heads + shape.kv_heads :]
        if past is not None:
            k, v = torch.cat((past[0], k), 2), torch.cat((past[1], v), 2)
        kept = (k, v)
        if mask is None:
            out = _causal(q, k, v)
        else:
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
        return self.o_proj(out.transpose(1, 2).reshape(batch, length, -1)), kept


class _Mlp(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden, shape.inner, bias=False)
        self.up_proj = nn.Linear(shape.hidden, shape.inner, bias=False)
        self.down_proj = nn.Linear(shape.inner, shape.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class _Layer(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.self_attn = _Attention(shape)
        self.mlp = _Mlp(shape)
        self.input_layernorm = nn.RMSNorm(shape.hidden, shape.eps)
        self.post_attention_layernorm = nn.RMSNorm(shape.hidden, shape.eps)

    def forward(
        self, x: Tensor, rope: tuple[Tensor, Tensor], mask: Tensor | None, past: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        out, kept = self.self_attn(self.input_layernorm(x), rope, mask, past)
        x = x + out
        return x + self.mlp(self.post_attention_layernorm(x)), kept


class _Body(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocab, shape.hidden)
        self.layers = nn.ModuleList(_Layer(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.hidden, shape.eps)


class Pocket(nn.Module):
    """The language model; input and output embeddings are one matrix."""

    cos: Tensor
    sin: Tensor

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.model = _Body(shape)
        half = torch.arange(0, shape.head_dim, 2).float() / shape.head_dim
        angles = torch.outer(torch.arange(shape.positions).float(), shape.theta**-half)
        angles = torch.cat((angles, angles), -1)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        for name, weight in self.named_parameters():
            if weight.dim() == 2:
                deep = name.endswith(("o_proj.weight", "down_proj.weight"))
                nn.init.normal_(weight, std=0.02 / ((2 * shape.layers) ** 0.5 if deep else 1.0))

    def hidden(
        self,
        ids: Tensor,
        positions: Tensor | None = None,
        mask: Tensor | None = None,
        cache: Cache | None = None,
    ) -> tuple[Tensor, Cache]:
        """Final hidden states and the grown cache."""
        if positions is None:
            rope = (self.cos[: ids.shape[1]], self.sin[: ids.shape[1]])
        else:
            rope = (self.cos[positions][:, None], self.sin[positions][:, None])
        x = self.model.embed_tokens(ids)
        grown: Cache = []
        for index, layer in enumerate(self.model.layers):
            x, kept = layer(x, rope, mask, cache[index] if cache else None)
            grown.append(kept)
        return self.model.norm(x), grown

    def logits(self, hidden: Tensor) -> Tensor:
        """Scores of the next token."""
        return F.linear(hidden, self.model.embed_tokens.weight)


@torch.inference_mode()
def greedy(model: Pocket, prompts: list[list[int]], stop: int, limit: int) -> list[list[int]]:
    """Greedy continuations of many prompts at once (left padded, with a key/value cache)."""
    width = max(map(len, prompts))
    pads = torch.tensor([width - len(p) for p in prompts])
    ids = torch.tensor([[0] * (width - len(p)) + p for p in prompts])
    columns = torch.arange(width)
    positions = (columns - pads[:, None]).clamp(min=0)
    real = columns >= pads[:, None]
    mask = (real[:, None] & (columns[:, None] >= columns)) | torch.eye(width, dtype=torch.bool)
    hidden, cache = model.hidden(ids, positions, mask[:, None])
    done = torch.zeros(len(prompts), dtype=torch.bool)
    out: list[list[int]] = [[] for _ in prompts]
    last = hidden[:, -1:]
    for step in range(limit):
        chosen = model.logits(last)[:, 0].argmax(-1)
        for row, token in enumerate(chosen.tolist()):
            if not done[row] and token != stop:
                out[row].append(token)
        done |= chosen == stop
        if bool(done.all()):
            break
        real = torch.cat((real, torch.ones(len(prompts), 1, dtype=torch.bool)), 1)
        where = (width + step - pads)[:, None]
        last, cache = model.hidden(chosen[:, None], where, real[:, None, None], cache)
    return out


def export(state: dict[str, Tensor], shape: Shape, folder: Path, stop: int, pad: int) -> None:
    """Weights in bf16, config.json and generation_config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {
        k: v.detach().to(torch.bfloat16).contiguous() for k, v in state.items() if k.startswith("model.")
    }
    file = folder / "model.safetensors"
    save_file(weights, str(file), metadata={"format": "pt"})
    file.chmod(0o644)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": shape.vocab,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.inner,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": shape.positions,
        "rms_norm_eps": shape.eps,
        "rope_theta": shape.theta,
        "rope_scaling": None,
        "attention_bias": False,
        "mlp_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "tie_word_embeddings": True,
        "use_cache": True,
        "bos_token_id": None,
        "eos_token_id": stop,
        "pad_token_id": pad,
        "torch_dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    generation = {"do_sample": False, "eos_token_id": [stop], "pad_token_id": pad, "max_new_tokens": 256}
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
