"""VisionTower: the transformer over an image's patches, and the merger that turns them into tokens, as in
Qwen2-VL (arXiv 2409.12191) and Qwen2.5-VL (arXiv 2502.13923). Plain torch.

Patches are ordered by squares: those that become one token are adjacent, so neither windows nor merging move
data. It knows no prompts and keeps no image.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from runtime.config.family import ACTIVATIONS
from runtime.config.parts.vision import CHANNELS, VisionSpec
from runtime.layers.mlp import ACTIVATION
from runtime.layers.norm import LayerNorm, Norm, RMSNorm
from runtime.layers.weights import Weights

EPS = 1e-6
THETA = 10000.0
PREFIXES = ("visual.", "model.visual.")
"""Prefixes of its tensors' names, in old and new checkpoints."""


@dataclass(frozen=True, slots=True, eq=False)
class _Linear:
    weight: Tensor
    bias: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


@dataclass(frozen=True, slots=True, eq=False)
class _Block:
    """up: for a gated feed-forward gate and up, the gate first."""

    attention_norm: Norm
    qkv: _Linear
    output: _Linear
    mlp_norm: Norm
    up: _Linear
    down: _Linear


class VisionTower:
    """Created by load(). Computes one image at a time."""

    def __init__(
        self,
        spec: VisionSpec,
        embedding: Tensor,
        blocks: list[_Block],
        norm: Norm,
        up: _Linear,
        down: _Linear,
    ) -> None:
        """embedding [hidden, numbers per patch]."""
        self.spec = spec
        self._embedding, self._blocks, self._norm, self._up, self._down = embedding, blocks, norm, up, down
        self._activation = ACTIVATION[ACTIVATIONS[spec.activation]]
        size = spec.hidden_size // spec.heads // 2
        exponents = torch.arange(0, size, 2, dtype=torch.float32) / size
        self._frequencies = (1.0 / THETA**exponents).to(embedding.device)

    @property
    def device(self) -> torch.device:
        return self._embedding.device

    def patches(self, pixels: Tensor) -> Tensor:
        """pixels [height, width, 3] uint8, both sizes multiples of spec.step -> [patches, 3 * frames * patch
        * patch] float32, in the tower's order."""
        spec = self.spec
        rows, columns = spec.grid(pixels.shape[0], pixels.shape[1])
        mean, std = (torch.tensor(one, device=pixels.device) for one in (spec.mean, spec.std))
        x = (pixels.float() * spec.scale - mean) / std
        x = x.view(rows, spec.merge, spec.patch, columns, spec.merge, spec.patch, CHANNELS)
        x = x.permute(0, 3, 1, 4, 6, 2, 5).unsqueeze(
            5
        )  # row, column, within the square, channel, frame, y, x
        x = x.expand(*x.shape[:5], spec.frames, *x.shape[6:])
        return x.reshape(rows * columns * spec.merge**2, -1)

    def __call__(self, pixels: Tensor) -> Tensor:
        """pixels as for patches() -> [tokens, out_size], row by row."""
        spec = self.spec
        rows, columns = spec.grid(pixels.shape[0], pixels.shape[1])
        x = F.linear(self.patches(pixels).to(self._embedding.dtype), self._embedding)
        angles = self._angles(rows, columns)
        whole = [torch.arange(len(x), device=x.device)[None]]
        windows = self._windows(rows, columns) if spec.window else whole
        for number, block in enumerate(self._blocks):
            groups = whole if number in spec.whole_layers else windows
            x = x + block.output(self._attention(block.qkv(block.attention_norm(x)), angles, groups))
            x = x + block.down(self._inner(block.up(block.mlp_norm(x))))
        x = self._norm(x).view(rows * columns, -1)
        return self._down(F.gelu(self._up(x)))

    def _inner(self, x: Tensor) -> Tensor:
        if not self.spec.gated:
            return self._activation(x)
        gate, up = x.chunk(2, -1)
        return self._activation(gate) * up

    def _angles(self, rows: int, columns: int) -> tuple[Tensor, Tensor]:
        """cos and sin, each [patches, 1, head_dim]: the first half of the pairs rotates with the row, the
        second with the column."""
        merge = self.spec.merge
        y, x = torch.meshgrid(
            torch.arange(rows * merge, device=self.device),
            torch.arange(columns * merge, device=self.device),
            indexing="ij",
        )
        squares = (rows, merge, columns, merge)
        coordinates = [one.reshape(squares).transpose(1, 2).reshape(-1, 1).float() for one in (y, x)]
        angle = torch.cat([one * self._frequencies for one in coordinates] * 2, -1)[:, None]
        return angle.cos(), angle.sin()

    def _windows(self, rows: int, columns: int) -> list[Tensor]:
        """The patches of the windows, grouped by window size: [windows, patches per window]."""
        side, square = self.spec.window // self.spec.step, self.spec.merge**2
        tokens = torch.arange(rows * columns, device=self.device).view(rows, columns)
        windows: dict[tuple[int, ...], list[Tensor]] = {}
        for strip in tokens.split(side, 0):
            for window in strip.split(side, 1):
                windows.setdefault(tuple(window.shape), []).append(window.reshape(-1))
        within = torch.arange(square, device=self.device)
        return [(torch.stack(one)[..., None] * square + within).flatten(1) for one in windows.values()]

    def _attention(self, qkv: Tensor, angles: tuple[Tensor, Tensor], groups: Sequence[Tensor]) -> Tensor:
        """qkv [patches, 3 * hidden] -> [patches, hidden]; only patches in the same row of a group attend to
        one another."""
        qkv = qkv.unflatten(-1, (3, self.spec.heads, -1))
        cos, sin = angles
        query, key = (_turned(one, cos, sin) for one in (qkv[:, 0], qkv[:, 1]))
        out = torch.empty_like(query)
        for group in groups:
            parts = (one[group].transpose(1, 2) for one in (query, key, qkv[:, 2]))
            out[group] = F.scaled_dot_product_attention(*parts).transpose(1, 2)
        return out.flatten(1)

    @classmethod
    def load(cls, weights: Weights, spec: VisionSpec) -> VisionTower:
        """Raises ModelLoadError."""
        return _Loader(weights, spec).tower()


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate x [patches, heads, head_dim], in float32 as the families do."""
    wide = x.float()
    left, right = wide.chunk(2, -1)
    return (wide * cos + torch.cat((-right, left), -1) * sin).to(x.dtype)


class _Loader:
    def __init__(self, weights: Weights, spec: VisionSpec) -> None:
        first = "patch_embed.proj.weight"
        self._prefix = next((prefix for prefix in PREFIXES if prefix + first in weights), PREFIXES[-1])
        self._weights, self._spec = weights, spec

    def tower(self) -> VisionTower:
        spec = self._spec
        size = (spec.hidden_size, CHANNELS, spec.frames, spec.patch, spec.patch)
        embedding = self._tensor("patch_embed.proj.weight", *size).flatten(1)
        merged = spec.hidden_size * spec.merge**2
        return VisionTower(
            spec,
            embedding,
            [self._block(f"blocks.{number}.") for number in range(spec.layers)],
            self._norm("merger.ln_q"),
            self._linear("merger.mlp.0", merged, merged),
            self._linear("merger.mlp.2", merged, spec.out_size),
        )

    def _block(self, name: str) -> _Block:
        spec, hidden = self._spec, self._spec.hidden_size
        if spec.gated:
            gate, other = (
                self._linear(f"{name}mlp.{one}", hidden, spec.ffn_size) for one in ("gate_proj", "up_proj")
            )
            up = _Linear(torch.cat((gate.weight, other.weight)), torch.cat((gate.bias, other.bias)))
        else:
            up = self._linear(f"{name}mlp.fc1", hidden, spec.ffn_size)
        return _Block(
            self._norm(f"{name}norm1"),
            self._linear(f"{name}attn.qkv", hidden, 3 * hidden),
            self._linear(f"{name}attn.proj", hidden, hidden),
            self._norm(f"{name}norm2"),
            up,
            self._linear(f"{name}mlp.{'down_proj' if spec.gated else 'fc2'}", spec.ffn_size, hidden),
        )

    def _norm(self, name: str) -> Norm:
        weight = self._tensor(f"{name}.weight", self._spec.hidden_size)
        if self._spec.norm == "rms":
            return RMSNorm(weight, EPS)
        return LayerNorm(weight, self._tensor(f"{name}.bias", self._spec.hidden_size), EPS)

    def _linear(self, name: str, inputs: int, outputs: int) -> _Linear:
        return _Linear(self._tensor(f"{name}.weight", outputs, inputs), self._tensor(f"{name}.bias", outputs))

    def _tensor(self, name: str, *shape: int) -> Tensor:
        return self._weights.tensor(self._prefix + name, shape)
