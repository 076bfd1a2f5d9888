"""The tools that a state offers its model. Loaded by every program, so that it imports little."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from typing import Any, Protocol, runtime_checkable

from runtime.protocol.registry import Registry
from sglang_dsl.errors import BadProgram
from sglang_dsl.ir import LoopBegin, LoopEnd, Node, Tools

_PARTS: Registry[Any] = Registry("part of tools", {"described": "sglang_dsl.tool_use.definitions:described"})


class ToolSession(Protocol):
    """A connection to a tool server. A call returns an object with `text` and `is_error`."""

    async def call(self, name: str, arguments: Mapping[str, Any]) -> Any: ...


@runtime_checkable
class ToolServer(Protocol):
    """Tools by namespace, as the runtime's MCPToolServer. A description has `tools`, each with name,
    description and parameters."""

    def names(self) -> list[str]: ...

    def get_tool_description(self, name: str) -> Any: ...

    def get_tool_session(self, name: str) -> AbstractAsyncContextManager[ToolSession]: ...


@dataclass(frozen=True, eq=False)
class Runner:
    """A tool.

    schema  the tool in the format of chat APIs
    read    turns the arguments of a call into those of `run`; raises ValueError if they are wrong
    run     the function, if there is one
    server  the tool server, if it has the tool, and the namespace
    """

    schema: dict[str, Any]
    read: Callable[[dict[str, Any]], tuple[tuple[Any, ...], dict[str, Any]]]
    run: Callable[..., Any] | None = None
    server: tuple[ToolServer, str] | None = None

    @property
    def name(self) -> str:
        return str(self.schema["function"]["name"])

    @property
    def runs(self) -> bool:
        return self.run is not None or self.server is not None


@dataclass(frozen=True, slots=True)
class Offer:
    """The tools that a state's generations may call, and the open tool_loop, which runs the calls."""

    runners: Mapping[str, Runner]
    loop: LoopBegin | None = None


NOTHING = Offer({})


def offer_after(offer: Offer, node: Node) -> Offer:
    """The offer after `node`. Raises BadProgram for a loop in a loop."""
    match node:
        case Tools(own=None, tools=schemas):
            return replace(offer, runners=_PARTS.load("described")(schemas))
        case Tools(own=runners):
            return replace(offer, runners=runners)
        case LoopBegin():
            if offer.loop is not None:
                raise BadProgram("a tool_loop cannot be inside another one; end that one first")
            return replace(offer, loop=node)
        case LoopEnd():
            return replace(offer, loop=None)
        case _:
            return offer
