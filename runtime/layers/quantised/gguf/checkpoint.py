"""GGUFCheckpoint: the weights of a GGUF file under the names that safetensors have, and their Format."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from runtime.config.gguf.directory import WEIGHTS
from runtime.config.gguf.header import Place, read_header
from runtime.layers.quantised.codes import Codes
from runtime.layers.quantised.formats import Format
from runtime.layers.quantised.gguf.blocks import TYPES, codes_of
from runtime.layers.weights import LOADABLE, Checkpoint, Weights
from runtime.protocol.errors import ModelLoadError

_PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "rope_freqs": "rope_freqs",  # read with the settings
}
_IN_LAYER = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LAYER = re.compile(r"blk\.(\d+)\.(.+)\.(weight|bias)")
_OTHER = re.compile(r"(.+)\.(weight|bias)")
_PAIRS_APART = re.compile(r"\.self_attn\.(q|k)_proj\.(weight|bias)$")


class GGUFCheckpoint(Checkpoint):
    """Of a directory that `directory_of` made. take() gives numbers whatever the type; codes() gives a matrix
    in codes."""

    def _open(self) -> None:
        self._places: dict[str, Place] = {}
        self._head_counts = (0, 0)
        for link in sorted(self.directory.glob(WEIGHTS)):
            header = read_header(link)
            architecture = header.values.get("general.architecture")
            if architecture == "llama":  # of several files the first says it
                fields = header.fields
                heads = fields.integer("llama.attention.head_count")
                self._head_counts = heads, fields.integer("llama.attention.head_count_kv", heads)
            self._files[link.name] = np.memmap(link, mode="r")
            for name, place in header.tensors.items():
                known = _known(name)
                self._where[known], self._places[known] = link.name, place
        self._taken.add("rope_freqs.weight")

    def shape_of(self, name: str) -> tuple[int, ...]:
        return self._place(name).shape

    def quantised(self, name: str) -> bool:
        """Whether the tensor is there, in codes."""
        return name in self._places and self._places[name].kind.name in TYPES

    def codes(self, name: str, shape: Sequence[int], rows: range | None = None) -> Codes:
        """The matrix of a quantised type, or some of its rows. Raises ModelLoadError."""
        place = self._checked(name, shape)
        order = self._order(name, shape[0])
        data = self._bytes(name, place)
        if order is not None:
            data = data[order if rows is None else order[rows.start : rows.stop]]
        elif rows is not None:
            data = data[rows.start : rows.stop]
        return codes_of(place.kind.name, data)

    def take(
        self,
        name: str,
        shape: Sequence[int],
        rows: range | None = None,
        columns: range | None = None,
        types: Sequence[torch.dtype] = LOADABLE,
    ) -> Tensor:
        if self.quantised(name):
            numbers = self.codes(name, shape, rows).dense()
        else:
            place = self._checked(name, shape)
            numbers = self._bytes(name, place).view(_PLAIN[place.kind.name])
            if len(shape) == 1:
                numbers = numbers.flatten()
            order = self._order(name, shape[0])
            if order is not None:
                numbers = numbers[order]
            if rows is not None:
                numbers = numbers[rows.start : rows.stop]
        return numbers if columns is None else numbers[:, columns.start : columns.stop]

    def _place(self, name: str) -> Place:
        if name not in self._places:
            raise ModelLoadError(f"the tensor {name!r} is missing", where=str(self.directory))
        return self._places[name]

    def _checked(self, name: str, shape: Sequence[int]) -> Place:
        place = self._place(name)
        if place.shape != tuple(shape):
            raise ModelLoadError(
                f"{name!r} has shape {list(place.shape)}, its settings imply {list(shape)}",
                where=self.path_of(name),
            )
        return place

    def _bytes(self, name: str, place: Place) -> Tensor:
        """uint8 [rows, bytes of a row]; of a vector one row."""
        lying = self._files[self._where[name]][place.offset : place.offset + place.nbytes]
        self._taken.add(name)
        self.bytes_taken += place.nbytes
        if self._bar is not None:
            self._bar.update(place.nbytes)
        rows = place.shape[0] if len(place.shape) > 1 else 1
        return torch.from_numpy(np.array(lying)).view(rows, -1)

    def _order(self, name: str, rows: int) -> Tensor | None:
        """Where the rows of a query or key projection lie. llama.cpp turns neighbours where transformers
        turns a head's halves, so converters of Llama's models put a head's rows 0, n/2, 1, n/2 + 1, ..."""
        found = _PAIRS_APART.search(name)
        if found is None or not self._head_counts[0]:
            return None
        heads = self._head_counts[0] if found[1] == "q" else self._head_counts[1]
        return torch.arange(rows).view(heads, -1, 2).transpose(1, 2).flatten()


class GGUF(Format):
    """Each tensor of its own type; those in plain numbers are read as such."""

    def holds(self, weights: Weights, name: str) -> bool:
        return _file(weights).quantised(f"{name}.weight")

    def read(self, weights: Weights, name: str, outputs: int, inputs: int) -> Codes:
        return _file(weights).codes(f"{name}.weight", (outputs, inputs))


def _file(weights: Weights) -> GGUFCheckpoint:
    assert isinstance(weights.checkpoint, GGUFCheckpoint), "config.json says that the weights are in GGUF"
    return weights.checkpoint


def _known(name: str) -> str:
    """A tensor's name in safetensors; its own where it has none."""
    if (found := _LAYER.fullmatch(name)) and found[2] in _IN_LAYER:
        return f"model.layers.{found[1]}.{_IN_LAYER[found[2]]}.{found[3]}"
    if (found := _OTHER.fullmatch(name)) and found[1] in _NAMES:
        return f"{_NAMES[found[1]]}.{found[2]}"
    return name
