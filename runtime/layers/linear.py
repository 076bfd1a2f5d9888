"""Linear: the interface of a model's matrices. A model names the projections that it applies to one input; a
LinearMethod decides which tensors hold them, how they lie in memory and how they are multiplied."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

from torch import Tensor

from runtime.layers.weights import Weights


class Linear(ABC):
    """y = x W^T + b. The outputs of several projections are concatenated, in the order they were asked
    for."""

    __slots__ = ()

    @abstractmethod
    def __call__(self, x: Tensor) -> Tensor:
        """[rows, inputs] -> [rows, outputs]."""

    @abstractmethod
    def some(self, x: Tensor, outputs: Tensor) -> Tensor:
        """[rows, inputs] -> [rows, len(outputs)]: only these outputs (int64), in their order."""


class Projection(NamedTuple):
    """A matrix [outputs, inputs] of a checkpoint; `name` is without .weight or .bias. local: the outputs
    computed here; None: all."""

    name: str
    outputs: int
    local: range | None = None

    @property
    def computed(self) -> int:
        """The number of outputs computed here."""
        return self.outputs if self.local is None else len(self.local)


Parts: TypeAlias = Sequence[Projection]


class LinearMethod(ABC):
    """Loads all matrices of a model, which asks for them in the order in which a pass uses them."""

    @abstractmethod
    def load(
        self, weights: Weights, parts: Parts, inputs: int, *, bias: bool, local: range | None = None
    ) -> Linear:
        """Projections of the same input as one Linear. local: the inputs that it gets; None: all. Raises
        ModelLoadError."""

    def of_some_tokens(self) -> LinearMethod:
        """The method for matrices that see only some of a pass's tokens, as experts do."""
        return self

    @abstractmethod
    def shared(self, table: Tensor) -> Linear:
        """A Linear over the embedding's [outputs, inputs], which the model keeps using: a tied head."""

    def tune(self) -> None:  # noqa: B027 - most methods have nothing to measure
        """Called once when all matrices are loaded, to measure what depends on the processor."""
