"""Logit processors by name: what a request may have done to its logits besides the usual parameters.

A request gives a registered name and parameters, never code. The table loads no torch, so that whoever only
lists or checks names stays light. It knows no requests and no grammar.
"""

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
"""Keys that are added to a request's parameters: the ids of its prompt, and those generated so far."""


class LogitProcessor(ABC):
    """Changes logits of rows, several requests' at once. One object serves all requests: it keeps nothing
    between calls."""

    def verify(self, params: Mapping[str, Any], vocab_size: int) -> None:  # noqa: B027 - no is an answer
        """Raise BadRequest when a request's parameters are not usable. Called before the request runs."""

    @abstractmethod
    def process(self, logits: Tensor, params: list[dict[str, Any]]) -> Tensor:
        """logits [rows, vocab] float32, penalties and biases applied, masks and temperature not; may be
        changed in place. params: one dict per row, the request's custom_params and PROMPT_IDS, OUTPUT_IDS.
        Returns logits of the same shape; -inf forbids an id. What is raised fails the rows' requests only.
        """


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
        self._made: dict[str, LogitProcessor] = {}

    def get(self, name: str) -> LogitProcessor:
        """Raises BadRequest, listing the known names."""
        made = self._made.get(name)
        if made is None:
            try:
                made = self._made[name] = self._table.load(name)()
            except UnknownName as error:
                raise BadRequest(
                    str(error),
                    where="sampling_params.custom_logit_processor",
                    hint="processors are named, never sent as code",
                ) from None
        return made

    def verify(self, params: SamplingParams, vocab_size: int) -> None:
        """Raise BadRequest for an unknown name, or parameters that its processor cannot use."""
        name, given = params.custom_logit_processor, params.custom_params
        if name is None:
            if given:
                raise BadRequest(
                    "are for a logit processor, and none is named",
                    where="sampling_params.custom_params",
                    hint="set custom_logit_processor",
                )
            return
        processor = self.get(name)
        for key in given or ():
            if key.startswith("__"):
                raise BadRequest(f"the name {key!r} is reserved", where="sampling_params.custom_params")
        processor.verify(given or {}, vocab_size)
