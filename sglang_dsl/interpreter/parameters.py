"""Keyword arguments of generations and runs, checked where they are written: a wrong one is a BadProgram.
Knows no backend. Nothing that a user passed in is kept: lists are copied into tuples.
"""

from __future__ import annotations

import dataclasses
import json
import numbers
import os
import re
from collections.abc import Iterable, Mapping
from typing import Any

from runtime.protocol.constraint import JSON_KINDS, JSON_OPTIONS
from runtime.protocol.errors import BadRequest
from runtime.protocol.registry import MissingExtra
from runtime.protocol.sampling import SamplingParams
from sglang_dsl.budgets import Budget
from sglang_dsl.errors import BadProgram, warn
from sglang_dsl.ir import Sampling, caller
from sglang_dsl.ir import typed as types
from sglang_dsl.ir.syntax import KEPT, marked

PARAMETERS: dict[str, str] = {f.name: f.name for f in dataclasses.fields(Sampling)} | {
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
}
"""Sampling parameters of a program and of a generation -> the field of Sampling."""
RUN_OPTIONS = frozenset(
    {
        "backend", "stream", "timeout", "budget", "cache", "cache_dir", "use_thread", "num_api_spec_tokens",
        *PARAMETERS,
    }
)  # fmt: skip
"""Keyword arguments of run."""
CACHE_MODES = ("rw", "ro", "off")
_TUPLES = frozenset({"stop", "stop_token_ids", "stop_regex"})
_COUNTS = frozenset(
    {"max_tokens", "min_tokens", "n", "top_k", "seed", "logprob_start_len", "top_logprobs_num",
     "max_thinking_tokens"}
)  # fmt: skip
_FLAGS = frozenset(
    {"ignore_eos", "return_logprob", "return_text_in_logprobs", "require_reasoning", "skip_special_tokens",
     "no_stop_trim", "token_healing"}
)  # fmt: skip
# Fields of Sampling that become fields of SamplingParams, and under which name.
_TO_PARAMS: dict[str, str] = {
    "max_tokens": "max_new_tokens",
    "min_tokens": "min_new_tokens",
    "seed": "seed",
} | {
    name: name
    for name in (
        "stop", "stop_token_ids", "temperature", "top_p", "top_k", "min_p", "frequency_penalty",
        "presence_penalty", "repetition_penalty", "ignore_eos", "stop_regex", "skip_special_tokens",
        "no_stop_trim", "logit_bias",
    )
}  # fmt: skip
DTYPES: dict[object, str] = {
    int: "int", float: "float", bool: "bool", str: "str",
    "int": "int", "float": "float", "bool": "bool", "str": "str", "string": "str",
}  # fmt: skip


def check_json_parameters(parameters: Mapping[str, Any], form: Mapping[str, Any]) -> None:
    """Parameters about JSON need a form that may contain it. Raises BadProgram."""
    for name in JSON_OPTIONS:
        if parameters[name] is not None and not form.keys() & {*JSON_KINDS}:
            raise BadProgram(f"{name} requires json_schema, structural_tag or a type that is read from JSON")


def sampling(parameters: Mapping[str, Any]) -> Sampling:
    """Sampling from keyword arguments (keys of PARAMETERS); None means not set. Raises BadProgram."""
    values: dict[str, Any] = {}
    for name, value in parameters.items():
        if value is None:
            continue
        field = PARAMETERS[name]
        if field in values:
            raise BadProgram(f"{name} and max_tokens/min_tokens mean the same; pass only one of them")
        values[field] = _checked(field, name, value)
    merged = Sampling(**values)
    # A minimum above the default maximum may still be valid with the maximum of another level.
    alone = merged if merged.max_tokens is not None else dataclasses.replace(merged, min_tokens=None)
    sampling_params(alone)
    _check_ranges(merged)
    return merged


