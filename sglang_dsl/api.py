"""The functions that programs are written with. Each returns frozen nodes; a wrong argument (a regex that
cannot be compiled, no choices, a temperature below 0) raises BadProgram at once.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import sys
from collections.abc import Mapping
from typing import Any, Literal, TypeVar, cast

from runtime.protocol.messages import RAW_ROLE
from runtime.protocol.registry import UnknownName
from sglang_dsl.backends import as_backend
from sglang_dsl.errors import BadProgram, NoBackend
from sglang_dsl.errors.tracebacks import Discarded, exposed
from sglang_dsl.frontend.generation import gen as gen
from sglang_dsl.frontend.generation import gen_int as gen_int
from sglang_dsl.frontend.generation import gen_string as gen_string
from sglang_dsl.frontend.generation import select as select
from sglang_dsl.interpreter.parameters import no_nodes
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
from sglang_dsl.ir.syntax import KEPT, added, marked
from sglang_dsl.settings import global_config

M = TypeVar("M", RoleBegin, RoleEnd)


@exposed
def image(source: object, *, detail: str | None = None) -> Media:
    """An image: a path, an http(s) or data URL, bytes, a PIL image, or an array of uint8 pixels (height x
    width x channels). `detail`: how closely the model should look, if it supports that. Raises BadProgram."""
    return _media("image", source, {"detail": detail})


@exposed
def video(path: object, num_frames: int | None = None) -> Media:
    """A video: a path, a URL, or bytes. `num_frames`: how many of its frames the model should look at, if it
    supports that. Raises BadProgram."""
    if num_frames is not None and (type(num_frames) is not int or num_frames < 1):
        raise BadProgram(f"num_frames must be at least 1, got {num_frames!r}")
    return _media("video", path, {"num_frames": num_frames})


@exposed
def audio(source: object) -> Media:
    """Audio: a path, a URL, bytes, or (array of samples, sample rate in Hz). Raises BadProgram."""
    return _media("audio", source, {})


def _media(kind: Literal["image", "video", "audio"], source: object, attributes: Mapping[str, Any]) -> Media:
    from sglang_dsl.frontend.media import part_of

    src = caller()
    added(src, kind)
    return media_of(part_of(kind, source, attributes), src)


@exposed
def separate_reasoning(expr: Node | str, model_type: str = "auto") -> Node:
    """Separate the reasoning from the answer in the generations of `expr`. The variable x then holds the
    answer, and x_reasoning_content the thoughts before it. This also works in streams.

    model_type  how the model marks its thoughts: "qwen3", "deepseek-r1", ...; "auto" recognizes the known
                markers

    In later prompts, finished turns contain no thoughts, or what the chat template writes of them. Raises
    BadProgram.
    """
    from runtime.formats.reasoning.marks import reasoning_type

    added(caller(), "separate_reasoning")
    try:
        reasoning_type(model_type)
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
            raise BadProgram(f"separate_reasoning takes gen(...) or text that contains one, got {expr!r:.80}")


def turn(role: str, expr: Node | str | None = None) -> Seq:
    """A whole turn of `role`. Without text it is empty; an empty system turn stands for the template's
    default system prompt."""
    return _turn(role, expr, caller())


def _turn(role: str, expr: Node | str | None, src: Source | None) -> Seq:
    if type(src) is Discarded:
        added(src, role)
    kind = type(expr)
    if kind is Gen:
        # gen returns the same node at each pass through a line; so does this. With what Evaluator.add saves:
        # 38.6 -> 35.9 us a gen.
        key = (role, id(src), id(expr))  # unique as long as the turn is kept
        known = _TURNS.get(key)
        if known is None or known.nodes[0].src is not src or known.nodes[1] is not expr:
            if len(_TURNS) >= _MOST_TURNS:
                _TURNS.clear()
            begin, end = _ends(role, src)
            known = _TURNS[key] = Seq((begin, cast(Gen, expr), end))
        return known
    begin, end = _ends(role, src)
    if kind is str and not (KEPT and marked(cast(str, expr))):
        return Seq((begin, Text(cast(str, expr), src=src), end))
    return Seq((begin, *(() if expr is None else leaves(as_node(expr, src))), end))


_TURNS: dict[tuple[str, int, int], Seq] = {}
_MOST_TURNS = 4096


@functools.lru_cache(maxsize=4096)
def _ends(role: str, src: Source | None) -> tuple[RoleBegin, RoleEnd]:
    """The nodes that open and close a turn. One pair per line of the program, however often it runs."""
    return RoleBegin(role, src=src), RoleEnd(role, src=src)


def system(expr: Node | str | None = None) -> Seq:
    """A system turn."""
    return _turn("system", expr, caller())


def user(expr: Node | str | None = None) -> Seq:
    """A user turn."""
    return _turn("user", expr, caller())


def assistant(expr: Node | str | None = None) -> Seq:
    """An assistant turn. It usually contains a gen."""
    return _turn("assistant", expr, caller())


def developer(expr: Node | str | None = None) -> Seq:
    """A developer turn: instructions, for models that support this role."""
    return _turn("developer", expr, caller())


def tool(expr: Node | str | None = None) -> Seq:
    """A tool turn: the result of a call."""
    return _turn("tool", expr, caller())


@exposed
def tools(offered: object) -> Tools:
    """Set the tools that the model may call from here on: one tool or a list of them. Replaces the tools
    offered before.

    a typed function  described by its name, docstring and parameter types. Ordinary functions run in a
                      thread, async ones are awaited. A result that is text goes to the model as it is, other
                      values as JSON
    Tool(name, ...)   a JSON schema, and the function that runs it
    a type, a dict    a pydantic model, a dataclass, ..., or a JSON schema as chat APIs take it. Nothing runs
                      these; the program handles their calls
    a tool server     all tools of an MCPToolServer or a similar object, or of the server at an address given
                      as text. The server is asked for its tools here, which waits

    Inside `with s.tool_loop()` the model's calls are run. Elsewhere s.tool_calls(name) returns them. Raises
    BadProgram, MissingExtra (functions and types need pydantic), and errors of a tool server.
    """
    from sglang_dsl.tool_use.definitions import runners_of

    src = caller()
    added(src, "tools")
    runners = runners_of(offered)
    described = tuple(json.dumps(one.schema, ensure_ascii=False) for one in runners.values())
    return Tools(described, own=runners, src=src)


@exposed
def role(name: str, expr: Node | str | None = None) -> Seq:
    """A turn with any role that the chat template, or the API, supports. Raises BadProgram."""
    no_nodes("a role's name", name)
    if name in ("", RAW_ROLE):
        raise BadProgram(f"a role's name must be a string other than {RAW_ROLE!r}; got {name!r}")
    return turn(name, expr)


def _mark(kind: type[M], name: str, src: Source | None) -> M:
    """Where a turn opens or closes."""
    if type(src) is Discarded:
        added(src, kind.KIND.replace("role", name))
    return kind(name, src=src)


def role_begin(name: str) -> RoleBegin:
    """Open a turn with any role; role_end(name) closes it."""
    return _mark(RoleBegin, name, caller())


def role_end(name: str) -> RoleEnd:
    """Close the turn of this role."""
    return _mark(RoleEnd, name, caller())


def system_begin() -> RoleBegin:
    """Open a system turn; system_end() closes it."""
    return _mark(RoleBegin, "system", caller())


def system_end() -> RoleEnd:
    """Close the turn that system_begin() opened."""
    return _mark(RoleEnd, "system", caller())


def user_begin() -> RoleBegin:
    """Open a user turn; user_end() closes it."""
    return _mark(RoleBegin, "user", caller())


def user_end() -> RoleEnd:
    """Close the turn that user_begin() opened."""
    return _mark(RoleEnd, "user", caller())


def assistant_begin() -> RoleBegin:
    """Open an assistant turn; assistant_end() closes it. If you leave it open, the model continues it."""
    return _mark(RoleBegin, "assistant", caller())


def assistant_end() -> RoleEnd:
    """Close the turn that assistant_begin() opened."""
    return _mark(RoleEnd, "assistant", caller())


@exposed
def set_default_backend(backend: Any) -> None:
    """Set the backend of every program that is not given one. None removes it."""
    global_config.default_backend = None if backend is None else as_backend(backend)


def _backend_or_default(backend: Any) -> Any:
    chosen = backend if backend is not None else global_config.default_backend
    if chosen is None:
        raise NoBackend("no backend: pass one, or call set_default_backend(...)")
    return as_backend(chosen)


@exposed
def flush_cache(backend: Any = None) -> bool:
    """Drop the prefixes that the backend has cached, and wait for it. Returns False if the backend has no
    cache, if the prefixes are in use, or if there is no backend."""
    if backend is None and global_config.default_backend is None:
        return False
    from sglang_dsl.concurrency.loop import background

    chosen = _backend_or_default(backend)
    return bool(background().run(chosen.aflush_cache(), global_config.timeout_s))


@exposed
def get_server_info(backend: Any = None) -> dict[str, Any]:
    """What the backend reports about itself, as a dict. Waits for the answer."""
    from sglang_dsl.concurrency.loop import background

    chosen = _backend_or_default(backend)
    return dict(background().run(chosen.info(), global_config.timeout_s))


def __getattr__(name: str) -> Any:
    """Names of the package that programs written for sglang import from this module."""
    if name in ("Engine", "Runtime", "function"):
        return getattr(sys.modules[__package__], name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
