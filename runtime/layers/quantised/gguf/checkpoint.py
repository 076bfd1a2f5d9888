"""GGUFCheckpoint: the weights of a GGUF file under their names in safetensors, and their Format."""

from __future__ import annotations

import re

import numpy as np
import torch
from torch import Tensor

from runtime.config.gguf.directory import WEIGHTS
from runtime.config.gguf.header import TensorInfo, read_header
from runtime.layers.quantised.codes import Codes
from runtime.layers.quantised.formats import Format
from runtime.layers.quantised.gguf.blocks import TYPES, codes_of
from runtime.layers.weights import LOADABLE, Checkpoint, Part, Shape, Types, Weights
from runtime.protocol.errors import ModelLoadError

_PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "rope_freqs": "rope_freqs",  # already read with the settings
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
    """The checkpoint of a directory that `directory_of` created. take() returns numbers for any type; codes()
    returns a quantised matrix."""

    def _open(self) -> None:
        self._infos: dict[str, TensorInfo] = {}
        self._head_counts = (0, 0)
        for link in sorted(self.directory.glob(WEIGHTS)):
            header = read_header(link)
            architecture = header.values.get("general.architecture")
            if architecture == "llama":  # of several files, only the first has it
                fields = header.fields
                heads = fields.integer("llama.attention.head_count")
                self._head_counts = heads, fields.integer("llama.attention.head_count_kv", heads)
            self._files[link.name] = np.memmap(link, mode="r")
            for name, info in header.tensors.items():
                known = _known(name)
                self._file_of[known], self._infos[known] = link.name, info
        self._taken.add("rope_freqs.weight")

    def shape_of(self, name: str) -> tuple[int, ...]:
        return self._info(name).shape

    def quantised(self, name: str) -> bool:
        """Whether the tensor exists and is quantised."""
        return name in self._infos and self._infos[name].kind.name in TYPES

    def codes(self, name: str, shape: Shape, rows: Part = None) -> Codes:
        """The quantised matrix, or some of its rows. Raises ModelLoadError."""
        info = self._checked(name, shape)
        order = self._order(name, shape[0])
        data = self._bytes(name, info)
        if order is not None:
            data = data[order if rows is None else order[rows.start : rows.stop]]
        elif rows is not None:
            data = data[rows.start : rows.stop]
        return codes_of(info.kind.name, data)

    def take(
        self, name: str, shape: Shape, rows: Part = None, columns: Part = None, types: Types = LOADABLE
    ) -> Tensor:
        if self.quantised(name):
            numbers = self.codes(name, shape, rows).dense()
        else:
            info = self._checked(name, shape)
            numbers = self._bytes(name, info).view(_PLAIN[info.kind.name])
            if len(shape) == 1:
                numbers = numbers.flatten()
            order = self._order(name, shape[0])
            if order is not None:
                numbers = numbers[order]
            if rows is not None:
                numbers = numbers[rows.start : rows.stop]
        return numbers if columns is None else numbers[:, columns.start : columns.stop]

    def _info(self, name: str) -> TensorInfo:
        if name not in self._infos:
            raise ModelLoadError(f"the tensor {name!r} is missing", where=str(self.directory))
        return self._infos[name]

    def _checked(self, name: str, shape: Shape) -> TensorInfo:
        info = self._info(name)
        if info.shape != tuple(shape):
            raise ModelLoadError(
                f"{name!r} has shape {list(info.shape)}, its settings imply {list(shape)}",
                where=self.path_of(name),
            )
        return info

    def _bytes(self, name: str, info: TensorInfo) -> Tensor:
        """uint8 [rows, bytes per row]; a vector is one row."""
        lying = self._files[self._file_of[name]][info.offset : info.offset + info.nbytes]
        self._taken.add(name)
        self.bytes_taken += info.nbytes
        if self._bar is not None:
            self._bar.update(info.nbytes)
        rows = info.shape[0] if len(info.shape) > 1 else 1
        return torch.from_numpy(np.array(lying)).view(rows, -1)

    def _order(self, name: str, rows: int) -> Tensor | None:
        """The order of rows of a query or key projection. llama.cpp rotates neighbouring dimensions,
        transformers the two halves of a head; so converters of Llama models store a head's rows as 0, n/2, 1,
        n/2 + 1, ..."""
        match = _PAIRS_APART.search(name)
        if match is None or not self._head_counts[0]:
            return None
        heads = self._head_counts[0] if match[1] == "q" else self._head_counts[1]
        return torch.arange(rows).view(heads, -1, 2).transpose(1, 2).flatten()


class GGUF(Format):
    """Each tensor has its own type; unquantised ones are read as they are."""

    def holds(self, weights: Weights, name: str) -> bool:
        return _file(weights).quantised(f"{name}.weight")

    def read(self, weights: Weights, name: str, outputs: int, inputs: int) -> Codes:
        return _file(weights).codes(f"{name}.weight", (outputs, inputs))


def _file(weights: Weights) -> GGUFCheckpoint:
    assert isinstance(weights.checkpoint, GGUFCheckpoint), "config.json says that the weights are in GGUF"
    return weights.checkpoint


def _known(name: str) -> str:
    """A tensor's name in safetensors, or its GGUF name if it has none there."""
    if (match := _LAYER.fullmatch(name)) and match[2] in _IN_LAYER:
        return f"model.layers.{match[1]}.{_IN_LAYER[match[2]]}.{match[3]}"
    if (match := _OTHER.fullmatch(name)) and match[1] in _NAMES:
        return f"{_NAMES[match[1]]}.{match[2]}"
    return name
