"""Muon for weight matrices and AdamW for the rest, small enough for a CPU.

Matrices of one shape are orthogonalised together, in bfloat16 where the caller found that faster.
Knows nothing of the model beyond parameter shapes; one learning-rate factor scales both parts.
"""

from __future__ import annotations

from collections import defaultdict

import torch
import torch.distributed as dist
from torch import Tensor, nn

__all__ = ["Optimizer"]


def _orthogonal(batch: Tensor, steps: int = 5) -> Tensor:
    """Newton-Schulz iteration towards the nearest orthogonal matrices of a batch."""
    tall = batch.shape[-2] > batch.shape[-1]
    x = batch.mT if tall else batch
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x.mT if tall else x


def _shared(batch: Tensor, dtype: torch.dtype) -> Tensor:
    """Orthogonalises this worker's share of a batch; the other matrices come out zero."""
    if not dist.is_initialized():
        return _orthogonal(batch.to(dtype)).to(batch.dtype)
    rank, world = dist.get_rank(), dist.get_world_size()
    out = torch.zeros_like(batch)
    out[rank::world] = _orthogonal(batch[rank::world].to(dtype)).to(batch.dtype)
    return out


def _summed(parts: list[Tensor]) -> list[Tensor]:
    """Puts the workers' shares together."""
    if not dist.is_initialized():
        return parts
    flat = torch.cat([part.flatten() for part in parts])
    dist.all_reduce(flat)
    pieces = flat.split([part.numel() for part in parts])
    return [piece.view_as(part) for piece, part in zip(pieces, parts, strict=True)]


class Optimizer:
    """Both optimisers with one learning-rate factor."""

    def __init__(
        self,
        model: nn.Module,
        muon: float = 0.02,
        adam: float = 3e-3,
        decay: float = 0.01,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.dtype = dtype
        named = dict(model.named_parameters())
        self.matrices = {n: p for n, p in named.items() if p.dim() == 2 and "embed" not in n}
        self.groups: dict[torch.Size, list[str]] = defaultdict(list)
        for name, weight in self.matrices.items():
            self.groups[weight.shape].append(name)
        self.momentum = {n: torch.zeros_like(p) for n, p in self.matrices.items()}
        rest = [p for n, p in named.items() if n not in self.matrices]
        self.adam = torch.optim.AdamW(rest, lr=adam, betas=(0.9, 0.98), weight_decay=0.0)
        self.muon_rate, self.adam_rate, self.decay = muon, adam, decay

    @torch.no_grad()
    def step(self, factor: float) -> None:
        """One update with learning rates scaled by `factor`."""
        for group in self.adam.param_groups:
            group["lr"] = self.adam_rate * factor
        self.adam.step()
        rate = self.muon_rate * factor
        parts: list[Tensor] = []
        for names in self.groups.values():
            moves = []
            for name in names:
                gradient, momentum = self.matrices[name].grad, self.momentum[name]
                assert gradient is not None
                momentum.lerp_(gradient, 0.05)
                moves.append(gradient.lerp(momentum, 0.95))
            parts.append(_shared(torch.stack(moves), self.dtype))
        for (size, names), moved in zip(self.groups.items(), _summed(parts), strict=True):
            scale = max(1.0, size[0] / size[1]) ** 0.5
            for name, move in zip(names, moved, strict=True):
                self.matrices[name].mul_(1 - rate * self.decay).add_(move, alpha=-rate * scale)
