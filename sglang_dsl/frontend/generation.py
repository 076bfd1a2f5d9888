"""gen and select: the functions that call a model. Each returns a frozen node.

A wrong argument (a regex that cannot be compiled, no choices, a temperature below 0) raises BadProgram at
once.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Literal, TypeVar, Unpack, cast, overload

from sglang_dsl.choices import METHODS, ChoicesDecision, as_method
from sglang_dsl.errors import BadProgram, near, warn
from sglang_dsl.errors.tracebacks import Discarded, exposed, trim
from sglang_dsl.interpreter import parameters
from sglang_dsl.interpreter.parameters import PARAMETERS
from sglang_dsl.ir import Gen, Select, caller
from sglang_dsl.ir.syntax import added
from sglang_dsl.ir.typed import is_type

if TYPE_CHECKING:
    from typing_extensions import TypeForm

    from sglang_dsl.frontend.static_types import Forms, OutlinesTerm, TypedArguments

T = TypeVar("T")
_FORMS = ("typed", "dtype", "regex", "json_schema", "ebnf", "structural_tag", "choices")


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
    """Generate text here. `name` is the variable that will hold it.

    At most one of these sets what the text must match:

    a type          as the second argument: gen("c", Character). s["c"] is then a validated value of the type,
                    and s.raw("c") its text. int, float, bool, str, Literal, Enum; with pydantic installed
                    also models, dataclasses, TypedDict, Annotated, unions, lists, .... A type of outlines,
                    such as outlines.types.email, can be used too; its value stays text
    dtype           int, float, bool or str; the value stays text
    regex           a regular expression, as in re.fullmatch
    json_schema     JSON text, a mapping, or a type as above; the value stays text
    ebnf            a grammar: EBNF in GBNF syntax (root ::= ...), or Lark
    structural_tag  JSON text or a mapping: free text with parts that must match schemas or grammars
    choices         makes this a select

    Sampling parameters that are None are taken from the program, and then from the defaults. Other
    parameters:

    timeout              seconds that each call may take
    retries              with a type: how often the model is shown why its text is invalid, and asked again.
                         The state's text and s.raw(name) hold only the last text; the others are in the
                         metadata's `rejected`. A reply of an API that is one JSON value in a fence or in
                         prose is read without; the metadata's `reply` is all of it
    whitespace           between the tokens of JSON: "compact" (nothing), "single" (at most one space) or
                         "flexible" (also bounded indentation)
    schema_format        the effect of `format` in a schema: "assertion" (checked) or "annotation" (none)
    require_reasoning    the model reasons first, and the constraint applies from the end of the reasoning.
                         The text holds both; the metadata's `answer_start` is where the answer begins
    max_thinking_tokens  how many tokens the reasoning may have
    token_healing        the model may choose the end of the prompt's last word again, together with what
                         follows; off by default

    Raises BadProgram, and MissingExtra if a type needs pydantic.
    """
    arguments = locals()
    sampling = {name: arguments[name] for name in PARAMETERS if name in arguments}
    forms = {"a type" if name == "typed" else name: arguments[name] for name in _FORMS}
    passed = [name for name, value in forms.items() if value is not None]
    if choices is not None and dtype is not None:
        passed.remove("dtype")  # the options say more
    if len(passed) > 1:
        raise BadProgram(f"gen takes only one of {', '.join(forms)}; got {' and '.join(passed)}")
    if choices is not None:
        parameters.retries(retries, None)
        parameters.warn_beside_choices(sampling, {"dtype": dtype})
        return select(name, choices, temperature or 0.0, choices_method, seed=seed, timeout=timeout)
    if choices_method is not None:
        warn("choices_method has no effect without choices")
    form: dict[str, Any] = {}
    if typed is not None:
        form = parameters.typed(typed)
    elif passed:
        form = {passed[0]: getattr(parameters, passed[0])(forms[passed[0]])}
    parameters.check_json_parameters(sampling, form)
    return Gen(
        name=parameters.name(name),
        sampling=parameters.sampling(sampling),
        timeout=parameters.timeout(timeout),
        retries=parameters.retries(retries, typed),
        src=caller(),
        **form,
    )


# For type checkers: n > 1 gives a list; a type can be combined with sampling parameters; choices make it a
# select. The last overload is for arguments that are known at run time only.


@overload
def gen(
    _name: str | None = None,
    _max_tokens: int | None = None,
    /,
    *,
    choices: Iterable[str],
    choices_method: Callable[..., ChoicesDecision] | str | None = None,
    n: int | None = None,
    **kwargs: Unpack[Forms],
) -> Select: ...


@overload
def gen(  # type: ignore[overload-overlap]
    _name: str | None = None,
    _max_tokens: int | None = None,
    /,
    *,
    n: Literal[1] | None = None,
    **kwargs: Unpack[Forms],
) -> Gen[str]: ...


@overload
def gen(
    _name: str | None = None, _max_tokens: int | None = None, /, *, n: int, **kwargs: Unpack[Forms]
) -> Gen[list[str]]: ...


@overload
def gen(  # type: ignore[overload-overlap]
    _name: str | None,
    typed: TypeForm[T],
    /,
    *sampling: int | Iterable[str] | None,
    n: Literal[1] | None = None,
    **kwargs: Unpack[TypedArguments],
) -> Gen[T]: ...


@overload
def gen(
    _name: str | None,
    typed: TypeForm[T],
    /,
    *sampling: int | Iterable[str] | None,
    n: int,
    **kwargs: Unpack[TypedArguments],
) -> Gen[list[T]]: ...


@overload
def gen(
    _name: str | None,
    term: OutlinesTerm,
    /,
    *sampling: int | Iterable[str] | None,
    n: Literal[1] | None = None,
    **kwargs: Unpack[TypedArguments],
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
    **kwargs: Unpack[Forms],
) -> Gen[Any] | Select: ...


def gen(*args: Any, **kwargs: Any) -> Gen[Any] | Select:
    # Programs run the same lines repeatedly; nodes are frozen, so one per line and arguments is enough.
    try:
        src = caller()
        if type(src) is Discarded:
            added(src, "gen")
        if _PLAIN.issuperset(map(type, args)) and _PLAIN.issuperset(map(type, kwargs.values())):
            return _known_gen(src, *args, **kwargs)
        return _any_gen(*args, **kwargs)
    except BaseException as error:
        trim(error)
        raise


_PLAIN = frozenset({int, float, str, bool, type(None)})


# Typed: 1 is not True, though they are equal.
@functools.lru_cache(maxsize=4096, typed=True)
def _known_gen(src: object, /, *args: Any, **kwargs: Any) -> Gen[Any] | Select:
    """`src`: the line in the user's code, as part of the key."""
    return _any_gen(*args, **kwargs)


