"""Linear: the contract of a model's matrices. What makes, loads and multiplies with them is a LinearMethod.

A model names the projections that it applies to one input; in which tensors of a checkpoint they stand, how
they lie in memory and how the product is computed is the method's business. So another method (quantised,
sharded, with adapters) changes no model.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from runtime.layers.weights import Weights


class Linear(ABC):
    """y = x W^T + b; of several projections the outputs side by side, in the order they were asked for."""

    __slots__ = ()

    @abstractmethod
    def __call__(self, x: Tensor) -> Tensor:
        """[rows, inputs] -> [rows, outputs]."""

    @abstractmethod
    def some(self, x: Tensor, outputs: Tensor) -> Tensor:
        """[rows, inputs] -> [rows, len(outputs)]: those outputs alone, in their order (int64)."""


class Projection(NamedTuple):
    """A matrix [outputs, inputs] of a checkpoint; `name` is without .weight or .bias. own: which of its
    outputs are computed here; None: all."""

    name: str
    outputs: int
    own: range | None = None

    @property
    def computed(self) -> int:
        """How many outputs are computed here."""
        return self.outputs if self.own is None else len(self.own)


class LinearMethod(ABC):
    """One for all matrices of a model, which asks for them in the order in which a pass uses them."""

    @abstractmethod
    def load(
        self,
        weights: Weights,
        parts: Sequence[Projection],
        inputs: int,
        *,
        bias: bool,
        own: range | None = None,
    ) -> Linear:
        """Projections of the same input as one Linear. own: which of the inputs it gets; None: all. Raises
        ModelLoadError."""

    def of_some_tokens(self) -> LinearMethod:
        """The method for matrices that are given only some of a pass's tokens, as experts' are."""
        return self

    @abstractmethod
    def shared(self, table: Tensor) -> Linear:
        """A Linear over the embedding's [outputs, inputs], which stays the model's: a tied head."""

    @abstractmethod
    def tune(self) -> None:
        """Called once, when all are loaded: time what depends on the processor."""
