"""gen and select: the words that ask a model. Each gives a frozen node.

A wrong word (a regex that cannot be compiled, no choices, a temperature below 0) raises BadProgram here, at
once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Literal, TypeVar, Unpack, cast, overload

from runtime.protocol.registry import Registry
from sglang_dsl.choices import METHODS, ChoicesDecision, as_method
from sglang_dsl.errors import BadProgram, warn
from sglang_dsl.errors.tracebacks import exposed, trim
from sglang_dsl.interpreter import lower
from sglang_dsl.ir import Gen, Select, caller
from sglang_dsl.ir.typed import is_type

if TYPE_CHECKING:
    from typing_extensions import TypeForm

    from sglang_dsl.frontend.static_types import Forms, OutlinesTerm, TypedWords

T = TypeVar("T")
_PARTS: Registry[Any] = Registry(
    "part of the language", {"outlines": "sglang_dsl.integrations.outlines:form_of"}
)


def _gen(
    name: str | None = None,
    max_tokens: int | None = None,
    min_tokens: int | None = None,
    n: int | None = None,
    stop: str | Iterable[str] | None = None,
    stop_token_ids: int | Iterable[int] | None = None,
    stop_regex: str | Iterable[str] | None = None,
    temperature: float | None = None,
    top_p: float | None = None,
    top_k: int | None = None,
    min_p: float | None = None,
    frequency_penalty: float | None = None,
    presence_penalty: float | None = None,
    ignore_eos: bool | None = None,
    return_logprob: bool | None = None,
    logprob_start_len: int | None = None,
    top_logprobs_num: int | None = None,
    return_text_in_logprobs: bool | None = None,
    dtype: type | str | None = None,
    choices: Iterable[str] | None = None,
    choices_method: Callable[..., ChoicesDecision] | str | None = None,
    regex: str | None = None,
    json_schema: str | Mapping[str, Any] | type | None = None,
    *,
    repetition_penalty: float | None = None,
    seed: int | None = None,
    ebnf: str | None = None,
    structural_tag: str | Mapping[str, Any] | None = None,
    whitespace: str | None = None,
    schema_format: str | None = None,
    require_reasoning: bool | None = None,
    max_thinking_tokens: int | None = None,
    skip_special_tokens: bool | None = None,
    no_stop_trim: bool | None = None,
    token_healing: bool | None = None,
    logit_bias: Mapping[int, float] | None = None,
    typed: Any = None,
    timeout: float | None = None,
    retries: int | None = None,
) -> Gen | Select:
    """Generate text here; `name` is the variable that will hold it.

    Sampling words left out (None) are taken from the program, then from the defaults. At most one of these
    says what the text must match:

    a type          as the second argument, gen("c", Character): s["c"] is then a value of the type, read and
                    validated, and s.raw("c") its text. int, float, bool, str, Literal, Enum; and, with
                    pydantic installed, models, dataclasses, TypedDict, Annotated, unions, lists, ...
                    Types of outlines, as outlines.types.email, stand there too; their value stays a text
    dtype           int, float, bool or str; the value stays a text
    regex           a regular expression, as in re.fullmatch
    json_schema     JSON text, a mapping, or a type as above; the value stays a text
    ebnf            a grammar: EBNF as GBNF writes it (root ::= ...), or Lark
    structural_tag  JSON text or a mapping: free text with parts that are kept to schemas or grammars
    choices         makes this a select

    `timeout`: seconds each call may take. `retries`, with a type: how often the model is shown why its text
    is no such value, and asked again; the state's text and s.raw(name) then hold the last one alone, and the
    meta's `rejected` the others. `whitespace`: what stands between the tokens of JSON, "compact"
    (nothing), "single" (at most one space) or "flexible" (bounded indentation, too). `schema_format`: what
    `format` does in a schema, "assertion" or "annotation" (nothing). `require_reasoning`: the model reasons
    first, and the text must match from where that has ended; after `max_thinking_tokens` tokens it must end.
    The text holds both, and the meta's answer_start says where the answer begins.
    `token_healing`: the model may choose the end of the prompt's last word anew, together with what follows;
    off unless said. Raises BadProgram; MissingExtra where a type needs pydantic.
    """
    words = {
        "max_tokens": max_tokens,
        "min_tokens": min_tokens,
        "n": n,
        "stop": stop,
        "stop_token_ids": stop_token_ids,
        "stop_regex": stop_regex,
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "min_p": min_p,
        "frequency_penalty": frequency_penalty,
        "presence_penalty": presence_penalty,
        "ignore_eos": ignore_eos,
        "return_logprob": return_logprob,
        "logprob_start_len": logprob_start_len,
        "top_logprobs_num": top_logprobs_num,
        "return_text_in_logprobs": return_text_in_logprobs,
        "repetition_penalty": repetition_penalty,
        "seed": seed,
        "whitespace": whitespace,
        "schema_format": schema_format,
        "require_reasoning": require_reasoning,
        "max_thinking_tokens": max_thinking_tokens,
        "skip_special_tokens": skip_special_tokens,
        "no_stop_trim": no_stop_trim,
        "token_healing": token_healing,
        "logit_bias": logit_bias,
    }
    forms: dict[str, Any] = {
        "a type": typed, "dtype": dtype, "regex": regex, "json_schema": json_schema, "ebnf": ebnf,
        "structural_tag": structural_tag, "choices": choices,
    }  # fmt: skip
    given = [word for word, value in forms.items() if value is not None]
    if choices is not None and dtype is not None:
        given.remove("dtype")  # the options say more
    if len(given) > 1:
        raise BadProgram(f"gen takes one of {', '.join(forms)}; got {' and '.join(given)}")
    if choices is not None:
        lower.retries(retries, None)
        lower.beside_choices(words, {"dtype": dtype})
        return select(name, choices, temperature or 0.0, choices_method, seed=seed, timeout=timeout)
    if choices_method is not None:
        warn("choices_method: without effect without choices")
    form: dict[str, Any] = {}
    for word in given:
        form = lower.typed(typed) if word == "a type" else {word: getattr(lower, word)(forms[word])}
    lower.check_json_words(words, form)
    return Gen(
        name=lower.name(name),
        sampling=lower.sampling(words),
        timeout=lower.timeout(timeout),
        retries=lower.retries(retries, typed),
        src=caller(),
        **form,
    )


# What a generation is read as, for type checkers: n > 1 gives a list; a type's words stand beside it; choices
# make it a select. The last is for what is only known at run time.


@overload
def gen(
    _name: str | None = None,
    _max_tokens: int | None = None,
    /,
    *,
    choices: Iterable[str],
    choices_method: Callable[..., ChoicesDecision] | str | None = None,
    n: int | None = None,
    **words: Unpack[Forms],
) -> Select: ...


@overload
def gen(  # type: ignore[overload-overlap]
    _name: str | None = None,
    _max_tokens: int | None = None,
    /,
    *,
    n: Literal[1] | None = None,
    **words: Unpack[Forms],
) -> Gen[str]: ...


@overload
def gen(
    _name: str | None = None, _max_tokens: int | None = None, /, *, n: int, **words: Unpack[Forms]
) -> Gen[list[str]]: ...


@overload
def gen(  # type: ignore[overload-overlap]
    _name: str | None,
    typed: TypeForm[T],
    /,
    *sampling: int | Iterable[str] | None,
    n: Literal[1] | None = None,
    **words: Unpack[TypedWords],
) -> Gen[T]: ...


@overload
def gen(
    _name: str | None,
    typed: TypeForm[T],
    /,
    *sampling: int | Iterable[str] | None,
    n: int,
    **words: Unpack[TypedWords],
) -> Gen[list[T]]: ...


@overload
def gen(
    _name: str | None,
    term: OutlinesTerm,
    /,
    *sampling: int | Iterable[str] | None,
    n: Literal[1] | None = None,
    **words: Unpack[TypedWords],
) -> Gen[str]: ...


@overload
def gen(
    _name: str | None = None,
    _max_tokens: int | None = None,
    /,
    *sampling: Any,
    choices: Iterable[str] | None = None,
    choices_method: Callable[..., ChoicesDecision] | str | None = None,
    n: int | None = None,
    **words: Unpack[Forms],
) -> Gen[Any] | Select: ...


def gen(*args: Any, **words: Any) -> Gen[Any] | Select:
    # Programs say the same words at the same place again and again; nodes are frozen, so one will do.
    try:
        if _PLAIN.issuperset(map(type, args)) and _PLAIN.issuperset(map(type, words.values())):
            return _known_gen(caller(), *args, **words)
        return _any_gen(*args, **words)
    except BaseException as error:
        trim(error)
        raise


_PLAIN = frozenset({int, float, str, bool, type(None)})


# Typed: 1 is not True, though they are equal.
@functools.lru_cache(maxsize=4096, typed=True)
def _known_gen(src: object, /, *args: Any, **words: Any) -> Gen[Any] | Select:
    """`src` is where the user's code stands, which the node will find out itself."""
    return _any_gen(*args, **words)


