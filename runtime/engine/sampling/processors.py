"""The bundled logit processors. Each knows its own parameters and nothing else."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from runtime.engine.sampling.logit_processors import OUTPUT_IDS, LogitProcessor
from runtime.protocol.errors import BadRequest


class TokenRules(LogitProcessor):
    """allowed_token_ids: only these may be generated. bad_words_ids: sequences of ids that must not appear;
    banned_token_ids: single ids. At least one of them."""

    names: tuple[str, ...] = ("allowed_token_ids", "bad_words_ids", "banned_token_ids")

    def verify(self, params: Mapping[str, Any], vocab_size: int) -> None:
        _only(params, *self.names)
        if not params and "bad_words_ids" in self.names:
            raise _wrong("bad_words_ids", "or banned_token_ids must be given")
        for name in ("allowed_token_ids", "banned_token_ids"):
            if name in params or self.names == (name,):
                _ids(params, name, vocab_size)
        sequences = params.get("bad_words_ids", [])
        if not isinstance(sequences, (list, tuple)):
            raise _wrong("bad_words_ids", "must be a list of lists of ids")
        for word in sequences:
            _ids({"bad_words_ids": word}, "bad_words_ids", vocab_size)

    def process(self, logits: Tensor, params: list[dict[str, Any]]) -> Tensor:
        for row, mine in enumerate(params):
            output = mine[OUTPUT_IDS]
            banned = list(mine.get("banned_token_ids", ()))
            for word in mine.get("bad_words_ids", ()):
                before = len(word) - 1
                if before <= len(output) and list(output[len(output) - before :]) == list(word[:-1]):
                    banned.append(word[-1])
            logits[row, torch.tensor(banned, dtype=torch.int64, device=logits.device)] = -math.inf
            if "allowed_token_ids" in mine:
                ids = torch.tensor(mine["allowed_token_ids"], device=logits.device)
                kept = logits[row, ids]
                logits[row] = -math.inf
                logits[row, ids] = kept
        return logits


class AllowedTokenIds(TokenRules):
    names = ("allowed_token_ids",)


class BadWords(TokenRules):
    names = ("bad_words_ids", "banned_token_ids")


class Deterministic(LogitProcessor):
    """token_id: always generate this one. For tests of clients."""

    def verify(self, params: Mapping[str, Any], vocab_size: int) -> None:
        _only(params, "token_id")
        _ids({"token_id": [params.get("token_id")]}, "token_id", vocab_size)

    def process(self, logits: Tensor, params: list[dict[str, Any]]) -> Tensor:
        return _forced(logits, {row: mine["token_id"] for row, mine in enumerate(params)})


class ThinkingBudget(LogitProcessor):
    """thinking_budget: after this many tokens of reasoning, think_end_ids (the ids that end it) are generated
    one by one. think_start_ids: reasoning begins where they appear in the output; without them it begins with
    the output."""

    def verify(self, params: Mapping[str, Any], vocab_size: int) -> None:
        _only(params, "thinking_budget", "think_end_ids", "think_start_ids")
        budget = params.get("thinking_budget")
        if type(budget) is not int or budget < 0:
            raise _wrong("thinking_budget", f"must be a number of tokens, 0 or greater, got {budget!r}")
        _ids(params, "think_end_ids", vocab_size)
        if "think_start_ids" in params:
            _ids(params, "think_start_ids", vocab_size)

    def process(self, logits: Tensor, params: list[dict[str, Any]]) -> Tensor:
        forced = {}
        for row, mine in enumerate(params):
            token = self._next(mine)
            if token is not None:
                forced[row] = token
        return _forced(logits, forced)

    @staticmethod
    def _next(params: Mapping[str, Any]) -> int | None:
        """The id that is forced now, or None."""
        output, end = np.asarray(params[OUTPUT_IDS], dtype=np.int64), list(params["think_end_ids"])
        begin = 0
        if start := list(params.get("think_start_ids", ())):
            begin = _find(output, start, 0) + len(start)
            if begin < len(start):
                return None
        if _find(output, end, begin) >= 0 or len(output) - begin < params["thinking_budget"]:
            return None
        last = output[begin:].tolist()[-len(end) :]
        done = next((size for size in range(len(end) - 1, 0, -1) if last[-size:] == end[:size]), 0)
        return int(end[done])


def _find(output: npt.NDArray[np.int64], sequence: Sequence[int], begin: int) -> int:
    """The first index of `sequence` in `output` from `begin` on; -1 if there is none."""
    count = len(output) - begin - len(sequence) + 1
    if count <= 0:
        return -1
    here = np.ones(count, dtype=np.bool_)
    for offset, token in enumerate(sequence):
        here &= output[begin + offset : begin + offset + count] == token
    at = int(here.argmax())
    return begin + at if here[at] else -1


def _forced(logits: Tensor, tokens: Mapping[int, int]) -> Tensor:
    for row, token in tokens.items():
        logits[row] = -math.inf
        logits[row, token] = 0.0
    return logits


def _only(params: Mapping[str, Any], *known: str) -> None:
    for name in params:
        if name not in known:
            raise BadRequest(
                f"unknown parameter {name!r}; known: {', '.join(known)}",
                where="sampling_params.custom_params",
            )


def _ids(params: Mapping[str, Any], name: str, vocab_size: int) -> None:
    ids = params.get(name)
    if not isinstance(ids, (list, tuple)) or not ids:
        raise _wrong(name, "must be a list of ids, not empty")
    for token in ids:
        if type(token) is not int or not 0 <= token < vocab_size:
            raise _wrong(name, f"must be ids in [0, {vocab_size}), got {token!r}")


def _wrong(name: str, rule: str) -> BadRequest:
    return BadRequest(f"{name} {rule}", where=f"sampling_params.custom_params.{name}")