def _checked(field: str, name: str, value: Any) -> Any:
    """The value of one parameter, with the right type. Raises BadProgram."""
    if field in _TUPLES:
        if isinstance(value, str | int):
            value = (value,)
        if not isinstance(value, Iterable):
            raise BadProgram(f"{name} takes one value or a list, got {value!r}")
        values = tuple(value)
        for one in values:
            no_nodes(name, one)
        kind: type = int if field == "stop_token_ids" else str
        if any(type(one) is not kind for one in values):
            raise BadProgram(f"{name} takes {kind.__name__} values, got {values!r}")
        if field == "stop_regex":
            return tuple(regex(one) for one in values)
        return values
    if field == "logit_bias":
        return _biases(name, value)
    if field in JSON_OPTIONS:
        if value not in JSON_OPTIONS[field]:
            raise BadProgram(f"{name} must be one of {', '.join(JSON_OPTIONS[field])}; got {value!r}")
        return value
    if field in _FLAGS:
        if not isinstance(value, bool):
            raise BadProgram(f"{name} takes True or False, got {value!r}")
        return value
    if field in _COUNTS:
        count = whole(value)
        if count is None:
            raise BadProgram(f"{name} takes a whole number, got {value!r}")
        return count
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise BadProgram(f"{name} takes a number, got {value!r}")
    return float(value)


