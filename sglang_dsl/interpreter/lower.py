"""From words as written to what a backend is given: SamplingParams, Constraint, options. Pure; knows no
backend.

Defaults < program < call, merged here once. Whatever a word needs is checked here too, so that a wrong word
is a BadProgram where it was written. Nothing a user passed in is kept: lists are copied into tuples.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import numbers
import re
from collections.abc import Iterable, Mapping
from typing import Any, Protocol, cast, runtime_checkable

import msgspec
from msgspec.structs import replace

from runtime.protocol.constraint import JSON_KINDS, Constraint, ConstraintKind
from runtime.protocol.constraint import JSON_OPTIONS as JSON_WORDS
from runtime.protocol.errors import BadRequest
from runtime.protocol.registry import MissingExtra
from runtime.protocol.sampling import SamplingParams
from sglang_dsl.conversation.requests import Call, Prompt
from sglang_dsl.errors import BadProgram, warn
from sglang_dsl.ir import Gen, Sampling, caller
from sglang_dsl.ir import typed as types
from sglang_dsl.ir.syntax import KEPT, marked
from sglang_dsl.patterns import REGEX_BOOL, REGEX_FLOAT, REGEX_INT, REGEX_STR

# Words of a program and of a generation -> the field of Sampling.
WORDS: dict[str, str] = {f.name: f.name for f in dataclasses.fields(Sampling)} | {
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
}
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
# Words that few backends know; they travel as options, and a backend that does not know one refuses.
_OPTIONS = ("return_text_in_logprobs", "require_reasoning", "max_thinking_tokens", "token_healing")

DTYPES: dict[object, str] = {
    int: "int", float: "float", bool: "bool", str: "str",
    "int": "int", "float": "float", "bool": "bool", "str": "str", "string": "str",
}  # fmt: skip
# dtype -> (regex, strings that end the value).
_BY_DTYPE: dict[str, tuple[str, tuple[str, ...]]] = {
    "int": (REGEX_INT, (" ", "\n")),
    "float": (REGEX_FLOAT, (" ", "\n")),
    "bool": (REGEX_BOOL, ()),
    "str": (REGEX_STR, ()),
}


@runtime_checkable
class SchemaModel(Protocol):
    """A class that can describe itself as a JSON schema, as pydantic's models do."""

    def model_json_schema(self) -> dict[str, Any]: ...


class Lowered(msgspec.Struct, frozen=True, gc=False):
    """A generation without its prompt. template: its Call, with an empty prompt. peeks: max_tokens=0 with
    return_logprob: one token is computed for its log-probabilities, and is no part of the text."""

    template: Call
    peeks: bool = False

    def call(self, prompt: Prompt, timeout: float | None) -> Call:
        return replace(self.template, prompt=prompt, timeout=timeout)

    def with_tools(self, choice: str, parallel: bool | None = None) -> Lowered:
        """The same with another tool_choice and, unless None, parallel_tools."""
        together = self.template.parallel_tools if parallel is None else parallel
        return Lowered(replace(self.template, tool_choice=choice, parallel_tools=together), self.peeks)


_NO_PROMPT = Prompt(())


def check_json_words(words: Mapping[str, Any], form: Mapping[str, Any]) -> None:
    """Words that say something of JSON need a form that may hold it. Raises BadProgram."""
    for word in JSON_WORDS:
        if words[word] is not None and not form.keys() & {*JSON_KINDS}:
            raise BadProgram(f"{word} requires json_schema, structural_tag or a type that is read from JSON")


def sampling(words: Mapping[str, Any]) -> Sampling:
    """Sampling from words as written (keys of WORDS); None means "not said". Raises BadProgram."""
    given = {word: value for word, value in words.items() if value is not None}
    return _known(**given) if _PLAIN.issuperset(map(type, given.values())) else _sampling(given)


