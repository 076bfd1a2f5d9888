"""The words users write. Each returns frozen nodes; none of them talks to a backend, except the two that say
so.

A wrong word (a regex that cannot be compiled, no choices, a temperature below 0) raises BadProgram here, at
once.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Mapping
from typing import Any, cast

from runtime.protocol.messages import RAW_ROLE
from runtime.protocol.registry import Registry, UnknownName
from sglang_dsl.backends import as_backend
from sglang_dsl.errors import BadProgram, NoBackend
from sglang_dsl.errors.tracebacks import exposed
from sglang_dsl.frontend.generation import gen as gen
from sglang_dsl.frontend.generation import gen_int as gen_int
from sglang_dsl.frontend.generation import gen_string as gen_string
from sglang_dsl.frontend.generation import select as select
from sglang_dsl.interpreter import lower
from sglang_dsl.ir import (
    Gen,
    Media,
    Node,
    RoleBegin,
    RoleEnd,
    Seq,
    Source,
    Text,
    Tools,
    as_node,
    caller,
    leaves,
    media_of,
)
from sglang_dsl.ir.interpolation import KEPT, marked
from sglang_dsl.settings import global_config

# What starts the event loop, and what few programs use, is loaded when it is needed.
_PARTS: Registry[Any] = Registry(
    "part of the language",
    {
        "loop": "sglang_dsl.concurrency.loop:background",
        "part_of": "sglang_dsl.frontend.media:part_of",
        "reasoning_type": "runtime.formats.reasoning.types:reasoning_type",
        "runners_of": "sglang_dsl.tool_use.definitions:runners_of",
    },
)
# More words that programs written for sglang import from this module.
_LATE: Registry[Any] = Registry(
    "word",
    {
        "Engine": "runtime.api:Engine",
        "Runtime": "sglang_dsl.console.server_process:Runtime",
        "function": "sglang_dsl.function:function",
    },
    extras={"Engine": "runtime"},
)


@exposed
def image(source: object, *, detail: str | None = None) -> Media:
    """A picture: a path, an http(s) or data address, bytes, a PIL image, or an array of uint8 pixels (height
    x width x channels). `detail`: how finely a model should look, where it takes that. Raises BadProgram."""
    return _media("image", source, {"detail": detail})


@exposed
def video(path: object, num_frames: int | None = None) -> Media:
    """A video: a path, an address, or bytes. `num_frames`: how many of its frames a model should look at,
    where it takes that. Raises BadProgram."""
    if num_frames is not None and (type(num_frames) is not int or num_frames < 1):
        raise BadProgram(f"num_frames takes a number of at least 1, got {num_frames!r}")
    return _media("video", path, {"num_frames": num_frames})


@exposed
def audio(source: object) -> Media:
    """A sound: a path, an address, bytes, or (array of samples, sample rate in Hz). Raises BadProgram."""
    return _media("audio", source, {})


def _media(kind: str, source: object, words: Mapping[str, Any]) -> Media:
    return media_of(_PARTS.load("part_of")(kind, source, words), caller())


@exposed
def separate_reasoning(expr: Node | str, model_type: str = "auto") -> Node:
    """`expr` with its generations taken apart: a variable x then holds the answer, x_reasoning_content the
    thoughts before it, also in streams. `model_type`: how the model marks them ("qwen3", "deepseek-r1", ...;
    "auto": by whatever known mark the text shows). Finished turns go to the model without the thoughts, or as
    its chat template writes them. Raises BadProgram."""
    try:
        _PARTS.load("reasoning_type")(model_type)
    except UnknownName as error:
        raise BadProgram(str(error)) from error
    match expr:
        case Gen():
            return dataclasses.replace(expr, reasoning=model_type)
        case str() if marked(expr):
            return separate_reasoning(as_node(expr, caller()), model_type)
        case Seq(nodes=nodes):
            return Seq(tuple(separate_reasoning(node, model_type) for node in nodes))
        case Node():
            return expr
        case _:
            raise BadProgram(f"separate_reasoning takes gen(...) or what holds one, got {expr!r:.80}")


def turn(role: str, expr: Node | str | None = None) -> Seq:
    """A whole turn of `role`. Without text it is empty: a system turn then stands for the template's
    default."""
    return _turn(role, expr, caller())


def _turn(role: str, expr: Node | str | None, src: Source | None) -> Seq:
    begin, end = _ends(role, src)
    kind = type(expr)
    if kind is str and not (KEPT and marked(cast(str, expr))):
        return Seq((begin, Text(cast(str, expr), src), end))
    if kind is Gen:
        # The same node at each pass through the same line (gen), so the same turn.
        place = (id(begin), id(expr))  # nobody else has them as long as the turn is kept
        known = _TURNS.get(place)
        if known is None or known.nodes[0] is not begin or known.nodes[1] is not expr:
            if len(_TURNS) >= _MOST_TURNS:
                _TURNS.clear()
            known = _TURNS[place] = Seq((begin, cast(Gen, expr), end))
        return known
    return Seq((begin, *(() if expr is None else leaves(as_node(expr, src))), end))


_TURNS: dict[tuple[int, int], Seq] = {}
_MOST_TURNS = 4096


@functools.lru_cache(maxsize=4096)
def _ends(role: str, src: Source | None) -> tuple[RoleBegin, RoleEnd]:
    """Where a turn begins and ends: the same at each pass through the same line."""
    return RoleBegin(role, src), RoleEnd(role, src)


def system(expr: Node | str | None = None) -> Seq:
    """A system turn."""
    return _turn("system", expr, caller())


def user(expr: Node | str | None = None) -> Seq:
    """A user turn."""
    return _turn("user", expr, caller())


def assistant(expr: Node | str | None = None) -> Seq:
    """An assistant turn; usually holds a gen."""
    return _turn("assistant", expr, caller())


def developer(expr: Node | str | None = None) -> Seq:
    """A developer turn: instructions, for models that know this role."""
    return _turn("developer", expr, caller())


def tool(expr: Node | str | None = None) -> Seq:
    """A tool's turn: what it answered."""
    return _turn("tool", expr, caller())


