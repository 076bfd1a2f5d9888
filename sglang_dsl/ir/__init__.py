"""The intermediate representation: frozen nodes, types as forms of text, properties of a tree of nodes."""

from __future__ import annotations

from runtime.protocol.program import (
    Calls,
    Fork,
    Gen,
    Join,
    LoopBegin,
    LoopEnd,
    Media,
    Node,
    RoleBegin,
    RoleEnd,
    Sampling,
    ScopeBegin,
    ScopeEnd,
    Select,
    Seq,
    Source,
    Text,
    Tools,
    cut,
    flatten,
    from_dict,
    leaves,
    media_of,
    to_dict,
)
from sglang_dsl.errors.tracebacks import caller
from sglang_dsl.ir.syntax import as_node, concat

__all__ = [
    "as_node", "caller", "Calls", "concat", "cut", "flatten", "Fork", "from_dict", "Gen", "Join", "leaves",
    "LoopBegin", "LoopEnd", "Media", "media_of", "Node", "RoleBegin", "RoleEnd", "Sampling", "ScopeBegin",
    "ScopeEnd", "Select", "Seq", "Source", "Text", "to_dict", "Tools",
]  # fmt: skip
