"""Writes a copying circuit into the last two layers, so that training need not discover it.

The last layer but one gets heads that look one token back; the last gets heads that look for the
place where the current token occurred before and promote the token that followed it. Both are fitted
by least squares to the model's present activations; training goes on from there and changes them.
Knows the model's layout, nothing of tasks.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from examples.pocket.model import Pocket

__all__ = ["graft"]

_BACK_PAIRS = 8
_BACK_SCALE = 12.0
_CODE_PAIRS = 14
_MATCH = 3.0
# How strongly the heads write, as parts of the length of the residual stream where they write.
_WRITE = 0.054
_COPY = 0.088


def _fit(inputs: Tensor, wanted: Tensor, ridge: float = 1e-2) -> Tensor:
    """The matrix W with inputs @ W.T close to wanted."""
    gram = inputs.T @ inputs / len(inputs)
    gram += ridge * gram.diagonal().mean() * torch.eye(gram.shape[0])
    return torch.linalg.solve(gram, inputs.T @ wanted / len(inputs)).T


def _normed(model: Pocket, rows: Sequence[Sequence[int]], layer: int) -> tuple[Tensor, float]:
    """The normalised input of a layer at every position of every row, and its length before that."""
    found = []
    for row in rows:
        ids = torch.tensor([row])
        rope = (model.cos[: len(row)], model.sin[: len(row)])
        x = model.model.embed_tokens(ids)
        for block in list(model.model.layers)[:layer]:
            x, _ = block(x, rope, None, None)
        found.append(x[0])
    stream = torch.cat(found)
    return model.model.layers[layer].input_layernorm(stream), float(stream.norm(dim=1).mean())


def _codes(model: Pocket, tokens: Tensor, size: int, generator: torch.Generator) -> Tensor:
    """A code of `size` numbers per token, linear in its embedding and about as long for each token."""
    table = model.model.embed_tokens.weight
    used = table[tokens.unique()]
    centred, width = table - used.mean(0), min(96, table.shape[1])
    spread, axes = torch.linalg.eigh((used - used.mean(0)).T @ (used - used.mean(0)) / len(used))
    whitened = centred @ (axes[:, -width:] / spread[-width:].sqrt())
    codes = whitened @ torch.randn(width, size, generator=generator)
    return codes / codes.norm(dim=1, keepdim=True).clamp(min=1e-3) * size**0.5


def _look_back(model: Pocket, rows: Sequence[Sequence[int]], generator: torch.Generator) -> None:
    """The first two heads of the last layer but one attend one token back and report what they see."""
    size, hidden = model.shape.head_dim, model.shape.hidden
    layer = model.shape.layers - 2
    seen, length = _normed(model, rows, layer)
    tokens = torch.cat([torch.tensor(row) for row in rows])
    constant = _fit(seen, torch.ones(len(seen), 1), 1e-4)[0]
    pairs = torch.arange(_BACK_PAIRS)
    speed = model.shape.theta ** (-2.0 * pairs / size)
    attention = model.model.layers[layer].self_attn
    key, query = torch.zeros(size), torch.zeros(size)
    key[pairs] = _BACK_SCALE
    query[pairs] = _BACK_SCALE * speed.cos()
    query[pairs + size // 2] = -_BACK_SCALE * speed.sin()
    attention.k_proj.weight[:size] = torch.outer(key, constant)
    attention.v_proj.weight[:size] = (_WRITE * length) ** 0.5 * _fit(
        seen, _codes(model, tokens, size, generator)[tokens]
    )
    for head in range(model.shape.heads // model.shape.kv_heads):
        part = slice(head * size, (head + 1) * size)
        attention.q_proj.weight[part] = torch.outer(query, constant)
        written = torch.linalg.qr(torch.randn(hidden, size, generator=generator))[0]
        attention.o_proj.weight[:, part] = (_WRITE * length) ** 0.5 * written


def _match(model: Pocket, rows: Sequence[Sequence[int]], generator: torch.Generator) -> None:
    """The first two heads of the last layer find what followed the current token before."""
    size = model.shape.head_dim
    layer = model.shape.layers - 1
    seen, length = _normed(model, rows, layer)
    current = torch.cat([torch.tensor(row) for row in rows])
    first = torch.cat([torch.arange(len(row)) == 0 for row in rows])
    before = current.roll(1)
    codes = _codes(model, current, 2 * _CODE_PAIRS, generator)
    slow = torch.arange(size // 2 - _CODE_PAIRS, size // 2)
    places = torch.cat((slow, slow + size // 2))
    attention = model.model.layers[layer].self_attn
    key, query = torch.zeros(size, model.shape.hidden), torch.zeros(size, model.shape.hidden)
    key[places] = _MATCH * _fit(seen[~first], codes[before[~first]])
    query[places] = _MATCH * _fit(seen, codes[current])
    attention.k_proj.weight[:size] = key
    table = model.model.embed_tokens.weight
    centred = table - table[current.unique()].mean(0)
    content = torch.linalg.eigh(centred[current.unique()].T @ centred[current.unique()])[1][:, -size:]
    attention.v_proj.weight[:size] = (_COPY * length * 5) ** 0.5 * _fit(seen, centred[current] @ content)
    for head in range(model.shape.heads // model.shape.kv_heads):
        part = slice(head * size, (head + 1) * size)
        attention.q_proj.weight[part] = query
        attention.o_proj.weight[:, part] = (_COPY * length / 5) ** 0.5 * content


def graft(model: Pocket, rows: Sequence[Sequence[int]], seed: int = 1) -> None:
    """Overwrites half of the heads of the last two layers; `rows` are sample documents as tokens."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        _look_back(model, rows, generator)
        _match(model, rows, generator)
