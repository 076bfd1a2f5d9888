"""Logit processors by name: how a request changes its logits beyond the usual parameters. A request names
one and gives parameters, never code. Imports no torch, so that checking names is cheap."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from runtime.protocol.errors import BadRequest
from runtime.protocol.registry import Registry, UnknownName
from runtime.protocol.sampling import SamplingParams

if TYPE_CHECKING:
    from torch import Tensor

PROMPT_IDS, OUTPUT_IDS = "__prompt_ids__", "__output_ids__"
"""Keys added to a request's parameters: the ids of its prompt, and the ids generated so far."""


class LogitProcessor(ABC):
    """Changes the logits of rows, which may belong to several requests. One object serves all requests and
    keeps no state between calls."""

    def verify(self, params: Mapping[str, Any], vocab_size: int) -> None:  # noqa: B027 - no is an answer
        """Raise BadRequest if a request's parameters are invalid. Called before the request runs."""

    @abstractmethod
    def process(self, logits: Tensor, params: list[dict[str, Any]]) -> Tensor:
        """logits [rows, vocab] float32, with penalties and biases applied, but not masks and temperature; may
        be changed in place. params: one dict per row, the request's custom_params with PROMPT_IDS and
        OUTPUT_IDS. Returns logits of the same shape; -inf forbids an id. An exception fails only these rows'
        requests."""


PROCESSORS: Registry[type[LogitProcessor]] = Registry(
    "logit processor",
    {
        "allowed_token_ids": "runtime.engine.sampling.processors:AllowedTokenIds",
        "bad_words": "runtime.engine.sampling.processors:BadWords",
        "deterministic": "runtime.engine.sampling.processors:Deterministic",
        "token_rules": "runtime.engine.sampling.processors:TokenRules",
        "thinking_budget": "runtime.engine.sampling.processors:ThinkingBudget",
    },
)


class Processors:
    """The processors in use, one object per name."""

    def __init__(self, table: Registry[type[LogitProcessor]] = PROCESSORS) -> None:
        self._table = table
        self._instances: dict[str, LogitProcessor] = {}

    def get(self, name: str) -> LogitProcessor:
        """Raises BadRequest, listing the known names."""
        processor = self._instances.get(name)
        if processor is None:
            try:
                processor = self._instances[name] = self._table.load(name)()
            except UnknownName as error:
                raise BadRequest(
                    str(error),
                    where="sampling_params.custom_logit_processor",
                    hint="processors are named, never sent as code",
                ) from None
        return processor

    def verify(self, params: SamplingParams, vocab_size: int) -> None:
        """Raise BadRequest for an unknown name, or invalid parameters."""
        name, custom_params = params.custom_logit_processor, params.custom_params
        if name is None:
            if custom_params:
                raise BadRequest(
                    "are for a logit processor, and none is named",
                    where="sampling_params.custom_params",
                    hint="set custom_logit_processor",
                )
            return
        processor = self.get(name)
        for key in custom_params or ():
            if key.startswith("__"):
                raise BadRequest(f"the name {key!r} is reserved", where="sampling_params.custom_params")
        processor.verify(custom_params or {}, vocab_size)