def whole(value: object) -> int | None:
    """A whole number of any numeric type (3, 3.0, numpy's) as an int; None for other values."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        return None
    if isinstance(value, numbers.Integral):
        return int(value)
    number = float(value)
    return int(number) if number.is_integer() else None


def _biases(name: str, value: Any) -> tuple[tuple[int, float], ...]:
    """Pairs of token id and bias, in order. Raises BadProgram."""
    if not isinstance(value, Mapping):
        raise BadProgram(f"{name} takes a mapping of token ids to numbers, got {value!r:.80}")
    for token, bias in value.items():
        if type(token) is not int or isinstance(bias, bool) or not isinstance(bias, int | float):
            raise BadProgram(f"{name} takes token ids and numbers, got {token!r}: {bias!r:.40}")
    return tuple(sorted((token, float(bias)) for token, bias in value.items()))


_LEAST = {"n": 1, "top_logprobs_num": 0, "max_thinking_tokens": 0, "min_tokens": 0}


def _check_ranges(values: Sampling) -> None:
    for name, least in _LEAST.items():
        value = getattr(values, name)
        if value is not None and value < least:
            raise BadProgram(f"{name} must be at least {least}, got {value}")
    if values.logprob_start_len is not None and values.logprob_start_len < -1:
        raise BadProgram(f"logprob_start_len must be -1 (none) or a position, got {values.logprob_start_len}")


def sampling_params(values: Sampling, stops: tuple[str, ...] = ()) -> SamplingParams:
    """As a backend takes them, with more stop strings. Raises BadProgram."""
    params = {
        target: value for name, target in _TO_PARAMS.items() if (value := getattr(values, name)) is not None
    }
    if "logit_bias" in params:
        params["logit_bias"] = dict(params["logit_bias"])
    if stops:
        params["stop"] = tuple(dict.fromkeys((*params.get("stop", ()), *stops)))
    try:
        return SamplingParams(**params).verify()
    except BadRequest as error:
        raise BadProgram(error.message) from error


def typed(value: object) -> dict[str, Any]:
    """The fields of a Gen whose text is read as the type `value`. Raises BadProgram, MissingExtra."""
    try:
        form = types.describe(value)
        match form.kind:
            case "text":
                return {"typed": form}
            case "choices":
                return {"typed": form, "choices": tuple(form.options)}
            case "json":
                return {"typed": form, "json_schema": json_schema(value)}
            case kind:
                return {"typed": form, "dtype": kind}
    except ValueError as error:
        raise BadProgram(str(error)) from error


def dtype(value: object) -> str:
    """The name of a dtype, from a type or a name. Raises BadProgram."""
    try:
        return DTYPES[value]
    except (KeyError, TypeError):
        raise BadProgram(
            f"dtype must be int, float, bool or str, got {value!r}; other types are gen's second argument"
        ) from None


def regex(value: object) -> str:
    """A regex as text, checked. Raises BadProgram with the position of the mistake."""
    if isinstance(value, re.Pattern):
        if value.flags & ~re.UNICODE:
            raise BadProgram(
                f"a compiled regex must have no flags, got {value!r}; write (?i:...) in the text"
            )
        value = value.pattern
    no_nodes("regex", value)
    if not isinstance(value, str):
        raise BadProgram(f"regex takes text, got {value!r}")
    if not value:
        raise BadProgram("regex is empty, so it would allow no text at all")
    try:
        re.compile(value)
    except re.error as error:
        raise BadProgram(f"regex {value!r} cannot be compiled: {error}") from error
    return value


def json_schema(value: object) -> str:
    """A JSON schema as JSON text: from text, a mapping, a type (by pydantic), or any class that has
    model_json_schema(). Raises BadProgram, MissingExtra."""
    if types.is_type(value):
        try:
            value = _schema_of(value)
        except BadProgram as error:
            raise BadProgram(f"json_schema: {error}") from error
    return _json_text("json_schema", value, (dict, bool))


def structural_tag(value: object) -> str:
    """A structural tag as JSON text, from text or a mapping; schemas in it may be types. Raises BadProgram,
    MissingExtra."""
    return _json_text("structural_tag", value, (dict,))


def ebnf(value: object) -> str:
    """A grammar: EBNF as GBNF writes it (root ::= ...), or Lark. Raises BadProgram."""
    no_nodes("ebnf", value)
    if not isinstance(value, str) or not value.strip():
        raise BadProgram(f"ebnf takes a grammar as text, got {value!r:.80}")
    return value


def no_nodes(name: str, value: object) -> None:
    """Raises BadProgram for a text in which a node was formatted."""
    if KEPT and isinstance(value, str) and marked(value):
        raise BadProgram(
            f"{name} contains a gen or another node in a formatted text, at {caller()}; text that is not "
            "generated yet can only be added to the state"
        )


def _json_text(name: str, value: object, kinds: tuple[type, ...]) -> str:
    if isinstance(value, Mapping) or (isinstance(value, bool) and bool in kinds):
        plain = value if isinstance(value, bool) else dict(value)
        try:
            text = json.dumps(plain, ensure_ascii=False, allow_nan=False, default=_schema_of)
        except (TypeError, ValueError, RecursionError) as error:
            raise BadProgram(f"{name} is not JSON: {error}") from error
    elif isinstance(value, str):
        text = value
        try:
            parsed = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise BadProgram(f"{name} is not JSON: {error}") from error
        if not isinstance(parsed, kinds):
            raise BadProgram(f"{name} must be a JSON object, got {value!r:.80}")
    else:
        raise BadProgram(f"{name} takes JSON text, a mapping or a type; got {value!r:.80}")
    no_nodes(name, text)
    return text


def _schema_of(value: object) -> dict[str, Any]:
    if not types.is_type(value):
        raise TypeError(f"{value!r:.80} is not JSON")
    try:
        return types.schema(value)
    except (MissingExtra, ValueError) as error:
        if isinstance(value, type) and (describe := getattr(value, "model_json_schema", None)) is not None:
            schema: dict[str, Any] = describe()
            return schema
        if isinstance(error, MissingExtra):
            raise
        raise BadProgram(str(error)) from error


_WITH_CHOICES = frozenset({"temperature", "seed", "return_logprob", "return_text_in_logprobs"})
"""Parameters that have an effect with choices; log-probabilities of the options are reported in any case."""
_DEFAULTS = SamplingParams()
_OTHER_DEFAULTS = {"n": 1, "min_tokens": 0, "top_logprobs_num": 0, "logprob_start_len": -1}


def warn_beside_choices(parameters: Mapping[str, Any], others: Mapping[str, Any]) -> None:
    """One warning about the parameters that have no effect where whole options are scored, unless they are at
    their defaults. `others`: parameters that are no sampling. Raises BadProgram for invalid values."""
    values = sampling(parameters)
    params = sampling_params(dataclasses.replace(values, min_tokens=None))
    idle = [name for name, value in others.items() if value is not None]
    for name in parameters:
        value = getattr(values, PARAMETERS[name])
        if value is None or value is False or name in _WITH_CHOICES:
            continue
        default = _OTHER_DEFAULTS.get(name)
        if name in _TO_PARAMS and name != "min_tokens":
            value = getattr(params, _TO_PARAMS[name])
            default = getattr(_DEFAULTS, _TO_PARAMS[name])
        if value != default:
            idle.append(name)
    if idle:
        warn(f"{', '.join(idle)}: no effect with choices, where whole options are scored")


def choices(value: object) -> tuple[str, ...]:
    """Options of a select, copied. Raises BadProgram."""
    if isinstance(value, str) or not isinstance(value, Iterable):
        hint = f"; write choices=[{value!r:.80}, ...]" if isinstance(value, str) else ""
        raise BadProgram(f"choices takes a list of strings, got {value!r:.200}{hint}")
    options = tuple(value)
    if not options:
        raise BadProgram("choices is empty: there is nothing to choose from")
    for option in options:
        no_nodes("choices", option)
        if not isinstance(option, str) or not option:
            raise BadProgram(f"choices must be strings that are not empty, got {option!r}")
    return options


def name(value: object) -> str | None:
    """A variable's name. Raises BadProgram."""
    no_nodes("a variable's name", value)
    if value is not None and not isinstance(value, str):
        hint = '; the name comes first: gen("name", ...)'
        raise BadProgram(f"a variable's name must be a string, got {value!r:.80}{hint}")
    return value if value is None else str(value)