# Programs say the same words again and again. Typed: 1 is not True, though they are equal.
@functools.lru_cache(maxsize=1024, typed=True)
def _known(**given: Any) -> Sampling:
    return _sampling(given)


_PLAIN = frozenset({int, float, str, bool})


def _sampling(given: Mapping[str, Any]) -> Sampling:
    said: dict[str, Any] = {}
    for word, value in given.items():
        name = WORDS[word]
        if name in said:
            raise BadProgram(f"{word} and max_tokens/min_tokens mean the same; pass only one of them")
        said[name] = _checked(name, word, value)
    made = Sampling(**said)
    # Ranges that hold whatever the other levels say. A minimum above the default maximum may still be put
    # right by another level, so it is left out unless a maximum is said here.
    alone = made if made.max_tokens is not None else dataclasses.replace(made, min_tokens=None)
    _params(alone, ())
    _other_ranges(made)
    return made


def _checked(name: str, word: str, value: Any) -> Any:
    """One word's value with the right type. Raises BadProgram."""
    if name in _TUPLES:
        if isinstance(value, str | int):
            value = (value,)
        if not isinstance(value, Iterable):
            raise BadProgram(f"{word} takes one value or a list, got {value!r}")
        values = tuple(value)
        for one in values:
            no_nodes(word, one)
        kind: type = int if name == "stop_token_ids" else str
        if any(type(one) is not kind for one in values):
            raise BadProgram(f"{word} takes {kind.__name__} values, got {values!r}")
        if name == "stop_regex":
            return tuple(regex(one) for one in values)
        return values
    if name == "logit_bias":
        return _biases(word, value)
    if name in JSON_WORDS:
        if value not in JSON_WORDS[name]:
            raise BadProgram(f"{word} must be one of {', '.join(JSON_WORDS[name])}; got {value!r}")
        return value
    if name in _FLAGS:
        if not isinstance(value, bool):
            raise BadProgram(f"{word} takes True or False, got {value!r}")
        return value
    if name in _COUNTS:
        count = whole(value)
        if count is None:
            raise BadProgram(f"{word} takes a whole number, got {value!r}")
        return count
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise BadProgram(f"{word} takes a number, got {value!r}")
    return float(value)