@exposed
def tools(given: object) -> Tools:
    """What the model may call from here on, in place of what was offered before: one tool or a list of them.

    a typed function     its name, docstring and parameters' types; plain ones run in a thread, async ones are
                         awaited; what it returns goes to the model, text as it is, other values as JSON
    Tool(name, ...)      a JSON schema, and what runs it
    a type, a dict       pydantic's model, a dataclass, ...; a JSON schema as chat APIs take it: nothing runs
                         these, a call of one is left to the program
    a tool server        MCPToolServer and its like: all tools it has; or its address as text, which is asked
                         for them here, and waits

    Generations then see them; their calls are run in `with s.tool_loop()`, else they are told by
    s.tool_calls(name). Raises BadProgram, MissingExtra (functions and types need pydantic), and what a tool
    server raises."""
    runners = _PARTS.load("runners_of")(given)
    said = tuple(json.dumps(one.said, ensure_ascii=False) for one in runners.values())
    return Tools(said, own=runners, src=caller())


@exposed
def role(name: str, expr: Node | str | None = None) -> Seq:
    """A turn of any role; the chat template, or the API, says which there are. Raises BadProgram."""
    lower.no_nodes("a role's name", name)
    if name in ("", RAW_ROLE):
        raise BadProgram(f"a role's name is text, other than {RAW_ROLE!r}; got {name!r}")
    return turn(name, expr)


def role_begin(name: str) -> RoleBegin:
    """Opens a turn of any role; role_end(name) closes it."""
    return RoleBegin(name, src=caller())


def role_end(name: str) -> RoleEnd:
    """Closes the turn of this role."""
    return RoleEnd(name, src=caller())


def system_begin() -> RoleBegin:
    """Opens a turn of the system; system_end() closes it."""
    return RoleBegin("system", src=caller())


def system_end() -> RoleEnd:
    """Closes the turn that system_begin() opened."""
    return RoleEnd("system", src=caller())


def user_begin() -> RoleBegin:
    """Opens a turn of the user; user_end() closes it."""
    return RoleBegin("user", src=caller())


def user_end() -> RoleEnd:
    """Closes the turn that user_begin() opened."""
    return RoleEnd("user", src=caller())


def assistant_begin() -> RoleBegin:
    """Opens a turn of the assistant; assistant_end() closes it."""
    return RoleBegin("assistant", src=caller())


def assistant_end() -> RoleEnd:
    """Closes the turn that assistant_begin() opened."""
    return RoleEnd("assistant", src=caller())


@exposed
def set_default_backend(backend: Any) -> None:
    """The backend of every program that is not given one; None takes it away."""
    global_config.default_backend = None if backend is None else as_backend(backend)


def _backend_or_default(backend: Any) -> Any:
    chosen = backend if backend is not None else global_config.default_backend
    if chosen is None:
        raise NoBackend("no backend: pass one, or call set_default_backend(...)")
    return as_backend(chosen)


@exposed
def flush_cache(backend: Any = None) -> bool:
    """Drop the backend's cached prefixes; False where it has none, they are in use, or there is no backend.
    Asks the backend and waits."""
    if backend is None and global_config.default_backend is None:
        return False
    chosen = _backend_or_default(backend)
    return bool(_PARTS.load("loop")().run(chosen.aflush_cache(), global_config.timeout_s))


@exposed
def get_server_info(backend: Any = None) -> dict[str, Any]:
    """What the backend says of itself. Asks the backend and waits."""
    chosen = _backend_or_default(backend)
    return dict(_PARTS.load("loop")().run(chosen.info(), global_config.timeout_s))


def __getattr__(name: str) -> Any:
    if name in ("Engine", "Runtime", "function"):
        return _LATE.load(name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