def _any_gen(*args: Any, **kwargs: Any) -> Gen[Any] | Select:
    if unknown := kwargs.keys() - _ARGUMENTS:
        name = min(unknown)
        raise TypeError(f"gen() got an unexpected keyword argument {name!r}{near(name, _ARGUMENTS)}")
    second = args[1] if len(args) > 1 else None
    if second is None or isinstance(second, bool) or parameters.whole(second) is not None:
        return _gen(*args, **kwargs)
    name, typed, *others = args
    if type(typed).__module__.partition(".")[0] == "outlines":
        form: dict[str, Any] = _outlines_form(typed)
        if both := sorted(form.keys() & kwargs.keys()):
            raise BadProgram(f"gen takes only one of {', '.join(both)} and a type of outlines")
        return _gen(name, *others, **form | kwargs)
    if not is_type(typed):
        shown, hint = f"{typed!r:.80}", ""
        if isinstance(typed, list | tuple):
            hint = "; options are passed as choices=[...]"
        elif isinstance(typed, str):
            hint = "; text before it is joined with +: s += text + gen(name)"
        raise BadProgram(
            f"gen's second argument must be a type, or a whole number (max_tokens); got {shown}{hint}"
        )
    return _gen(name, *others, typed=typed, **kwargs)


def _outlines_form(term: object) -> dict[str, str]:
    """gen's keyword argument for a type of outlines (types.email, Regex, JsonSchema, CFG, ...). Raises
    BadProgram."""
    from outlines.types.dsl import CFG, JsonSchema, Term, to_regex  # a term comes from there

    match term:
        case JsonSchema(schema=str(schema), whitespace_pattern=None):
            return {"json_schema": schema}
        case CFG(definition=grammar):
            return {"ebnf": grammar}
        case Term():
            try:
                return {"regex": to_regex(term)}
            except (TypeError, NotImplementedError) as error:
                raise BadProgram(
                    f"{type(term).__name__} of outlines cannot be a regular expression: {error}"
                ) from error
        case _:
            raise BadProgram(f"gen takes types of outlines, and {type(term).__name__} is not one")


_ARGUMENTS = frozenset(inspect.signature(_gen).parameters)
functools.update_wrapper(gen, _gen, ("__doc__",), ())
_gen.__name__ = _gen.__qualname__ = "gen"  # for errors about unknown arguments


@exposed
def gen_int(name: str | None = None, max_tokens: int | None = None, **kwargs: Any) -> Gen[str]:
    """Generate a whole number. Takes gen's sampling parameters."""
    return _typed("gen_int", int, name, max_tokens, kwargs)


@exposed
def gen_string(name: str | None = None, max_tokens: int | None = None, **kwargs: Any) -> Gen[str]:
    """Generate a quoted string with escapes as in JSON. Takes gen's sampling parameters."""
    return _typed("gen_string", str, name, max_tokens, kwargs)


def _typed(called: str, dtype: type, name: str | None, max_tokens: int | None, kwargs: dict[str, Any]) -> Gen:
    added(caller(), called)
    if unknown := sorted(set(kwargs) - set(PARAMETERS)):
        hint = near(unknown[0], PARAMETERS)
        raise TypeError(f"{called} got unexpected keyword arguments: {', '.join(unknown)}{hint}")
    return cast("Gen[str]", gen(name, max_tokens, dtype=dtype, **kwargs))


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
    """Choose one of `choices`, by their log-probabilities. A chat API does not return those of given texts:
    it is asked for one of the options at this temperature, and s.choice(name).measured is False. A model that
    takes no temperature (a reasoning model) then makes a draw of its own, with a warning.

    temperature     0 picks the best option; above 0 one is drawn by its probability
    choices_method  how options of several tokens are compared; token_length_normalized by default
    timeout         seconds that the call may take

    Raises BadProgram.
    """
    src = caller()
    added(src, "select")
    if choices is None:
        raise BadProgram('select needs choices: select("name", ["yes", "no"])')
    sampling = parameters.sampling({"temperature": temperature, "seed": seed})
    try:
        method = as_method(choices_method)
    except ValueError as error:
        raise BadProgram(str(error)) from error
    if sampling.temperature and not method.sampled:
        raise BadProgram(f"{method.name} picks step by step and cannot be used with a temperature")
    return Select(
        name=parameters.name(name),
        choices=parameters.choices(choices),
        method=method.name,
        temperature=sampling.temperature or 0.0,
        seed=sampling.seed,
        timeout=parameters.timeout(timeout),
        own=None if METHODS.get(method.name) is method else method,
        src=src,
    )
