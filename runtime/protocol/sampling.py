"""SamplingParams: how the next token is drawn and when generation ends."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, cast

import msgspec

from runtime.protocol.constraint import JSON_OPTIONS, Constraint, ConstraintKind
from runtime.protocol.errors import BadRequest
from runtime.protocol.registry import near

GREEDY_BELOW = 1e-6
MAX_STOPS = 32
MAX_STOP_REGEX_BYTES = 256
MAX_SAMPLES = 4096
UNLIMITED = 2**31 - 1
"""max_new_tokens of an output that may be as long as the limits allow."""
CONSTRAINT_KEYS = ("json_schema", "regex", "ebnf", "structural_tag", "choices")
"""Keys of a user's sampling_params for a constraint; at most one. The first and the fourth take
JSON_OPTIONS."""
ALIASES = {"sampling_seed": "seed"}
TOP_K_OFF = -1


def set_fields(struct: msgspec.Struct) -> dict[str, Any]:
    """The fields whose values are not their defaults. Most requests set few of their 60 fields."""
    defaults, values = _defaults(type(struct))
    pairs = zip(defaults, values(struct), strict=True)
    return {name: value for (name, default), value in pairs if value is not default}


@lru_cache(maxsize=64)
def _defaults(
    kind: type[msgspec.Struct],
) -> tuple[tuple[tuple[str, Any], ...], Callable[[msgspec.Struct], tuple[Any, ...]]]:
    """The fields of a struct with their defaults, and a function that reads all values."""
    fields = msgspec.structs.fields(kind)
    read: Callable[[Any], tuple[Any, ...]] = operator.attrgetter(*(field.name for field in fields))
    return tuple((field.name, field.default) for field in fields), read


class SamplingParams(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """The sampling parameters of one request.

    max_new_tokens: 0 commits the prompt to the prefix cache and generates nothing. top_k: -1 = off.
    seed: same seed, same prompt -> same output, whatever else is in the batch, where a CPU computes in
    float32 (up to ties within its last bits); None draws a fresh one.
    stop: strings, up to 32; stop_token_ids: ids; ignore_eos ignores end-of-text and stop_token_ids, not
    `stop`.
    stop_regex: patterns, up to 32 of at most 256 bytes; logit_bias: id -> number added to its logit;
    stream_interval: tokens between two pieces of a stream; custom_logit_processor: a registered name, which
    gets custom_params. n: samples of one prompt; the frontend sends one request for each.
    spaces_between_special_tokens: ignored; these tokenizers put no spaces there.
    """

    max_new_tokens: int = 128
    min_new_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    no_stop_trim: bool = False
    seed: int | None = None
    n: int = 1
    stop_regex: tuple[str, ...] = ()
    spaces_between_special_tokens: bool = True
    logit_bias: dict[int, float] = {}
    stream_interval: int = 1
    custom_logit_processor: str | None = None
    custom_params: dict[str, Any] | None = None

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW or self.top_k == 1

    @property
    def penalised(self) -> bool:
        return bool(self.frequency_penalty or self.presence_penalty or self.repetition_penalty != 1.0)

    @property
    def adjusts_logits(self) -> bool:
        return bool(self.logit_bias) or self.penalised

    def verify(self) -> SamplingParams:
        """Return self, or raise BadRequest naming the field, its value and the range."""
        for (name, rules), value, default in zip(_RULES.items(), _ruled(self), _RULED_DEFAULTS, strict=True):
            if value is default:
                continue
            for holds, rule in rules:
                if not holds(value):
                    raise BadRequest(f"{name} {rule}, got {value!r}", where=f"sampling_params.{name}")
        if not 0 <= self.min_new_tokens <= self.max_new_tokens:
            raise BadRequest(
                f"min_new_tokens must be in [0, max_new_tokens({self.max_new_tokens})], "
                f"got {self.min_new_tokens}",
                where="sampling_params.min_new_tokens",
            )
        for index, pattern in enumerate(self.stop_regex):
            _check_pattern(pattern, f"sampling_params.stop_regex[{index}]")
        return self

    @classmethod
    def from_user(
        cls, params: SamplingParams | Mapping[str, Any]
    ) -> tuple[SamplingParams, Constraint | None]:
        """Read sampling_params: the verified parameters, and the constraint of the keys json_schema, regex,
        ebnf, structural_tag or choices, with its `whitespace` and `schema_format` (see Constraint).

        None is the field's default; an unknown key may be None or False. stop, stop_regex and stop_token_ids:
        one or a list; logit_bias: keys may be text; top_k 0 is off, as -1; sampling_seed is another name of
        seed; a constraint is text or, for json_schema and structural_tag, an object. Raises BadRequest: an
        unknown key (with the nearest known one), a wrong type or range, more than one constraint.
        """
        if isinstance(params, SamplingParams):
            # __init__ does not check types.
            return _converted(set_fields(params)).verify(), None
        if not isinstance(params, Mapping):
            raise BadRequest(
                f"must be a SamplingParams or a dict, got {type(params).__name__}", where="sampling_params"
            )
        values: dict[str, Any] = {}
        constraints: dict[str, Any] = {}
        for key, value in params.items():
            if value is None:
                continue
            if key in _FIELDS:
                read = _READERS.get(key)
                values[key] = value if read is None else read(value)
            elif key in ALIASES:
                continue
            elif key in SAMPLING_KEYS:
                constraints[key] = value
            elif value is not False:
                nearest = near(str(key), SAMPLING_KEYS)
                raise BadRequest(
                    f"unknown field {str(key)[:80]!r}; known: {', '.join(SAMPLING_KEYS)}",
                    where="sampling_params",
                    hint=f"did you mean {nearest!r}?" if nearest else None,
                )
        for key, name in ALIASES.items():
            if (value := params.get(key)) is not None and values.setdefault(name, value) != value:
                raise BadRequest(f"{key} and {name} name the same field", where=f"sampling_params.{name}")
        return _converted(values).verify(), _constraint(constraints) if constraints else None


SAMPLING_KEYS = (*SamplingParams.__struct_fields__, *CONSTRAINT_KEYS, *JSON_OPTIONS, *ALIASES)
"""All keys of a user's sampling_params."""
_FIELDS = frozenset(SamplingParams.__struct_fields__)