def _any_gen(*args: Any, **words: Any) -> Gen[Any] | Select:
    second = args[1] if len(args) > 1 else None
    if second is None or isinstance(second, bool) or lower.whole(second) is not None:
        return _gen(*args, **words)
    name, typed, *others = args
    if type(typed).__module__.partition(".")[0] == "outlines":
        form: dict[str, Any] = _PARTS.load("outlines")(typed)
        if both := sorted(form.keys() & words.keys()):
            raise BadProgram(
                f"gen takes one of {', '.join(both)} and a type of outlines, which says the same"
            )
        return _gen(name, *others, **form | words)
    if not is_type(typed):
        shown = f"{typed!r:.80}"
        raise BadProgram(f"gen's second argument is a type, or max_tokens, a whole number; got {shown}")
    return _gen(name, *others, typed=typed, **words)


functools.update_wrapper(gen, _gen, ("__doc__",), ())
_gen.__name__ = _gen.__qualname__ = "gen"  # for errors about words it does not take


@exposed
def gen_int(name: str | None = None, max_tokens: int | None = None, **words: Any) -> Gen[str]:
    """Generate a whole number; takes gen's sampling words."""
    return _typed("gen_int", int, name, max_tokens, words)


@exposed
def gen_string(name: str | None = None, max_tokens: int | None = None, **words: Any) -> Gen[str]:
    """Generate a quoted string, escapes as in JSON; takes gen's sampling words."""
    return _typed("gen_string", str, name, max_tokens, words)


