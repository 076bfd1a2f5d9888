"""TorchTextRunner: runs whole texts through an encoder and pools the output. The compute plane's side of
plan.TextRunner.

It knows the model and the pooling modes; not requests, queues or lengths of vectors.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from runtime.config.encoder import EncoderSpec
from runtime.config.pooling import ENCODER_DEFAULT, Pooling
from runtime.config.runner import RunnerConfig
from runtime.engine import memory
from runtime.layers.dense import Dense
from runtime.models.encoder import Encoder, TextBatch
from runtime.plan import Text, TextResult
from runtime.protocol.errors import BadRequest, InternalFault
from runtime.protocol.sampling import SamplingParams

NOT_FINITE = "the model's numbers are not finite"


class TorchTextRunner:
    """Implements runtime.plan.TextRunner. encode() runs in the caller's thread; torch releases the GIL
    meanwhile."""

    def __init__(self, encoder: Encoder, pooling: Pooling = ENCODER_DEFAULT) -> None:
        self._encoder, self._pooling = encoder, pooling

    @classmethod
    def load(
        cls,
        path: str | Path,
        spec: EncoderSpec,
        config: RunnerConfig | None = None,
        pooling: Pooling = ENCODER_DEFAULT,
    ) -> TorchTextRunner:
        """Read the checkpoint in `path`. Raises ModelLoadError."""
        config = (config or RunnerConfig()).verify()
        directory = Path(os.path.expanduser(path))
        if config.threads is not None:
            torch.set_num_threads(config.threads)
        device = memory.pick_device(config.device)
        dtype = memory.pick_dtype(config.dtype, device)
        memory.check_fits(weight_bytes(spec, dtype), dtype, device, str(directory))
        pack = memory.packs(config.pack_weights, dtype, device)
        with torch.inference_mode():
            encoder = Encoder.load(directory, spec, dtype, device, Dense(pack=pack))
        return cls(encoder, pooling)

    def verify(self, params: SamplingParams) -> None:
        raise BadRequest("this model gives embeddings only", where="model", hint="use /v1/embeddings")

    def encode(self, texts: Sequence[Text]) -> tuple[TextResult, ...]:
        encoder = self._encoder
        try:
            with torch.inference_mode():
                batch = TextBatch(
                    encoder.spec, [one.tokens for one in texts], [one.kinds for one in texts], encoder.device
                )
                hidden = encoder.hidden(batch)
                if encoder.classifier is not None:
                    vectors = encoder.classifier(pool("cls", hidden, batch)).float()
                    if encoder.spec.score == "sigmoid":
                        vectors = vectors.sigmoid()
                else:
                    vectors = pool(self._pooling.mode, hidden, batch).float()
                sound = vectors.isfinite().all(-1).tolist()
                numbers = vectors.tolist()
        except (RuntimeError, IndexError) as error:  # out of memory, for one
            raise InternalFault(
                f"the forward pass failed: {type(error).__name__}: {error}", where="runner"
            ) from error
        return tuple(
            TextResult(tuple(vector)) if well else TextResult(error=NOT_FINITE)
            for vector, well in zip(numbers, sound, strict=True)
        )

    def close(self) -> None:
        """Nothing runs between two calls."""


def pool(mode: str, hidden: Tensor, batch: TextBatch) -> Tensor:
    """hidden [tokens, size] -> [texts, size]."""
    starts = torch.tensor(batch.starts, device=hidden.device)
    lengths = torch.tensor(batch.lengths, device=hidden.device)
    match mode:
        case "cls":
            return hidden[starts]
        case "last":
            return hidden[starts + lengths - 1]
        case "mean":
            return batch.spread(hidden).float().sum(1) / lengths[:, None]
        case "max":
            padded = batch.spread(hidden)
            if batch.mask is not None:
                padded = padded.masked_fill(~batch.mask[:, 0, 0, :, None], float("-inf"))
            return padded.amax(1)
        case _:
            raise ValueError(f"unknown pooling {mode!r}")


def weight_bytes(spec: EncoderSpec, dtype: torch.dtype) -> int:
    """Bytes of all matrices and tables of the model."""
    hidden = spec.hidden_size
    layer = 4 * hidden * hidden + 2 * hidden * spec.ffn_size
    tables = (spec.vocab_size + spec.table_positions + spec.token_types) * hidden
    return (spec.num_layers * layer + tables) * dtype.itemsize