def _converted(values: dict[str, Any]) -> SamplingParams:
    try:
        return msgspec.convert(values, SamplingParams)
    except (msgspec.ValidationError, TypeError) as error:
        message, _, path = str(error).partition(" - at `$")
        raise BadRequest(message, where="sampling_params" + path.rstrip("`")) from error


def _constraint(values: Mapping[str, Any]) -> Constraint:
    """The constraint of the keys CONSTRAINT_KEYS and JSON_OPTIONS of sampling_params."""
    kinds = [key for key in CONSTRAINT_KEYS if key in values]
    options = {key: values[key] for key in JSON_OPTIONS if key in values}
    if not kinds:
        field = f"sampling_params.{next(iter(options))}"
        raise BadRequest("needs json_schema or structural_tag", where=field)
    if len(kinds) > 1:
        raise BadRequest(
            f"only one of {', '.join(CONSTRAINT_KEYS)} can be set, got {' and '.join(kinds)}",
            where="sampling_params",
        )
    [kind] = kinds
    spec, field = values[kind], f"sampling_params.{kind}"
    listed = isinstance(spec, (list, tuple)) and bool(spec) and all(isinstance(o, str) and o for o in spec)
    if kind == "choices" and not listed:
        raise BadRequest("must be a list of texts, none of them empty", where=field)
    if kind in ("json_schema", "structural_tag", "choices") and isinstance(spec, (dict, bool, list, tuple)):
        try:
            spec = msgspec.json.encode(spec).decode()
        except (TypeError, ValueError, RecursionError) as error:
            raise BadRequest(f"cannot be written as JSON: {error}", where=field) from error
    if not isinstance(spec, str):
        raise BadRequest(f"must be a text, got {type(spec).__name__}", where=field)
    return Constraint(cast(ConstraintKind, kind), spec, **options).verify()


