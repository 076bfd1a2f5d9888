"""The words users write. Each returns frozen nodes; none of them talks to a backend, except the two that say
so.

A wrong word (a regex that cannot be compiled, no choices, a temperature below 0) raises BadProgram here, at
once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, cast

from runtime.protocol.registry import Registry
from sglang_dsl import lower
from sglang_dsl.backends import as_backend
from sglang_dsl.choices import METHODS, ChoiceMethod
from sglang_dsl.errors import BadProgram, NoBackend
from sglang_dsl.ir import Gen, Node, RoleBegin, RoleEnd, Select, Seq, as_node, caller, concat
from sglang_dsl.settings import global_config

# What starts the event loop is loaded when it is needed.
_PARTS: Registry[Any] = Registry("part of the language", {"loop": "sglang_dsl.loop:background"})


def gen(
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
    choices_method: ChoiceMethod | str | None = None,
    regex: str | None = None,
    json_schema: str | Mapping[str, Any] | type | None = None,
    *,
    repetition_penalty: float | None = None,
    seed: int | None = None,
) -> Gen | Select:
    """Generate text here; `name` is the variable that will hold it.

    Sampling words left out (None) are taken from the program, then from the defaults. At most one of dtype,
    regex, json_schema and choices may be given; `choices` makes this a select. Raises BadProgram.
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
    }
    forms = {"dtype": dtype, "regex": regex, "json_schema": json_schema, "choices": choices}
    given = [word for word, value in forms.items() if value is not None]
    if len(given) > 1:
        raise BadProgram(f"gen takes one of {', '.join(forms)}; got {' and '.join(given)}")
    if choices is not None:
        # A choice is made by scoring whole options: words about drawing tokens would be dropped silently.
        idle = [w for w, value in words.items() if value is not None and w not in ("temperature", "seed")]
        if idle:
            raise BadProgram(f"{', '.join(idle)} would have no effect next to choices; leave it out")
        return select(name, choices, temperature or 0.0, choices_method, seed=seed)
    if choices_method is not None:
        raise BadProgram("choices_method needs choices")
    return Gen(
        name=lower.name(name),
        sampling=lower.sampling(words),
        dtype=None if dtype is None else lower.dtype(dtype),
        regex=None if regex is None else lower.regex(regex),
        json_schema=None if json_schema is None else lower.json_schema(json_schema),
        src=caller(),
    )


def gen_int(name: str | None = None, max_tokens: int | None = None, **words: Any) -> Gen:
    """Generate a whole number; takes gen's sampling words."""
    return _typed("gen_int", int, name, max_tokens, words)


def gen_string(name: str | None = None, max_tokens: int | None = None, **words: Any) -> Gen:
    """Generate a quoted string, escapes as in JSON; takes gen's sampling words."""
    return _typed("gen_string", str, name, max_tokens, words)


def _typed(word: str, dtype: type, name: str | None, max_tokens: int | None, words: dict[str, Any]) -> Gen:
    if unknown := sorted(set(words) - set(lower.WORDS)):
        raise TypeError(f"{word} got unexpected words: {', '.join(unknown)}")
    return cast(Gen, gen(name, max_tokens, dtype=dtype, **words))


def select(
    name: str | None = None,
    choices: Iterable[str] | None = None,
    temperature: float = 0.0,
    choices_method: ChoiceMethod | str | None = None,
    *,
    seed: int | None = None,
) -> Select:
    """Choose one of `choices` by log-probability; above temperature 0, draw one. Raises BadProgram."""
    if choices is None:
        raise BadProgram("select needs choices")
    said = lower.sampling({"temperature": temperature, "seed": seed})
    method = choices_method.name if isinstance(choices_method, ChoiceMethod) else choices_method
    found = METHODS.get(method or "token_length_normalized")
    if found is None:
        raise BadProgram(f"unknown choices_method {method!r}; known: {', '.join(METHODS)}")
    if said.temperature and not found.sampled:
        raise BadProgram(f"{found.name} picks step by step and cannot be drawn with a temperature")
    return Select(
        name=lower.name(name),
        choices=lower.choices(choices),
        method=found.name,
        temperature=said.temperature or 0.0,
        seed=said.seed,
        src=caller(),
    )


def turn(role: str, expr: Node | str | None = None) -> Seq:
    """A whole turn of `role`. Without text it is empty: a system turn then stands for the template's
    default."""
    src = caller()
    inside = () if expr is None else (as_node(expr, src),)
    return concat(RoleBegin(role, src=src), *inside, RoleEnd(role, src=src))


def system(expr: Node | str | None = None) -> Seq:
    """A system turn."""
    return turn("system", expr)


def user(expr: Node | str | None = None) -> Seq:
    """A user turn."""
    return turn("user", expr)


def assistant(expr: Node | str | None = None) -> Seq:
    """An assistant turn; usually holds a gen."""
    return turn("assistant", expr)


def system_begin() -> RoleBegin:
    return RoleBegin("system", src=caller())


def system_end() -> RoleEnd:
    return RoleEnd("system", src=caller())


def user_begin() -> RoleBegin:
    return RoleBegin("user", src=caller())


def user_end() -> RoleEnd:
    return RoleEnd("user", src=caller())


def assistant_begin() -> RoleBegin:
    return RoleBegin("assistant", src=caller())


def assistant_end() -> RoleEnd:
    return RoleEnd("assistant", src=caller())


def set_default_backend(backend: Any) -> None:
    """The backend of every program that is not given one; None takes it away."""
    global_config.default_backend = None if backend is None else as_backend(backend)


def _backend_or_default(backend: Any) -> Any:
    chosen = backend if backend is not None else global_config.default_backend
    if chosen is None:
        raise NoBackend("no backend: pass one, or call set_default_backend(...)")
    return as_backend(chosen)


def flush_cache(backend: Any = None) -> bool:
    """Drop the backend's cached prefixes; False where it has none or they are in use. Asks the backend and
    waits."""
    chosen = _backend_or_default(backend)
    return bool(_PARTS.load("loop")().run(chosen.flush_cache(), global_config.timeout_s))


def get_server_info(backend: Any = None) -> dict[str, Any]:
    """What the backend says of itself. Asks the backend and waits."""
    chosen = _backend_or_default(backend)
    return dict(_PARTS.load("loop")().run(chosen.info(), global_config.timeout_s))
