"""A generation as a call of a backend, and its text as a value. Pure; knows no backend."""

from __future__ import annotations

import dataclasses
import functools
import json
from typing import Any, cast

from runtime.protocol.constraint import JSON_KINDS, JSON_OPTIONS, Constraint, ConstraintKind
from sglang_dsl.conversation.requests import Call, Prompt
from sglang_dsl.errors import InvalidValue
from sglang_dsl.interpreter.parameters import sampling_params
from sglang_dsl.ir import Gen, Sampling
from sglang_dsl.patterns import REGEX_BOOL, REGEX_FLOAT, REGEX_INT, REGEX_STR

_NO_PROMPT = Prompt(())
_OPTIONS = ("return_text_in_logprobs", "require_reasoning", "max_thinking_tokens", "token_healing")
"""Parameters that few backends support. They are sent as options; a backend refuses those that it does
not know."""
_BY_DTYPE: dict[str, tuple[str, tuple[str, ...]]] = {
    "int": (REGEX_INT, (" ", "\n")),
    "float": (REGEX_FLOAT, (" ", "\n")),
    "bool": (REGEX_BOOL, ()),
    "str": (REGEX_STR, ()),
}
"""dtype -> the regex of its values, and the strings that end one."""


# Programs ask for the same generations again and again.
@functools.lru_cache(maxsize=4096)
def lower(node: Gen, defaults: Sampling) -> Call:
    """The call of `node` under a program's defaults, with an empty prompt. Raises BadProgram."""
    values = node.sampling.over(defaults)
    # What ends a value would end the reasoning before it, too.
    reasons = node.reasoning is not None or values.require_reasoning
    stops = () if node.dtype is None or reasons else _BY_DTYPE[node.dtype][1]
    constraint = _constraint(node, values)
    options = {name: value for name in _OPTIONS if (value := getattr(values, name)) is not None}
    options = {name: value for name, value in options.items() if value is not False}
    if node.reasoning is not None and constraint is not None:
        options["require_reasoning"] = True  # the constraint is the answer's
    peeks = bool(values.return_logprob) and values.max_tokens == 0
    return Call(
        _NO_PROMPT,
        sampling=sampling_params(dataclasses.replace(values, max_tokens=1) if peeks else values, stops),
        constraint=constraint,
        n=values.n if values.n is not None else 1,
        return_logprob=bool(values.return_logprob),
        logprob_start_len=-1 if values.logprob_start_len is None else values.logprob_start_len,
        top_logprobs=values.top_logprobs_num or 0,
        options=options,
        peeks=peeks,
    )


def _constraint(node: Gen, values: Sampling) -> Constraint | None:
    """The constraint of a generation, with the parameters about JSON if it may contain any."""
    specs = {
        "regex": node.regex if node.dtype is None else _BY_DTYPE[node.dtype][0],
        "json_schema": node.json_schema,
        "ebnf": node.ebnf,
        "structural_tag": node.structural_tag,
        "choices": None if node.choices is None else json.dumps(node.choices, ensure_ascii=False),
    }
    for kind, spec in specs.items():
        if spec is not None:
            about_json = {name: getattr(values, name) for name in JSON_OPTIONS} if kind in JSON_KINDS else {}
            return Constraint(cast(ConstraintKind, kind), spec, **about_json)
    return None


# -- values ----


def typed_value(node: Gen, text: str, meta: dict[str, Any]) -> Any:
    """What a generated text is read as. `meta`: of this text (see of_sample). Raises InvalidValue: it is no
    value of its type, or the backend says that it is not what its constraint requires."""
    fault = meta.get("invalid")
    if node.typed is None and fault is None:
        return text
    start = meta.get("answer_start")
    if node.reasoning is None and isinstance(start, int):
        text = text[start:]  # the rest is reasoning before it (require_reasoning)
    try:
        value = text
        if node.typed is not None and (fault is None or node.typed.kind == "json"):
            value = node.typed.read(text)
        if fault is not None:
            raise ValueError(fault)
        return value
    except ValueError as error:
        requirement = f"a valid {node.typed.name}" if node.typed else f"what its {_form(node)} requires"
        hint = None if fault is None or node.retries else "gen(name, type, retries=2) asks again"
        raise InvalidValue(
            f"the text is not {requirement}: {error}; it is {text!r:.200}",
            retryable=fault is not None,
            hint="it was cut off: increase max_tokens" if was_cut(meta) else hint,
        ) from error


def _form(node: Gen) -> str:
    """The parameter of gen that says what the text must match."""
    forms = ("dtype", "regex", "json_schema", "ebnf", "structural_tag", "choices")
    return next((form for form in forms if getattr(node, form) is not None), "constraint")


def of_sample(meta: dict[str, Any], index: int) -> dict[str, Any]:
    """What was said of one text of a generation."""
    samples = meta.get("samples")
    return samples[index] if samples else meta


def was_cut(meta: dict[str, Any]) -> bool:
    """Whether a text ended at its token limit."""
    return bool((meta.get("finish_reason") or {}).get("type") == "length")
