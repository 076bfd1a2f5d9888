"""What a state offers its model: tools, each with what runs it. Light: every program that runs loads it."""

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
    """One connection to a tool server. A call gives an object with `text` and `is_error`."""

    async def call(self, name: str, arguments: Mapping[str, Any]) -> Any: ...


@runtime_checkable
class ToolServer(Protocol):
    """Tools by namespace, as the runtime's MCPToolServer has them; a description has `tools`, each with
    name, description and parameters."""

    def names(self) -> list[str]: ...

    def get_tool_description(self, name: str) -> Any: ...

    def get_tool_session(self, name: str) -> AbstractAsyncContextManager[ToolSession]: ...


@dataclass(frozen=True, eq=False)
class Runner:
    """said: the tool as chat APIs take it. read: from the call's arguments to those of `run`; raises
    ValueError, which says what is wrong with them. server: with its namespace, where the tool is one's."""

    said: dict[str, Any]
    read: Callable[[dict[str, Any]], tuple[tuple[Any, ...], dict[str, Any]]]
    run: Callable[..., Any] | None = None
    server: tuple[ToolServer, str] | None = None

    @property
    def name(self) -> str:
        return str(self.said["function"]["name"])

    @property
    def runs(self) -> bool:
        return self.run is not None or self.server is not None


@dataclass(frozen=True, slots=True)
class Offer:
    """What a state's generations may call, and the loop that runs the calls, where one is open."""

    runners: Mapping[str, Runner]
    loop: LoopBegin | None = None


NOTHING = Offer({})


def offer_after(offer: Offer, node: Node) -> Offer:
    """What is offered after `node`. Raises BadProgram for a loop inside of a loop."""
    match node:
        case Tools(own=None, tools=said):
            return replace(offer, runners=_PARTS.load("described")(said))
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
