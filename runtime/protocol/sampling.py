"""SamplingParams: how the next token is drawn and when generation ends.

Validates ranges; does not know tokenizers, constraints' meaning or models. Defaults and ranges follow the
field's usage (temperature below 1e-6 means greedy).
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Mapping
from typing import Any, cast

import msgspec

from runtime.protocol.constraint import JSON_WORDS, Constraint, ConstraintKind
from runtime.protocol.errors import BadRequest
from runtime.protocol.registry import near

GREEDY_BELOW = 1e-6
MAX_STOPS = 32
MAX_STOP_REGEX_BYTES = 256
MAX_SAMPLES = 4096
ROOM = 2**31 - 1
"""max_new_tokens of a request whose output may fill what room there is."""
CONSTRAINT_WORDS = ("json_schema", "regex", "ebnf", "structural_tag", "choices")
"""Keys of a user's sampling_params that say what the output must match; at most one of them. `whitespace`
and `schema_format` may stand beside the first and the fourth."""
ALIASES = {"sampling_seed": "seed"}
TOP_K_OFF = -1


class SamplingParams(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """All sampling words of one request.

    max_new_tokens: 0 commits the prompt to the prefix cache and generates nothing. top_k: -1 = off.
    seed: same seed, same prompt -> same output, whatever else is in the batch, where a CPU computes in
    float32 (up to ties within its last bits); None draws a fresh one.
    stop: strings, up to 32; stop_token_ids: ids; ignore_eos ignores end-of-text and stop_token_ids, not
    `stop`.
    stop_regex: patterns, up to 32 of at most 256 bytes; logit_bias: id -> what is added to its logit;
    stream_interval: tokens between two pieces of a stream; custom_logit_processor: a registered name, which
    is given custom_params. n: samples of one prompt; the frontend makes one request of each.
    spaces_between_special_tokens: some clients send it; the tokenizers used here put no spaces there,
    whatever it says.
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

    def verify(self) -> SamplingParams:
        """Return self, or raise BadRequest naming the field, its value and the range."""
        for name, holds, rule in _RULES:
            if not holds(self):
                text = rule.format(self.max_new_tokens)
                raise BadRequest(
                    f"{name} {text}, got {getattr(self, name)!r}", where=f"sampling_params.{name}"
                )
        for index, pattern in enumerate(self.stop_regex):
            _check_pattern(pattern, f"sampling_params.stop_regex[{index}]")
        return self

    @classmethod
    def from_user(cls, given: SamplingParams | Mapping[str, Any]) -> tuple[SamplingParams, Constraint | None]:
        """What a user's dict says: the parameters, verified, and the constraint of its json_schema, regex,
        ebnf, structural_tag or choices (a list of texts), with its `whitespace` and `schema_format` (see
        Constraint).

        None stands for a field's default, and for nothing under an unknown key, as False does there. stop,
        stop_regex: one or a list; stop_token_ids: one or a list; logit_bias: keys may be text; top_k 0 is
        off, as -1; sampling_seed is another name of seed; a constraint may be given as text or, for
        json_schema and structural_tag, as an object. Raises BadRequest: an unknown key (with the nearest
        known one), a wrong type, a value out of range, more than one constraint.
        """
        if isinstance(given, SamplingParams):
            # A struct that was made in code has not had its types checked.
            return _converted(_builtins(given)).verify(), None
        if not isinstance(given, Mapping):
            raise BadRequest(
                f"must be a SamplingParams or a dict, got {type(given).__name__}", where="sampling_params"
            )
        values = _renamed({key: value for key, value in given.items() if value is not None})
        constraint = _constraint(values)
        for name in ("stop", "stop_regex"):
            if isinstance(values.get(name), str):
                values[name] = [values[name]]
        if type(values.get("stop_token_ids")) is int:
            values["stop_token_ids"] = [values["stop_token_ids"]]
        if type(values.get("top_k")) is int and values["top_k"] == 0:
            values["top_k"] = TOP_K_OFF
        if "logit_bias" in values:
            values["logit_bias"] = _biases(values["logit_bias"])
        return _converted(values).verify(), constraint


WORDS = (*SamplingParams.__struct_fields__, *CONSTRAINT_WORDS, *JSON_WORDS, *ALIASES)
"""Keys that a user's sampling_params may have."""


def _builtins(params: SamplingParams) -> dict[str, Any]:
    """The fields that are set, by name."""
    pairs = zip(_DEFAULTS.items(), _values_of(params), strict=True)
    return {name: value for (name, default), value in pairs if value is not default}


_DEFAULTS = {field.name: field.default for field in msgspec.structs.fields(SamplingParams)}
_values_of = operator.attrgetter(*_DEFAULTS)


def _converted(values: dict[str, Any]) -> SamplingParams:
    try:
        return msgspec.convert(values, SamplingParams)
    except (msgspec.ValidationError, TypeError) as error:
        message, _, path = str(error).partition(" - at `$")
        raise BadRequest(message, where="sampling_params" + path.rstrip("`")) from error


def _renamed(values: dict[Any, Any]) -> dict[str, Any]:
    """The same with aliases resolved. Raises BadRequest for an unknown key."""
    known = WORDS
    made: dict[str, Any] = {}
    for key, value in values.items():
        if key not in known and value is not False:
            meant = near(str(key), known)
            raise BadRequest(
                f"unknown field {str(key)[:80]!r}; known: {', '.join(known)}",
                where="sampling_params",
                hint=f"did you mean {meant!r}?" if meant else None,
            )
        name = ALIASES.get(key, key)
        if name not in known:
            continue
        if name in made and made[name] != value:
            raise BadRequest(f"{key} and {name} name the same field", where=f"sampling_params.{name}")
        made[name] = value
    return made


