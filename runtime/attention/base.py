"""Attention: the interface of every implementation, and the choice among them.

An implementation owns a KV pool, in a layout of its choice, and reads and writes it as a StepPlan says. It
knows slots, segments and windows; not requests, weights or rotary embeddings.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeAlias, TypeVar

import torch
from torch import Tensor

from runtime.attention.pool import KVPool, KVShape
from runtime.attention.table import ATTENTION, AUTO
from runtime.kernels.device import INTERPRETED, compiled
from runtime.plan import StepPlan
from runtime.protocol.errors import ModelLoadError

P = TypeVar("P", bound=KVPool)


AttentionStep: TypeAlias = Callable[[int, Tensor], Tensor]
"""The attention of one forward pass, called once per layer, in any order: writes keys and values to the rows'
slots, then attends. (layer, qkv) -> [tokens, heads * head_dim].

qkv [tokens, heads + 2 * kv_heads, head_dim]: query, key and value heads of the plan's rows, concatenated,
with the rotary embedding applied. Query head h reads key head h // group.
"""


@dataclass(frozen=True, slots=True, eq=False)
class Scoring:
    """How attention weights are computed: softmax(softcap * tanh(scale * q k / softcap)).

    scale    None: 1 / sqrt(head_dim)
    softcap  None: the scores are not capped (arXiv 2408.00118)
    sinks    per layer, the score of an extra key of each query head whose value is zero: [heads] float32
             (arXiv 2309.17453); () = none
    """

    scale: float | None = None
    softcap: float | None = None
    sinks: tuple[Tensor, ...] = ()


PLAIN = Scoring()


class FixedStep(ABC):
    """A pass of one token per row whose tables have fixed addresses, for a CUDA graph: `step` is recorded
    once, and then replayed for every plan that load() accepted."""

    step: AttentionStep

    @abstractmethod
    def load(self, plan: StepPlan) -> bool:
        """Prepare the next pass; rows beyond the plan's do nothing. Returns False, and prepares nothing, if
        the plan does not fit."""


class Attention(ABC, Generic[P]):
    """windows: per layer, how many tokens back a query sees, itself included; None = all."""

    def __init__(
        self, shape: KVShape, slots: int, heads: int, windows: Sequence[int | None], scoring: Scoring = PLAIN
    ) -> None:
        if heads % shape.kv_heads:
            raise ValueError(f"{heads} query heads are not a multiple of {shape.kv_heads} key heads")
        self.pool = self.make_pool(shape, slots)
        self.heads, self.windows, self.group = heads, tuple(windows), heads // shape.kv_heads
        self.scale = 1 / math.sqrt(shape.head_dim) if scoring.scale is None else scoring.scale
        self.softcap, self.sinks = scoring.softcap, scoring.sinks

    @abstractmethod
    def make_pool(self, shape: KVShape, slots: int) -> P:
        """Called once. The pool uses bytes_per_slot() for each slot."""

    @classmethod
    def bytes_per_slot(cls, shape: KVShape) -> int:
        """Bytes of one token in all layers. Called before the pool is created, to compute the number of
        slots."""
        return 2 * shape.layers * shape.kv_heads * shape.head_dim * shape.dtype.itemsize

    def fixed(self, rows: int) -> FixedStep | None:
        """A step for passes of at most `rows` rows of one token; None if not supported. The steps of an
        implementation run one at a time, and the largest is asked for first."""
        return None

    @abstractmethod
    def begin(self, plan: StepPlan) -> AttentionStep:
        """Prepare one pass. The work here grows with rows, segments and runs, not with their tokens."""


TRITON_WIDEST = 576
"""The largest head_dim whose keys and values, 16 at a time, fit into a GPU's shared memory, as DeepSeek's
latents do."""


def choose(name: str, device: torch.device, head_dim: int = 0) -> type[Attention[KVPool]]:
    """The implementation for `name`; "auto" = the fastest for `device` and this head_dim. Raises UnknownName;
    ModelLoadError if it cannot run on the device."""
    if name == AUTO:
        fallback = "native" if device.type == "cpu" else "torch_views"
        name = "triton" if compiled(device) and head_dim <= TRITON_WIDEST else fallback
    elif name == "triton" and not (INTERPRETED or compiled(device)):
        raise ModelLoadError(
            f"attention 'triton' cannot run on {device.type}: it needs a CUDA device and the package triton",
            where="attention",
            hint="take 'auto', or install sglang-dsl[kernels]; TRITON_INTERPRET=1 interprets it, for tests",
        )
    implementation: type[Attention[KVPool]] = ATTENTION.load(name)
    return implementation
