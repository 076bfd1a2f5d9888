"""An adapter as peft writes it: a directory with adapter_config.json and adapter_model.safetensors, in which
the tensors of a projection are <prefix><its name>.lora_A.weight [rank, inputs] and .lora_B.weight [outputs,
rank]. See peft's LoraConfig and its guide "PEFT checkpoint format".

Settings that change more than adding the product of A and B are refused by name. Knows no slots and no
passes.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open

from runtime.config.fields import Fields
from runtime.layers.linear import Projection
from runtime.layers.lora.linear import Factors
from runtime.layers.weights import LOADABLE, as_slice
from runtime.protocol.errors import AdapterError, ModelLoadError

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
_DOWN, _UP = ".lora_A.weight", ".lora_B.weight"
_OUTER = re.compile(r"^(?:(?:model|language_model|transformer)\.)+")
_REFUSED = {
    "use_dora": "DoRA rescales the weights",
    "use_qalora": "QALoRA pools the inputs",
    "lora_bias": "it has biases of its own",
    "modules_to_save": "it replaces whole modules",
    "target_parameters": "it adapts parameters that are no linear layer's",
    "trainable_token_indices": "it replaces rows of the embedding",
    "layer_replication": "it has other layers than the model",
    "alora_invocation_tokens": "it holds from certain tokens on only",
}
"""Fields of a LoraConfig that change the computation, and how."""
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Values of init_lora_weights for which peft changes the model's own weights."""


class Target(NamedTuple):
    """A projection that can be adapted: the part computed here, the inputs of the whole matrix, and this
    rank's own inputs (None: all)."""

    projection: Projection
    inputs: int
    local: range | None


def read(
    directory: Path, targets: Mapping[str, Sequence[Target]], dtype: torch.dtype, max_rank: int | None
) -> dict[Projection, Factors]:
    """The factors of each projection that the adapter in `directory` changes, on the CPU. If ranks share a
    projection, only this rank's part. targets: projections by the plain() name of the checkpoint's matrix,
    which may hold several. Raises AdapterError."""
    try:
        config = _Config.read(directory)
    except ModelLoadError as error:
        raise AdapterError(error.message, where=error.where, hint=error.hint) from error
    path = directory / WEIGHTS
    if not path.is_file():
        raise AdapterError(
            f"holds no {WEIGHTS}",
            where=str(directory),
            hint="weights are read from safetensors files only; pickled .bin files are refused",
        )
    try:
        with safe_open(str(path), framework="pt", device="cpu") as file:
            return _Reader(str(path), file, config, targets, dtype, max_rank).read()
    except (SafetensorError, OSError) as error:
        raise AdapterError(f"is not a whole safetensors file: {error}", where=str(path)) from error


def plain(name: str) -> str:
    """The name without the prefixes by which checkpoints call the same text model: an adapter uses the names
    of the modules it was trained in."""
    return _OUTER.sub("", name)


