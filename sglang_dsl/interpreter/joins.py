"""Results of branches for their parent, by mode. Pure; knows no executors."""

from __future__ import annotations

import json
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from typing import Any, Final

from sglang_dsl.conversation.transcript import Transcript
from sglang_dsl.errors import BadProgram
from sglang_dsl.ir import Calls, Node, RoleBegin, RoleEnd, Text, Tools, media_of

GATHER: Final = "gather_variable"
CONCATENATE: Final = "concate_and_append"
DICT: Final = "dict"
OVERWRITE: Final = "overwrite"
ERROR: Final = "error"
MODES: Final = (GATHER, CONCATENATE, DICT, OVERWRITE, ERROR)
"""gather_variable     name -> the list of the values of the branches that set it, in order
concate_and_append  no variables; the branches' text is added to the parent's, in order
dict                name -> {branch's number: value}
overwrite           name -> the last branch's value
error               name -> the value; a name that two branches set, or the parent has, is a BadProgram"""


def join_mode(mode: str) -> str:
    """`mode`, checked. "list" is another name of gather_variable. Raises BadProgram."""
    if mode == "list":
        return GATHER
    if mode not in MODES:
        raise BadProgram(f"unknown join mode {mode!r}; known: {', '.join(MODES)}")
    return mode


def joined_values(mode: str, branches: Sequence[Mapping[str, Any]], known: Container[str]) -> dict[str, Any]:
    """name -> value for the parent, from the variables that each branch set. `known`: the parent's names.
    Raises BadProgram for a conflict in mode "error"."""
    by_name: dict[str, dict[int, Any]] = {}
    for number, values in enumerate(branches):
        for name, value in values.items():
            by_name.setdefault(name, {})[number] = value
    match mode:
        case "gather_variable":
            return {name: list(values.values()) for name, values in by_name.items()}
        case "dict":
            return dict(by_name)
        case "overwrite":
            return {name: list(values.values())[-1] for name, values in by_name.items()}
        case "error":
            return {name: _only(name, values, known) for name, values in by_name.items()}
        case _:
            return {}


def _only(name: str, values: Mapping[int, Any], known: Container[str]) -> Any:
    if len(values) > 1:
        which = ", ".join(map(str, values))
        raise BadProgram(f"the branches {which} all set {name!r}, which is an error with this join mode")
    if name in known:
        raise BadProgram(f"branch {next(iter(values))} set {name!r}, which was set before the fork")
    return next(iter(values.values()))


def replayed(begin: Transcript, end: Transcript) -> Iterator[Node]:
    """Nodes that repeat the entries between two transcripts, generated text as constant text."""
    making: dict[str, Callable[[str], Node]] = {"text": Text, "open": RoleBegin, "close": RoleEnd}
    for entry in end.entries(begin):
        if entry.kind == "tools":
            yield Tools(tuple(json.dumps(tool, ensure_ascii=False) for tool in entry.tools))
        elif entry.kind == "calls":
            yield Calls(tuple((call.id, call.name, call.arguments) for call in entry.calls))
        else:
            yield making[entry.kind](entry.value) if entry.part is None else media_of(entry.part)