def whole(value: object) -> int | None:
    """A whole number as an int, whatever holds it (3, 3.0, one of numpy's); None where it is none."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        return None
    if isinstance(value, numbers.Integral):
        return int(value)
    number = float(value)
    return int(number) if number.is_integer() else None


def _biases(word: str, value: Any) -> tuple[tuple[int, float], ...]:
    """Token ids with what is added to their logits, in order. Raises BadProgram."""
    if not isinstance(value, Mapping):
        raise BadProgram(f"{word} takes a mapping of token ids to numbers, got {value!r:.80}")
    for token, bias in value.items():
        numbers = type(token) is int and isinstance(bias, int | float) and not isinstance(bias, bool)
        if not numbers:
            raise BadProgram(f"{word} takes token ids and numbers, got {token!r}: {bias!r:.40}")
    return tuple(sorted((token, float(bias)) for token, bias in value.items()))


def _other_ranges(words: Sampling) -> None:
    if words.n is not None and words.n < 1:
        raise BadProgram(f"n must be at least 1, got {words.n}")
    if words.top_logprobs_num is not None and words.top_logprobs_num < 0:
        raise BadProgram(f"top_logprobs_num must be at least 0, got {words.top_logprobs_num}")
    if words.logprob_start_len is not None and words.logprob_start_len < -1:
        raise BadProgram(f"logprob_start_len must be -1 (none) or a position, got {words.logprob_start_len}")
    if words.max_thinking_tokens is not None and words.max_thinking_tokens < 0:
        raise BadProgram(f"max_thinking_tokens must be at least 0, got {words.max_thinking_tokens}")
    if words.min_tokens is not None and words.min_tokens < 0:
        raise BadProgram(f"min_tokens must be at least 0, got {words.min_tokens}")


def _params(words: Sampling, stops: tuple[str, ...]) -> SamplingParams:
    given = {
        target: value for name, target in _TO_PARAMS.items() if (value := getattr(words, name)) is not None
    }
    if "logit_bias" in given:
        given["logit_bias"] = dict(given["logit_bias"])
    if stops:
        given["stop"] = tuple(dict.fromkeys((*given.get("stop", ()), *stops)))
    try:
        return SamplingParams(**given).verify()
    except BadRequest as error:
        raise BadProgram(error.message) from error


_READY: dict[tuple[int, int], tuple[Gen, Sampling, Lowered]] = {}
_MOST_READY = 4096


def ready(node: Gen, defaults: Sampling) -> Lowered:
    """lower(), where the same node is often added under the same defaults: to look at their 30 fields again
    takes longer than all else. Raises BadProgram."""
    place = (id(node), id(defaults))  # nobody else has them as long as both are kept
    found = _READY.get(place)
    if found is None or found[0] is not node or found[1] is not defaults:
        if len(_READY) >= _MOST_READY:
            _READY.clear()
        found = _READY[place] = (node, defaults, lower(node, defaults))
    return found[2]


@functools.lru_cache(maxsize=4096)
def lower(node: Gen, defaults: Sampling) -> Lowered:
    """`node` under a program's defaults. Raises BadProgram. Remembered: programs ask for the same thing
    again."""
    words = node.sampling.over(defaults)
    # What ends a value would end the reasoning before it, too.
    reasons = node.reasoning is not None or words.require_reasoning
    stops = () if node.dtype is None or reasons else _BY_DTYPE[node.dtype][1]
    constraint = _constraint(node, words)
    # The constraint is the answer's: it sleeps while the model thinks.
    apart = node.reasoning is not None and constraint is not None
    thinks = (("require_reasoning", True),) if apart else ()
    peeks = bool(words.return_logprob) and words.max_tokens == 0
    template = Call(
        _NO_PROMPT,
        sampling=_params(dataclasses.replace(words, max_tokens=1) if peeks else words, stops),
        constraint=constraint,
        n=words.n if words.n is not None else 1,
        return_logprob=bool(words.return_logprob),
        logprob_start_len=-1 if words.logprob_start_len is None else words.logprob_start_len,
        top_logprobs=words.top_logprobs_num or 0,
        options=dict((*_options(words), *thinks)),
    )
    return Lowered(template, peeks)


def _options(words: Sampling) -> Iterable[tuple[str, Any]]:
    """Those that are said; a flag that is off is as one not said."""
    for name in _OPTIONS:
        value = getattr(words, name)
        if value is not None and value is not False:
            yield name, value


def _constraint(node: Gen, words: Sampling) -> Constraint | None:
    """The one constraint of a generation; with the words of JSON where it may hold that."""
    specs = {
        "regex": node.regex if node.dtype is None else _BY_DTYPE[node.dtype][0],
        "json_schema": node.json_schema,
        "ebnf": node.ebnf,
        "structural_tag": node.structural_tag,
        "choices": None if node.choices is None else json.dumps(node.choices, ensure_ascii=False),
    }
    for kind, spec in specs.items():
        if spec is not None:
            own = {word: getattr(words, word) for word in JSON_WORDS} if kind in JSON_KINDS else {}
            return Constraint(cast(ConstraintKind, kind), spec, **own)
    return None


def typed(value: object) -> dict[str, Any]:
    """The fields of a Gen whose text is read as the type `value`. Raises BadProgram, MissingExtra."""
    try:
        found = types.describe(value)
        match found.kind:
            case "text":
                return {"typed": found}
            case "choices":
                return {"typed": found, "choices": tuple(found.options)}
            case "json":
                return {"typed": found, "json_schema": json_schema(value)}
            case kind:
                return {"typed": found, "dtype": kind}
    except ValueError as error:
        raise BadProgram(str(error)) from error


def dtype(value: object) -> str:
    """The name of a dtype given as a type or as text. Raises BadProgram."""
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


def _json_text(word: str, value: object, kinds: tuple[type, ...]) -> str:
    text = _as_json(word, value, kinds)
    no_nodes(word, text)
    return text


def no_nodes(word: str, value: object) -> None:
    """Raises BadProgram for a text in which a node was formatted."""
    if KEPT and isinstance(value, str) and marked(value):
        raise BadProgram(
            f"{word} contains a gen or another node in a formatted text, at {caller()}; text that is not "
            "generated yet can only be added to the state"
        )


def _as_json(word: str, value: object, kinds: tuple[type, ...]) -> str:
    if isinstance(value, Mapping) or (isinstance(value, bool) and bool in kinds):
        plain = value if isinstance(value, bool) else dict(value)
        try:
            return json.dumps(plain, ensure_ascii=False, allow_nan=False, default=_schema_of)
        except (TypeError, ValueError, RecursionError) as error:
            raise BadProgram(f"{word} is not JSON: {error}") from error
    if not isinstance(value, str):
        raise BadProgram(f"{word} takes JSON text, a mapping or a type; got {value!r:.80}")
    try:
        parsed = json.loads(value)
    except (ValueError, RecursionError) as error:
        raise BadProgram(f"{word} is not JSON: {error}") from error
    if not isinstance(parsed, kinds):
        raise BadProgram(f"{word} must be a JSON object, got {value!r:.80}")
    return value


def _schema_of(value: object) -> dict[str, Any]:
    if not types.is_type(value):
        raise TypeError(f"{value!r:.80} is not JSON")
    try:
        return types.schema(value)
    except (MissingExtra, ValueError) as error:
        if isinstance(value, type) and isinstance(value, SchemaModel):
            return value.model_json_schema()
        if isinstance(error, MissingExtra):
            raise
        raise BadProgram(str(error)) from error


# Beside choices: these mean what they say; log-probabilities of the options are told in any case.
_WITH_CHOICES = frozenset({"temperature", "seed", "return_logprob", "return_text_in_logprobs"})


def beside_choices(words: Mapping[str, Any], others: Mapping[str, Any]) -> None:
    """One warning of the words that mean nothing where an option is chosen by the log-probabilities of its
    whole text; what says no more than the default is passed over. `others`: words that are no sampling.
    Raises BadProgram for a value that would be wrong anywhere."""
    said = sampling(words)
    params = _params(dataclasses.replace(said, min_tokens=None), ())
    idle = [word for word, value in others.items() if value is not None]
    for word in words:
        value = getattr(said, WORDS[word])
        if value is None or value is False or word in _WITH_CHOICES:
            continue
        default = _IDLE_DEFAULTS.get(word)
        if word in _TO_PARAMS and word != "min_tokens":
            value = getattr(params, _TO_PARAMS[word])
            default = getattr(_DEFAULTS, _TO_PARAMS[word])
        if value != default:
            idle.append(word)
    if idle:
        warn(f"{', '.join(idle)}: no effect with choices, where whole options are scored")


_DEFAULTS = SamplingParams()
_IDLE_DEFAULTS = {"n": 1, "min_tokens": 0, "top_logprobs_num": 0, "logprob_start_len": -1}


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
    """Seconds a call may take; None: as long as the run says. Raises BadProgram."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise BadProgram(f"timeout must be a positive number of seconds, got {value!r}")
    return float(value)


def retries(value: object, typed: object) -> int | None:
    """How often a generation is asked for again; None: never. Raises BadProgram."""
    if value is None:
        return None
    if type(value) is not int or value < 0:
        raise BadProgram(f"retries must be at least 0, got {value!r}")
    if value and typed is None:
        raise BadProgram("retries requires a type: gen(name, type, retries=...)")
    return value or None