def _typed(called: str, dtype: type, name: str | None, max_tokens: int | None, words: dict[str, Any]) -> Gen:
    if unknown := sorted(set(words) - set(lower.WORDS)):
        raise TypeError(f"{called} got unexpected words: {', '.join(unknown)}")
    return cast("Gen[str]", gen(name, max_tokens, dtype=dtype, **words))


@exposed
def select(
    name: str | None = None,
    choices: Iterable[str] | None = None,
    temperature: float = 0.0,
    choices_method: Callable[..., ChoicesDecision] | str | None = None,
    *,
    seed: int | None = None,
    timeout: float | None = None,
) -> Select:
    """Choose one of `choices` by log-probability; above temperature 0, draw one. `timeout`: seconds. Raises
    BadProgram."""
    if choices is None:
        raise BadProgram("select needs choices")
    said = lower.sampling({"temperature": temperature, "seed": seed})
    try:
        found = as_method(choices_method)
    except ValueError as error:
        raise BadProgram(str(error)) from error
    if said.temperature and not found.sampled:
        raise BadProgram(f"{found.name} picks step by step and cannot be drawn with a temperature")
    return Select(
        name=lower.name(name),
        choices=lower.choices(choices),
        method=found.name,
        temperature=said.temperature or 0.0,
        seed=said.seed,
        timeout=lower.timeout(timeout),
        own=None if METHODS.get(found.name) is found else found,
        src=caller(),
    )
