"""Attention: the contract of every implementation, and which of them is taken.

An implementation reads and writes the KV pool as a StepPlan says. It knows slots, segments and windows; not
requests, weights or rotary embeddings.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from runtime.attention.pool import KVPool
from runtime.attention.table import ATTENTION, AUTO
from runtime.plan import StepPlan


class AttentionStep(Protocol):
    """One forward pass's attention; called once per layer, in any order of layers."""

    def __call__(self, layer: int, qkv: Tensor) -> Tensor:
        """Write keys and values to the rows' slots, then attend.

        qkv [tokens, heads + 2 * kv_heads, head_dim]: query, key and value heads of the plan's rows, one row
        behind the other, rotary embedding applied. Gives [tokens, heads * head_dim]. Query head h reads key
        head h // group.
        """
        ...


class Attention(ABC):
    """windows: per layer, how many tokens back a query sees, itself included; None = all. The scale is
    1 / sqrt(head_dim)."""

    def __init__(self, pool: KVPool, heads: int, windows: Sequence[int | None]) -> None:
        if heads % pool.kv_heads:
            raise ValueError(f"{heads} query heads are not a multiple of {pool.kv_heads} key heads")
        self.pool, self.heads, self.windows = pool, heads, tuple(windows)
        self.group = heads // pool.kv_heads

    @abstractmethod
    def begin(self, plan: StepPlan) -> AttentionStep:
        """Prepare one pass. Work here is proportional to rows, segments and runs, not to their tokens."""


def choose(name: str, device: torch.device) -> type[Attention]:
    """The implementation for `name`; "auto" = the fastest known for `device`. Raises UnknownName."""
    automatic = {"cpu": "torch_views", "cuda": "torch_views"}
    found: type[Attention] = ATTENTION.load(
        automatic.get(device.type, "torch_views") if name == AUTO else name
    )
    return found
