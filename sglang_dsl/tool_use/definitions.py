"""Tools of typed functions, types, JSON schemas and tool servers, as Runners."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, get_args, get_origin

from runtime.formats.schema_walk import rewritten
from runtime.formats.tools.types import Tool as Described
from runtime.protocol.registry import MissingExtra, Registry
from sglang_dsl.concurrency.loop import background
from sglang_dsl.errors import BadProgram
from sglang_dsl.ir import typed as types
from sglang_dsl.tool_use.offers import Runner, ToolServer

_PARTS: Registry[Any] = Registry(
    "part of tools",
    {
        "create_model": "pydantic:create_model",
        "Field": "pydantic:Field",
        "Invalid": "pydantic:ValidationError",
        "MCP": "runtime:MCPToolServer",
    },
    extras={"create_model": "typed", "Field": "typed", "Invalid": "typed", "MCP": "mcp"},
)
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}\Z")
CONNECT_S = 60.0
"""For a tool server that is given by its address to answer, and again to say which tools it has."""
LONGEST_CALL_S = 24 * 3600.0
"""The server's own limit for calls; that of a loop is usually less."""


@dataclass(frozen=True, eq=False)
class Tool:
    """A tool described by a JSON schema.

    parameters  the JSON schema of its arguments
    run         called with the arguments by name; ordinary or async. None: nothing runs the tool, and the
                program handles its calls
    """

    name: str
    description: str = ""
    parameters: Mapping[str, Any] | None = None
    run: Callable[..., Any] | None = None


def runners_of(given: object) -> dict[str, Runner]:
    """The given tools: one, or several in an iterable. Raises BadProgram, MissingExtra, and errors of a tool
    server."""
    single = isinstance(given, str | Mapping | Tool | type | ToolServer) or not isinstance(given, Iterable)
    found: dict[str, Runner] = {}
    for one in [given] if single else given:  # type: ignore[attr-defined]
        for runner in _runners(one):
            if not _NAME.match(runner.name):
                raise BadProgram(
                    f"a tool's name has 1 to 64 letters, digits, _ and -, got {runner.name!r:.80}; give it "
                    "another one with Tool(name, ...)"
                )
            if runner.name in found:
                raise BadProgram(f"two tools are called {runner.name!r}; rename one with Tool(name, ...)")
            found[runner.name] = runner
    return found


def described(said: Iterable[str]) -> dict[str, Runner]:
    """Tools that are known only by their JSON. Nothing runs them."""
    return {one.name: one for one in map(_schema, map(json.loads, said))}


def _runners(one: object) -> list[Runner]:
    match one:
        case str():
            server = _PARTS.load("MCP")(CONNECT_S, LONGEST_CALL_S)
            background().run(server.add_tool_server(one), 2 * CONNECT_S)
            return _served(server)
        case ToolServer():
            return _served(one)
        case Tool():
            said = {"name": one.name, "description": one.description or None, "parameters": one.parameters}
            return [replace(_schema(said), run=one.run)]
        case Mapping():
            return [_schema(one)]
        case type() if types.is_type(one):
            return [_type(one)]
        case Callable():
            return [_function(one)]
        case _:
            raise BadProgram(
                "a tool is a typed function, a type such as a pydantic model, a JSON schema, a Tool, a tool "
                f"server or its address; got {one!r:.80}"
            )


def _said(name: str, description: str | None, parameters: Mapping[str, Any]) -> dict[str, Any]:
    about = {"description": description} if description else {}
    return {"type": "function", "function": {"name": name, **about, "parameters": dict(parameters)}}


def _served(server: ToolServer) -> list[Runner]:
    found: list[Runner] = []
    for namespace in server.names():
        described = server.get_tool_description(namespace)
        tools = () if described is None else described.tools
        found += [replace(_schema(tool), server=(server, namespace)) for tool in tools]
    return found


