"""The interface of a tool-call format: how calls are found in a text, parsed, and written."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from runtime.formats.tools.reader import Malformed, Reader, Reading
from runtime.formats.tools.types import Call, StructureInfo, Tool, ToolCallItem


class CallSink:
    """Receives the calls of one reply from a format's parser.

    incremental: the pieces of a call are returned as they come, for constrained text. Otherwise a call is
    returned when it is complete, and text that turns out not to be one becomes content.
    """

    def __init__(self, reader: Reader, tools: Mapping[str, Tool], incremental: bool, forward: bool) -> None:
        self.items: list[ToolCallItem] = []
        self.count = 0
        self._reader, self.tools = reader, tools
        self._incremental, self._forward = incremental, forward
        self._index = 0
        self._held: list[str] = []

    def begin(self, name: str) -> Tool:
        """A call of this tool begins. Raises Malformed if there is no such tool."""
        tool = self.tools.get(name)
        if tool is None and not self._forward:
            raise Malformed(f"there is no tool {name[:80]!r}")
        self._index = -1 if tool is None else self.count
        self._held = []
        self._name = name
        if self._incremental:
            self.count += self._index >= 0
            self._give(ToolCallItem(self._index, name))
        return tool or Tool(name)

    def arguments(self, piece: str) -> None:
        """The next piece of its arguments' JSON."""
        if self._incremental:
            self._give(ToolCallItem(self._index, None, piece))
        else:
            self._held.append(piece)

    def commit(self) -> None:
        """The call is complete."""
        if not self._incremental:
            self.count += self._index >= 0
            self._give(ToolCallItem(self._index, self._name))
            self._give(ToolCallItem(self._index, None, "".join(self._held)))
        self._reader.taken.clear()

    def whole(self, name: str, arguments: str) -> None:
        """A complete call; `arguments`: JSON."""
        self.begin(name)
        self.arguments(arguments)
        self.commit()

    def _give(self, item: ToolCallItem) -> None:
        self._reader.taken.clear()
        last = self.items[-1] if self.items else None
        if last and last.name is None and item.name is None and last.tool_index == item.tool_index:
            last.parameters += item.parameters
        else:
            self.items.append(item)


class BaseFormatDetector(ABC):
    """A format. keys: its names. One object serves all replies: it has no state.

    To add one: a subclass, or an object of one of the shapes (json_calls, named_calls, tagged, pythonic), in
    `formats`, and a line in `table`; a separate package has an entry point in the group
    `sglang_dsl.tool-call.format`.
    """

    keys: ClassVar[tuple[str, ...]] = ()

    triggers: tuple[str, ...]
    """Texts that begin a call, or the wrapper of calls."""

    @abstractmethod
    def read(self, reader: Reader, trigger: str, calls: CallSink) -> Reading[None]:
        """After a consumed trigger: read all calls up to the next content. Raises Malformed if there is none;
        the text since the last complete call is content then."""

    @abstractmethod
    def render(self, calls: Sequence[Call]) -> str:
        """The calls as the model writes them."""

    def structure_info(self, name: str) -> StructureInfo | None:
        """The texts around the JSON arguments of a call of one tool; None if they are not written as JSON."""
        return None

    def finder(self, names: Sequence[str] | None) -> re.Pattern[str] | None:
        """A pattern for triggers, if only some count: those after which the text cannot be a call are
        skipped. names: of the tools that may be called; None: any."""
        return None

    unsure: re.Pattern[str] | None = None
    """Matches a trigger at the end of the available text that needs more text to decide whether it counts."""

    around: tuple[str, str, str] = ("", "", "")
    """Begin of all calls, separator, end of all calls, for structural tags."""

    def call_tag(self, tool: Tool, schema: Mapping[str, Any]) -> dict[str, Any] | None:
        """The structural tag ({"type": "tag", ...}) of one call; None if structural tags cannot express it.
        schema: of the arguments, if they are written as JSON; otherwise the tool's own is used."""
        info = self.structure_info(tool.name)
        if info is None:
            return None
        content = {"type": "json_schema", "json_schema": schema}
        return {"type": "tag", "begin": info.begin, "content": content, "end": info.end}

    def auto_trigger(self) -> str | None:
        """The text after which a call must follow, in a reply with optional calls; None if content may
        contain it, too."""
        return self.triggers[0]

    def has_tool_call(self, text: str) -> bool:
        return any(trigger in text for trigger in self.triggers)


class WrittenCalls(BaseFormatDetector):
    """A format that writes each call as a text of its own, with `around` around and between them."""

    @abstractmethod
    def written(self, number: int, call: Call) -> str:
        """One call; `number`: its index in the reply."""

    def render(self, calls: Sequence[Call]) -> str:
        begin, separator, end = self.around
        written = separator.join(self.written(number, call) for number, call in enumerate(calls))
        return f"{begin}{written}{end}" if calls else ""

    def call_tag(self, tool: Tool, schema: Mapping[str, Any]) -> dict[str, Any] | None:
        begin, end = self.written(0, Call(tool.name, {})).rsplit("{}", 1)
        content = {"type": "json_schema", "json_schema": schema}
        return {"type": "tag", "begin": begin, "content": content, "end": end}