def _constraint(values: dict[str, Any]) -> Constraint | None:
    """Takes the constraint out of `values`."""
    found = [(word, values.pop(word)) for word in CONSTRAINT_WORDS if word in values]
    beside = {word: values.pop(word) for word in JSON_WORDS if word in values}
    if not found:
        if beside:
            where = f"sampling_params.{next(iter(beside))}"
            raise BadRequest("needs json_schema or structural_tag", where=where)
        return None
    if len(found) > 1:
        raise BadRequest(
            f"only one of {', '.join(CONSTRAINT_WORDS)} can be set, got "
            + " and ".join(word for word, _ in found),
            where="sampling_params",
        )
    word, spec = found[0]
    if word == "choices" and not _are_choices(spec):
        raise BadRequest("must be a list of texts, none of them empty", where=f"sampling_params.{word}")
    if word in ("json_schema", "structural_tag", "choices") and isinstance(spec, (dict, bool, list, tuple)):
        try:
            spec = msgspec.json.encode(spec).decode()
        except (TypeError, ValueError, RecursionError) as error:
            where = f"sampling_params.{word}"
            raise BadRequest(f"cannot be written as JSON: {error}", where=where) from error
    if not isinstance(spec, str):
        raise BadRequest(f"must be a text, got {type(spec).__name__}", where=f"sampling_params.{word}")
    return Constraint(cast(ConstraintKind, word), spec, **beside).verify()


def _are_choices(given: Any) -> bool:
    return isinstance(given, (list, tuple)) and bool(given) and all(isinstance(o, str) and o for o in given)


def _biases(given: Any) -> dict[int, Any]:
    where = "sampling_params.logit_bias"
    if not isinstance(given, Mapping):
        raise BadRequest(f"must be a dict from token ids to numbers, got {type(given).__name__}", where=where)
    made: dict[int, Any] = {}
    for key, bias in given.items():
        if isinstance(key, str) and key.isascii() and key.isdigit():
            token = int(key)
        elif type(key) is int:
            token = key
        else:
            raise BadRequest(f"{key!r} is not a token id", where=where)
        if token in made:
            raise BadRequest(f"{token} occurs twice", where=where)
        made[token] = bias
    return made


def _check_pattern(pattern: str, where: str) -> None:
    size = len(pattern.encode("utf-8", "surrogatepass"))
    if not 0 < size <= MAX_STOP_REGEX_BYTES:
        raise BadRequest(f"must have 1 to {MAX_STOP_REGEX_BYTES} bytes, has {size}", where=where)
    try:
        re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        raise BadRequest(f"is not a regular expression: {error}", where=where) from error
    except FutureWarning:
        return  # where warnings are errors: a pattern that a later Python may read in another way


def _is_text(value: str) -> bool:
    """Lone surrogates (a broken escape in JSON) are no text: nothing can spell them."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


_RULES: tuple[tuple[str, Callable[[SamplingParams], bool], str], ...] = (
    ("max_new_tokens", lambda p: p.max_new_tokens >= 0, "must be at least 0"),
    (
        "min_new_tokens",
        lambda p: 0 <= p.min_new_tokens <= p.max_new_tokens,
        "must be in [0, max_new_tokens({})]",
    ),
    ("temperature", lambda p: 0.0 <= p.temperature < math.inf, "must be a finite number, at least 0"),
    ("top_p", lambda p: 0.0 < p.top_p <= 1.0, "must be in (0, 1]"),
    ("top_k", lambda p: p.top_k == -1 or p.top_k >= 1, "must be -1 (off) or at least 1"),
    ("min_p", lambda p: 0.0 <= p.min_p <= 1.0, "must be in [0, 1]"),
    ("frequency_penalty", lambda p: -2.0 <= p.frequency_penalty <= 2.0, "must be in [-2, 2]"),
    ("presence_penalty", lambda p: -2.0 <= p.presence_penalty <= 2.0, "must be in [-2, 2]"),
    ("repetition_penalty", lambda p: 0.0 < p.repetition_penalty <= 2.0, "must be in (0, 2]"),
    ("stop", lambda p: len(p.stop) <= MAX_STOPS, f"takes at most {MAX_STOPS} strings"),
    ("stop", lambda p: all(p.stop), "must not contain an empty string"),
    ("stop", lambda p: all(map(_is_text, p.stop)), "must not contain lone surrogates"),
    ("stop_regex", lambda p: all(map(_is_text, p.stop_regex)), "must not contain lone surrogates"),
    ("stop_token_ids", lambda p: min(p.stop_token_ids, default=0) >= 0, "must be ids, 0 or greater"),
    ("seed", lambda p: p.seed is None or 0 <= p.seed < 2**63, "must be in [0, 2**63)"),
    ("n", lambda p: 1 <= p.n <= MAX_SAMPLES, f"must be in [1, {MAX_SAMPLES}]"),
    ("stop_regex", lambda p: len(p.stop_regex) <= MAX_STOPS, f"takes at most {MAX_STOPS} patterns"),
    ("stream_interval", lambda p: p.stream_interval >= 1, "must be at least 1"),
    ("logit_bias", lambda p: min(p.logit_bias, default=0) >= 0, "must name ids, 0 or greater"),
    ("logit_bias", lambda p: all(map(math.isfinite, p.logit_bias.values())), "must hold finite numbers"),
    (
        "custom_logit_processor",
        lambda p: p.custom_logit_processor != "",
        "must be the name of a registered logit processor",
    ),
)
"""Field, whether it is in range, and the rule."""