def _schema(given: object) -> Runner:
    """A tool by a JSON schema: OpenAI's or Anthropic's dict, or an object with the same fields."""
    try:
        tool = Described.of(given)
    except ValueError as error:
        raise BadProgram(str(error)) from error
    parameters = {"type": "object", "properties": {}, **tool.parameters}

    def read(arguments: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        _check(arguments, parameters)
        return (), arguments

    return Runner(_said(tool.name, tool.description, parameters), read)


def _check(arguments: dict[str, Any], schema: dict[str, Any]) -> None:
    """Raises ValueError. Without jsonschema only the names that must be there are looked at."""
    if importlib.util.find_spec("jsonschema") is None:
        if missing := [name for name in schema.get("required", ()) if name not in arguments]:
            raise ValueError(f"{', '.join(missing)} is missing")
        return
    validators: Any = importlib.import_module("jsonschema.validators")
    kind = validators.validator_for(schema, default=validators.Draft202012Validator)
    faults = [
        f"{'.'.join(map(str, fault.absolute_path)) or 'the whole'}: {fault.message}"
        for fault in kind(schema).iter_errors(arguments)
    ]
    if faults:
        raise ValueError("; ".join(sorted(faults)))


def _type(kind: type) -> Runner:
    """A tool whose arguments are the fields of a type."""
    try:
        schema = types.schema(kind)
        adapter = types.describe(kind)
    except ValueError as error:
        raise BadProgram(str(error)) from error
    if schema.get("type") != "object":
        raise BadProgram(f"a tool takes arguments by name, but {kind.__name__} has no named fields")

    def read(arguments: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        adapter.read(json.dumps(arguments))
        return (), arguments

    about = inspect.cleandoc(kind.__doc__) if kind.__doc__ else None
    return Runner(_said(kind.__name__, about, _plain(schema)), read)


def _function(function: Callable[..., Any]) -> Runner:
    named = function.func if isinstance(function, functools.partial) else function
    name = str(getattr(named, "__name__", type(named).__name__))
    try:
        signature = inspect.signature(function, eval_str=True)
    except (NameError, TypeError, ValueError) as error:
        raise BadProgram(f"the tool {name} cannot be described: {error}") from error
    make, field = _PARTS.load("create_model"), _PARTS.load("Field")
    fields: dict[str, Any] = {}
    for place, parameter in enumerate(signature.parameters.values()):
        fields[f"a{place}"] = _field(name, parameter, field)
    try:
        model = make(name, __config__={"extra": "forbid"}, **fields)
        schema = model.model_json_schema()
    except MissingExtra:
        raise
    except Exception as error:
        raise BadProgram(
            f"the tool {name} cannot be described: {str(error).partition(chr(10))[0]}"
        ) from error
    invalid = _PARTS.load("Invalid")

    def read(arguments: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        try:
            made = model.model_validate(arguments)
        except invalid as error:
            faults = error.errors(include_url=False, include_input=False)
            raise ValueError(
                "; ".join(f"{'.'.join(map(str, f['loc']))}: {f['msg']}" for f in faults)
            ) from None
        bound = signature.bind_partial()
        for place, parameter in enumerate(signature.parameters):
            bound.arguments[parameter] = getattr(made, f"a{place}")
        return bound.args, bound.kwargs

    plain = _plain(schema)
    plain.pop("additionalProperties", None)  # `read` refuses others all the same
    plain.pop("description", None)
    return Runner(_said(name, inspect.getdoc(named), plain), read, function)


def _field(tool: str, parameter: inspect.Parameter, field: Any) -> Any:
    """A parameter as a field of a model. Raises BadProgram."""
    if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
        raise BadProgram(f"the tool {tool} takes *{parameter.name}; declare its parameters one by one")
    kind = parameter.annotation
    if kind is parameter.empty:
        raise BadProgram(f"the tool {tool} needs a type for its parameter {parameter.name!r}")
    about = {}
    if get_origin(kind) is Annotated:
        texts = [one for one in get_args(kind)[1:] if isinstance(one, str)]
        about = {"description": " ".join(texts)} if texts else {}
    default = ... if parameter.default is parameter.empty else parameter.default
    return kind, field(default, alias=parameter.name, **about)


def _plain(schema: dict[str, Any]) -> dict[str, Any]:
    """A schema as tools are usually described: without titles, what it is first."""
    made: dict[str, Any] = rewritten(schema, _untitled)
    first: dict[str, Any] = {word: made[word] for word in ("type", "properties", "required") if word in made}
    return {**first, **made}


def _untitled(schema: dict[str, Any]) -> dict[str, Any]:
    if isinstance(schema.get("title"), str):
        del schema["title"]
    return schema