def _biases(value: Any) -> dict[int, Any]:
    field = "sampling_params.logit_bias"
    if not isinstance(value, Mapping):
        raise BadRequest(f"must be a dict from token ids to numbers, got {type(value).__name__}", where=field)
    biases: dict[int, Any] = {}
    for key, bias in value.items():
        if isinstance(key, str) and key.isascii() and key.isdigit():
            token = int(key)
        elif type(key) is int:
            token = key
        else:
            raise BadRequest(f"{key!r} is not a token id", where=field)
        if token in biases:
            raise BadRequest(f"{token} occurs twice", where=field)
        biases[token] = bias
    return biases


_READERS: dict[str, Callable[[Any], Any]] = {
    "stop": lambda value: [value] if isinstance(value, str) else value,
    "stop_regex": lambda value: [value] if isinstance(value, str) else value,
    "stop_token_ids": lambda value: [value] if type(value) is int else value,
    "top_k": lambda value: TOP_K_OFF if type(value) is int and value == 0 else value,
    "logit_bias": _biases,
}
"""Readers of short forms of values."""


def _check_pattern(pattern: str, field: str) -> None:
    size = len(pattern.encode("utf-8", "surrogatepass"))
    if not 0 < size <= MAX_STOP_REGEX_BYTES:
        raise BadRequest(f"must have 1 to {MAX_STOP_REGEX_BYTES} bytes, has {size}", where=field)
    try:
        re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        raise BadRequest(f"is not a regular expression: {error}", where=field) from error
    except FutureWarning:
        return  # if warnings are errors: a later Python may read the pattern in another way


def _is_text(value: str) -> bool:
    """Lone surrogates (a broken escape in JSON) are no text: no token can spell them."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


_RULES: dict[str, tuple[tuple[Callable[[Any], bool], str], ...]] = {
    "max_new_tokens": ((lambda v: v >= 0, "must be at least 0"),),
    "temperature": ((lambda v: 0.0 <= v < math.inf, "must be a finite number, at least 0"),),
    "top_p": ((lambda v: 0.0 < v <= 1.0, "must be in (0, 1]"),),
    "top_k": ((lambda v: v == -1 or v >= 1, "must be -1 (off) or at least 1"),),
    "min_p": ((lambda v: 0.0 <= v <= 1.0, "must be in [0, 1]"),),
    "frequency_penalty": ((lambda v: -2.0 <= v <= 2.0, "must be in [-2, 2]"),),
    "presence_penalty": ((lambda v: -2.0 <= v <= 2.0, "must be in [-2, 2]"),),
    "repetition_penalty": ((lambda v: 0.0 < v <= 2.0, "must be in (0, 2]"),),
    "stop": (
        (lambda v: len(v) <= MAX_STOPS, f"takes at most {MAX_STOPS} strings"),
        (all, "must not contain an empty string"),
        (lambda v: all(map(_is_text, v)), "must not contain lone surrogates"),
    ),
    "stop_regex": (
        (lambda v: all(map(_is_text, v)), "must not contain lone surrogates"),
        (lambda v: len(v) <= MAX_STOPS, f"takes at most {MAX_STOPS} patterns"),
    ),
    "stop_token_ids": ((lambda v: min(v, default=0) >= 0, "must be ids, 0 or greater"),),
    "seed": ((lambda v: 0 <= v < 2**63, "must be in [0, 2**63)"),),
    "n": ((lambda v: 1 <= v <= MAX_SAMPLES, f"must be in [1, {MAX_SAMPLES}]"),),
    "stream_interval": ((lambda v: v >= 1, "must be at least 1"),),
    "logit_bias": (
        (lambda v: min(v, default=0) >= 0, "must name ids, 0 or greater"),
        (lambda v: all(map(math.isfinite, v.values())), "must hold finite numbers"),
    ),
    "custom_logit_processor": ((bool, "must be the name of a registered logit processor"),),
}
"""Field -> checks of its value, with the text of their errors. Default values need no check."""
_ruled = operator.attrgetter(*_RULES)
_RULED_DEFAULTS = _ruled(SamplingParams())