def timeout(value: object) -> float | None:
    """Seconds a call may take; None: the run's timeout. Raises BadProgram."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise BadProgram(f"timeout must be a positive number of seconds, got {value!r}")
    return float(value)


def retries(value: object, typed: object) -> int | None:
    """How often a generation may be repeated; None: never. Raises BadProgram."""
    if value is None:
        return None
    if type(value) is not int or value < 0:
        raise BadProgram(f"retries must be at least 0, got {value!r}")
    if value and typed is None:
        raise BadProgram("retries requires a type: gen(name, type, retries=...)")
    return value or None


# -- runs ----


NO_SAMPLING = Sampling()
"""No parameter is set."""


@dataclasses.dataclass(frozen=True, slots=True)
class Options:
    """How a program runs, apart from its arguments. `timeout`: seconds per call of the backend. `cache`:
    whether calls are recorded and replayed ("rw"), only replayed ("ro") or neither ("off"), in
    `cache_dir`. `batch_budget`: of all items of a batch together; `meters`: what counts it while they run."""

    backend: Any = None
    stream: bool = False
    timeout: float | None = None
    sampling: Sampling = NO_SAMPLING
    budget: Budget | None = None
    cache: str = "off"
    cache_dir: str | None = None
    use_thread: bool = True
    num_api_spec_tokens: int | None = None
    batch_budget: Budget | None = None
    meters: tuple[Any, ...] = ()

    def updated(self, kwargs: Mapping[str, Any]) -> Options:
        """These options with keyword arguments of run over them. Raises BadProgram."""
        timeout = kwargs.get("timeout", self.timeout)
        if timeout is not None and not timeout > 0:
            raise BadProgram(f"timeout must be a positive number of seconds, got {timeout!r}")
        budget = kwargs.get("budget", self.budget)
        if budget is not None and not isinstance(budget, Budget):
            raise BadProgram(f"budget takes a Budget(...), got {budget!r}")
        ahead = kwargs.get("num_api_spec_tokens", self.num_api_spec_tokens)
        if ahead is not None and not (type(ahead) is int and ahead >= 1):
            raise BadProgram(f"num_api_spec_tokens must be at least 1, or None; got {ahead!r}")
        folder = kwargs.get("cache_dir", self.cache_dir)
        cache = kwargs.get("cache", "rw" if "cache_dir" in kwargs and folder is not None else self.cache)
        if cache not in CACHE_MODES:
            raise BadProgram(f"cache must be one of {', '.join(map(repr, CACHE_MODES))}; got {cache!r}")
        if cache != "off" and folder is None:
            raise BadProgram("cache needs cache_dir, the folder of the record")
        parameters = {name: value for name, value in kwargs.items() if name in PARAMETERS}
        return Options(
            backend=self.backend if kwargs.get("backend") is None else kwargs["backend"],
            stream=bool(kwargs.get("stream", self.stream)),
            timeout=timeout,
            sampling=sampling(parameters).over(self.sampling) if parameters else self.sampling,
            budget=budget,
            cache=cache,
            cache_dir=None if folder is None else os.fspath(folder),
            use_thread=bool(kwargs.get("use_thread", self.use_thread)),
            num_api_spec_tokens=ahead,
        )
