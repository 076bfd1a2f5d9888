"""Attention: the contract of every implementation, and which of them is taken.

An implementation owns a KV pool, in a layout of its choice, and reads and writes it as a StepPlan says. It
knows slots, segments and windows; not requests, weights or rotary embeddings.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor

from runtime.attention.pool import KVPool, KVShape
from runtime.attention.table import ATTENTION, AUTO
from runtime.kernels.device import INTERPRETED, compiled
from runtime.plan import StepPlan
from runtime.protocol.errors import ModelLoadError

P = TypeVar("P", bound=KVPool)


class AttentionStep(Protocol):
    """One forward pass's attention; called once per layer, in any order of layers."""

    def __call__(self, layer: int, qkv: Tensor) -> Tensor:
        """Write keys and values to the rows' slots, then attend.

        qkv [tokens, heads + 2 * kv_heads, head_dim]: query, key and value heads of the plan's rows, one row
        behind the other, rotary embedding applied. Gives [tokens, heads * head_dim]. Query head h reads key
        head h // group.
        """
        ...


@dataclass(frozen=True, slots=True, eq=False)
class Scoring:
    """How products of queries and keys become weights: softmax(softcap * tanh(scale * q k / softcap)).

    scale    None: 1 / sqrt(head_dim)
    softcap  None: the scores are not capped (arXiv 2408.00118)
    sinks    per layer, the score of one more key of each query head, whose value is zero: [heads] float32
             (arXiv 2309.17453); () = there are none
    """

    scale: float | None = None
    softcap: float | None = None
    sinks: tuple[Tensor, ...] = ()


PLAIN = Scoring()


class FixedStep(Protocol):
    """A pass of one token a row whose tables lie at a fixed place, for a CUDA graph: what `step` does is
    recorded once, and then repeated for every plan that load() took."""

    step: AttentionStep

    def load(self, plan: StepPlan) -> bool:
        """Prepare the next pass; rows behind the plan's do nothing. False, and nothing is prepared, for a
        plan that does not fit."""
        ...


class Attention(ABC, Generic[P]):
    """windows: per layer, how many tokens back a query sees, itself included; None = all."""

    def __init__(
        self,
        shape: KVShape,
        slots: int,
        heads: int,
        windows: Sequence[int | None],
        scoring: Scoring = PLAIN,
    ) -> None:
        if heads % shape.kv_heads:
            raise ValueError(f"{heads} query heads are not a multiple of {shape.kv_heads} key heads")
        self.pool = self.make_pool(shape, slots)
        self.heads, self.windows, self.group = heads, tuple(windows), heads // shape.kv_heads
        self.scale = 1 / math.sqrt(shape.head_dim) if scoring.scale is None else scoring.scale
        self.softcap, self.sinks = scoring.softcap, scoring.sinks

    @abstractmethod
    def make_pool(self, shape: KVShape, slots: int) -> P:
        """Called once. It takes bytes_per_slot() for each slot."""

    @classmethod
    def bytes_per_slot(cls, shape: KVShape) -> int:
        """Of one token in all layers; asked before the pool is made, to see how many slots there is room
        for."""
        return 2 * shape.layers * shape.kv_heads * shape.head_dim * shape.dtype.itemsize

    def fixed(self, rows: int) -> FixedStep | None:
        """For passes of at most so many rows of one token; None: there is none. The same implementation's
        are used one at a time, and those of most rows are asked for first."""
        return None

    @abstractmethod
    def begin(self, plan: StepPlan) -> AttentionStep:
        """Prepare one pass. Work here is proportional to rows, segments and runs, not to their tokens."""


TRITON_WIDEST = 576
"""Of a head whose keys and values, 16 at a time, fit into a GPU's shared memory: DeepSeek's latents do."""


def choose(name: str, device: torch.device, head_dim: int = 0) -> type[Attention[KVPool]]:
    """The implementation for `name`; "auto" = the fastest known for `device` and heads of this length. Raises
    UnknownName; ModelLoadError for one that cannot run on it."""
    if name == AUTO:
        fallback = "native" if device.type == "cpu" else "torch_views"
        name = "triton" if compiled(device) and head_dim <= TRITON_WIDEST else fallback
    elif name == "triton" and not (INTERPRETED or compiled(device)):
        raise ModelLoadError(
            f"attention 'triton' cannot run on {device.type}: it needs a CUDA device and the package triton",
            where="attention",
            hint="take 'auto', or install sglang-dsl[kernels]; TRITON_INTERPRET=1 interprets it, for tests",
        )
    found: type[Attention[KVPool]] = ATTENTION.load(name)
    return found
