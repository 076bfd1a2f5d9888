"""Tools made of typed functions, types, JSON schemas and tool servers, as Runners."""

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

from runtime.formats.tools.schema import rewritten
from runtime.formats.tools.types import Tool as ToolDescription
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
"""The time to connect to a tool server by its address, and again to list its tools."""
MAX_CALL_S = 24 * 3600.0
"""The server's own limit for calls; that of a loop is usually shorter."""


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


def runners_of(tools: object) -> dict[str, Runner]:
    """The runners of one tool, or of several. Raises BadProgram, MissingExtra, a server's errors."""
    single = isinstance(tools, str | Mapping | Tool | type | ToolServer) or not isinstance(tools, Iterable)
    runners: dict[str, Runner] = {}
    for one in [tools] if single else tools:  # type: ignore[attr-defined]
        for runner in _runners(one):
            if not _NAME.match(runner.name):
                raise BadProgram(
                    f"a tool's name has 1 to 64 letters, digits, _ and -, got {runner.name!r:.80}; give it "
                    "another one with Tool(name, ...)"
                )
            if runner.name in runners:
                raise BadProgram(f"two tools are called {runner.name!r}; rename one with Tool(name, ...)")
            runners[runner.name] = runner
    return runners


def described(schemas: Iterable[str]) -> dict[str, Runner]:
    """Runners for tools of which only the JSON is known; nothing runs them."""
    return {one.name: one for one in map(_of_schema, map(json.loads, schemas))}


def _runners(one: object) -> list[Runner]:
    match one:
        case str():
            server = _PARTS.load("MCP")(CONNECT_S, MAX_CALL_S)
            background().run(server.add_tool_server(one), 2 * CONNECT_S)
            return _of_server(server)
        case ToolServer():
            return _of_server(one)
        case Tool():
            schema = {"name": one.name, "description": one.description or None, "parameters": one.parameters}
            return [replace(_of_schema(schema), run=one.run)]
        case Mapping():
            return [_of_schema(one)]
        case type() if types.is_type(one):
            return [_of_type(one)]
        case Callable():
            return [_of_function(one)]
        case _:
            raise BadProgram(
                "a tool is a typed function, a type such as a pydantic model, a JSON schema, a Tool, a tool "
                f"server or its address; got {one!r:.80}"
            )


def _schema(name: str, description: str | None, parameters: Mapping[str, Any]) -> dict[str, Any]:
    function = {"name": name, **({"description": description} if description else {})}
    return {"type": "function", "function": {**function, "parameters": dict(parameters)}}


def _of_server(server: ToolServer) -> list[Runner]:
    runners: list[Runner] = []
    for namespace in server.names():
        description = server.get_tool_description(namespace)
        tools = () if description is None else description.tools
        runners += [replace(_of_schema(tool), server=(server, namespace)) for tool in tools]
    return runners


def _of_schema(schema: object) -> Runner:
    """A tool by OpenAI's or Anthropic's JSON, or by an object with the same fields."""
    try:
        tool = ToolDescription.of(schema)
    except ValueError as error:
        raise BadProgram(str(error)) from error
    parameters = {"type": "object", "properties": {}, **tool.parameters}

    def read(arguments: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        _check(arguments, parameters)
        return (), arguments

    return Runner(_schema(tool.name, tool.description, parameters), read)


def _check(arguments: dict[str, Any], schema: dict[str, Any]) -> None:
    """Raises ValueError. Without jsonschema only required names are checked."""
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


def _of_type(kind: type) -> Runner:
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
    return Runner(_schema(kind.__name__, about, _plain(schema)), read)


def _of_function(function: Callable[..., Any]) -> Runner:
    target = function.func if isinstance(function, functools.partial) else function
    name = str(getattr(target, "__name__", type(target).__name__))
    try:
        signature = inspect.signature(function, eval_str=True)
    except (NameError, TypeError, ValueError) as error:
        raise BadProgram(f"the tool {name} cannot be described: {error}") from error
    create_model, field, invalid = map(_PARTS.load, ("create_model", "Field", "Invalid"))
    # By position: a parameter may have a name that a model's field cannot have.
    fields = {
        f"a{at}": _field(name, parameter, field) for at, parameter in enumerate(signature.parameters.values())
    }
    try:
        model = create_model(name, __config__={"extra": "forbid"}, **fields)
        schema = model.model_json_schema()
    except MissingExtra:
        raise
    except Exception as error:
        first_line = str(error).partition("\n")[0]
        raise BadProgram(f"the tool {name} cannot be described: {first_line}") from error

    def read(arguments: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        try:
            values = model.model_validate(arguments)
        except invalid as error:
            faults = error.errors(include_url=False, include_input=False)
            lines = (f"{'.'.join(map(str, fault['loc']))}: {fault['msg']}" for fault in faults)
            raise ValueError("; ".join(lines)) from None
        bound = signature.bind_partial()
        for at, parameter in enumerate(signature.parameters):
            bound.arguments[parameter] = getattr(values, f"a{at}")
        return bound.args, bound.kwargs

    plain = _plain(schema)
    plain.pop("additionalProperties", None)  # `read` refuses others anyway
    plain.pop("description", None)
    return Runner(_schema(name, inspect.getdoc(target), plain), read, function)


def _field(tool: str, parameter: inspect.Parameter, field: Any) -> Any:
    """A parameter as a field of a pydantic model. Raises BadProgram."""
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
    """A schema as tools usually have it: without titles, and with the most important keys first."""

    def without_title(part: dict[str, Any]) -> dict[str, Any]:
        return {key: value for key, value in part.items() if key != "title" or not isinstance(value, str)}

    untitled: dict[str, Any] = rewritten(schema, without_title)
    return {key: untitled[key] for key in ("type", "properties", "required") if key in untitled} | untitled
