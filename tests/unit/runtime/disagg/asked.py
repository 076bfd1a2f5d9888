"""Requests at random, of every kind that a pair of engines answers, and how two answers are compared."""

from __future__ import annotations

import random
from typing import Any

WORDS = (
    "the", "capital", "of", "France", "is", "Paris;", "a", "small", "model", "answers:", "yes", "no", "maybe",
    "3", "+", "4", "=", "7", "hello",
)  # fmt: skip
REGEXES = (
    "(yes|no), [a-z]{2,6}", "The answer is (yes|no)\\.", "[0-9]{1,4}", "(red|green|blue)( [a-z]+){1,3}",
)  # fmt: skip
SCHEMA = (
    '{"type": "object", "properties": {"name": {"type": "string", "maxLength": 8}, '
    '"age": {"type": "integer"}}, "required": ["name", "age"]}'
)
TOLERANCE = 2e-3
"""Of log-probabilities: the sums of a batch are rounded in another order."""


def request(dice: random.Random, room: int, at: dict[str, Any], *, heads: int = 6) -> dict[str, Any]:
    """The fields of a GenerateReqInput. `at`: bootstrap_host and bootstrap_port."""
    head = random.Random(dice.randrange(heads))
    words = [head.choice(WORDS) for _ in range(dice.choice([0, 0, 20, 60]))]
    words += [dice.choice(WORDS) for _ in range(dice.randrange(1, 30))]
    params: dict[str, Any] = {"max_new_tokens": dice.choice([0, 1, 2, 8, 16, 24])}
    if dice.random() < 0.5:
        params["temperature"] = 0.0
    else:
        # Among few tokens: where thousands share the unit interval, every thousandth draw lies so near to a
        # bound between two that it depends on the batch, with one engine as with two.
        params |= {"temperature": dice.choice([0.7, 1.0]), "seed": dice.randrange(1 << 30), "top_k": 8}
        if dice.random() < 0.5:
            params["top_p"] = 0.9
    match dice.randrange(10):
        case 0:
            params["regex"] = dice.choice(REGEXES)
        case 1:
            params["json_schema"] = SCHEMA
        case 2:
            params["stop"] = ["e", " a"]
        case 3:
            params |= {"frequency_penalty": 0.5, "repetition_penalty": 1.2}
        case 4:
            params["ignore_eos"] = True
    if "regex" in params or "json_schema" in params:
        params["max_new_tokens"] = 40
    fields: dict[str, Any] = {
        "text": " ".join(words),
        "sampling_params": params,
        "bootstrap_room": room,
        **at,
    }
    if dice.random() < 0.15 and params["max_new_tokens"]:
        params["n"] = dice.choice([2, 3])
    if dice.random() < 0.3:
        fields |= {"return_logprob": True, "top_logprobs_num": dice.choice([0, 2])}
        if dice.random() < 0.4:
            fields["logprob_start_len"] = 0
        if dice.random() < 0.3:
            fields["token_ids_logprob"] = [5, 9]
    if dice.random() < 0.1:
        fields["token_healing"] = True
    if dice.random() < 0.1:
        fields["jump_forward"] = False
    return fields


def without_room(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if not name.startswith("bootstrap")}


def merged(prefill: dict[str, Any], decode: dict[str, Any]) -> dict[str, Any]:
    """As a router answers: the prompt's log-probabilities are the prefill engine's."""
    meta = dict(decode["meta_info"])
    meta |= {name: value for name, value in prefill["meta_info"].items() if name.startswith("input_t")}
    return {**decode, "meta_info": meta}


def differences(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """What differs between two answers to the same request."""
    found = [name for name in ("text", "output_ids") if one[name] != other[name]]
    mine, theirs = one["meta_info"], other["meta_info"]
    scores = [
        name for name in sorted(mine.keys() | theirs.keys()) if name.startswith(("input_t", "output_t"))
    ]
    compared = ["finish_reason", "prompt_tokens", "completion_tokens", *scores]
    wrong = [name for name in compared if not close(mine.get(name), theirs.get(name))]
    return [*found, *(f"{name}: {mine.get(name)} / {theirs.get(name)}" for name in wrong)]


def close(one: Any, other: Any) -> bool:
    if isinstance(one, float) and isinstance(other, float):
        return abs(one - other) < TOLERANCE
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(close, one, other))
    return bool(one == other)