class _Config(NamedTuple):
    """The fields of a LoraConfig that the weights do not show. The keys of patterns are regular expressions
    that match ends of projection names."""

    rank: int
    alpha: float
    rslora: bool
    ranks: dict[str, Any]
    alphas: dict[str, Any]
    path: Path

    @classmethod
    def read(cls, directory: Path) -> _Config:
        """Raises AdapterError, ModelLoadError."""
        path = directory / CONFIG
        if not path.is_file():
            raise AdapterError(f"holds no {CONFIG}", where=str(directory), hint="is it an adapter of peft's?")
        fields = Fields.read(path)
        values = fields.values
        if values.get("peft_type") != "LORA":
            raise AdapterError(f"peft_type is {values.get('peft_type')!r}, not 'LORA'", where=str(path))
        for name, why in _REFUSED.items():
            if values.get(name) not in (None, False, [], {}):
                raise AdapterError(f"{name} is set: {why}, which is not supported", where=str(path))
        if values.get("bias", "none") != "none":
            raise AdapterError("bias must be 'none': biases are not adapted", where=str(path))
        start = values.get("init_lora_weights")
        if isinstance(start, str) and start.lower().startswith(_CHANGES_BASE):
            raise AdapterError(
                f"init_lora_weights is {start!r}: it belongs to changed weights of the model",
                where=str(path),
                hint="convert it (peft's path_initial_model_for_weight_conversion)",
            )
        rank, alpha = values.get("r"), values.get("lora_alpha")
        if type(rank) is not int or rank < 1:
            raise AdapterError(f"r must be a whole number from 1 on, got {rank!r}", where=str(path))
        if not isinstance(alpha, (int, float)):
            raise AdapterError(f"lora_alpha must be a number, got {alpha!r}", where=str(path))
        ranks, alphas = values.get("rank_pattern") or {}, values.get("alpha_pattern") or {}
        if not isinstance(ranks, dict) or not isinstance(alphas, dict):
            raise AdapterError("rank_pattern and alpha_pattern must be objects", where=str(path))
        return cls(rank, float(alpha), bool(values.get("use_rslora")), ranks, alphas, path)

    def of(self, name: str) -> tuple[int, float]:
        """Rank and scale of the projection `name`. Raises AdapterError."""
        rank = self._matching(self.ranks, name, self.rank)
        alpha = self._matching(self.alphas, name, self.alpha)
        return int(rank), alpha / (math.sqrt(rank) if self.rslora else rank)

    def _matching(self, patterns: Mapping[str, Any], name: str, default: float) -> float:
        for pattern, value in patterns.items():
            try:
                matches = re.match(rf"(.*\.)?({pattern})$", name)
            except re.error as error:
                raise AdapterError(f"{pattern!r} is no regular expression", where=str(self.path)) from error
            if matches:
                if type(value) not in (int, float) or value <= 0:
                    raise AdapterError(f"{pattern!r} has the value {value!r}", where=str(self.path))
                return float(value)
        return default


class _Reader(NamedTuple):
    path: str
    file: Any
    config: _Config
    targets: Mapping[str, Sequence[Target]]
    dtype: torch.dtype
    max_rank: int | None

    def read(self) -> dict[Projection, Factors]:
        keys = sorted(self.file.keys())
        names: set[str] = set()
        for key in keys:
            if not key.startswith(PREFIX) or not key.endswith((_DOWN, _UP)):
                raise AdapterError(
                    f"holds {key!r}: only the factors of linear layers are taken", where=self.path
                )
            names.add(key.removeprefix(PREFIX).removesuffix(_DOWN).removesuffix(_UP))
        if not names:
            raise AdapterError("holds no tensors", where=self.path)
        factors: dict[Projection, Factors] = {}
        for name in sorted(names):
            for target in self._of(name):
                factors[target.projection] = self._factors(name, target)
        return factors

    def _of(self, name: str) -> Sequence[Target]:
        targets = self.targets.get(plain(name))
        if targets is None:
            raise AdapterError(
                f"adapts {name!r}, which cannot be adapted in this model",
                where=self.path,
                hint="linear layers of attention and feed-forward can; embeddings, heads, experts and "
                "what latent attention folds into other matrices cannot",
            )
        return targets

    def _factors(self, name: str, target: Target) -> Factors:
        rank, scale = self.config.of(name)
        if self.max_rank is not None and rank > self.max_rank:
            raise AdapterError(
                f"{name!r} has rank {rank}, max_lora_rank is {self.max_rank}",
                where=self.path,
                hint="start the engine with a larger max_lora_rank",
            )
        part = target.projection
        down = self._tensor(name + _DOWN, (rank, target.inputs), columns=target.local)
        up = self._tensor(name + _UP, (part.outputs, rank), rows=part.local)
        return Factors(down.to(self.dtype), (up.float() * scale).to(self.dtype))

    def _tensor(
        self, name: str, shape: tuple[int, int], rows: range | None = None, columns: range | None = None
    ) -> torch.Tensor:
        try:
            part = self.file.get_slice(PREFIX + name)
        except SafetensorError as error:
            raise AdapterError(f"the tensor {name!r} is missing", where=self.path) from error
        if tuple(part.get_shape()) != shape:
            raise AdapterError(
                f"{name!r} has shape {list(part.get_shape())}, {list(shape)} fits the model and {CONFIG}",
                where=self.path,
                hint="was the adapter trained for this model?",
            )
        tensor: torch.Tensor = part[as_slice(rows), as_slice(columns)]
        if tensor.dtype not in LOADABLE:
            raise AdapterError(f"{name!r} has type {tensor.dtype}, which is not supported", where=self.path)
        if not tensor.isfinite().all():
            raise AdapterError(f"{name!r} holds numbers that are not finite", where=self.path)
        return tensor
