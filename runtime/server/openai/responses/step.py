"""One generation of a response: its request, its reply, the items that come of it, and their events."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from runtime.formats.reply import ContentDelta, ReasoningDelta, ReplyEvent, ToolCallDelta
from runtime.protocol.messages import Message, ToolCall
from runtime.protocol.request_base import new_rid
from runtime.server.context import ServerContext
from runtime.server.openai.logprobs import token_entries
from runtime.server.openai.responses.items import server_call_item, set_arguments, set_result, text_part
from runtime.server.openai.responses.tools import ServerTool, Sessions, parsed
from runtime.server.replies import Generation
from runtime.server.tool_use import ToolUse

_PREFIXES = {"mcp_call": "mcp", "code_interpreter_call": "ci", "web_search_call": "ws"}


class Step:
    """run: the tools that the server runs. container: the id of the place in which code of this response
    runs. calls: the items of its calls; skipped: numbers of those that were not run because of
    max_tool_calls."""

    def __init__(
        self,
        ctx: ServerContext,
        generation: Generation,
        use: ToolUse,
        run: Mapping[str, ServerTool],
        container: str,
        shows_reasoning: bool = True,
    ) -> None:
        self._ctx, self._use, self._run, self._container = ctx, use, run, container
        self.generation, self.shows_reasoning = generation, shows_reasoning
        [self.reply] = generation.replies
        self.message_id, self.reasoning_id = f"msg_{new_rid()}", f"rs_{new_rid()}"
        self.calls: list[dict[str, Any]] = []
        self._call_ids: list[str] = []
        self._logprobs: list[dict[str, Any]] = []
        self.status = "in_progress"
        self.skipped: list[int] = []

    @property
    def may_call(self) -> bool:
        return self._use.key is not None

    @property
    def reasoning(self) -> str | None:
        """As far as it is shown."""
        return self.reply.reasoning if self.shows_reasoning else None

    @property
    def was_cut(self) -> bool:
        """By the limit of tokens, or within its constraint."""
        finish = self.reply.meta.get("finish_reason") or {}
        return finish.get("type") == "length" or self.reply.was_cut

    # -- items -----------------------------------------------------------------------------------------------

    def call_item(self, number: int, name: str) -> dict[str, Any]:
        call_id = self._use.new_id(number, name)
        tool = self._run.get(name)
        if tool is None:
            item = {"type": "function_call", "id": f"fc_{new_rid()}", "call_id": call_id, "name": name}
            item |= {"arguments": "", "status": "in_progress"}
        else:
            identity = f"{_PREFIXES[tool.kind]}_{new_rid()}"
            item = server_call_item(tool.kind, identity, name, tool.namespace, self._container)
        self.calls.append(item)
        self._call_ids.append(call_id)
        return item

    def reasoning_item(self, text: str, status: str) -> dict[str, Any]:
        content = [{"type": "reasoning_text", "text": text}] if text else []
        head = {"type": "reasoning", "id": self.reasoning_id, "status": status}
        return {**head, "summary": [], "content": content}

    def message_item(self, text: str, status: str) -> dict[str, Any]:
        head = {"type": "message", "id": self.message_id, "status": status, "role": "assistant"}
        return {**head, "content": [text_part(text, self._logprobs)]}

    def new_logprobs(self) -> list[dict[str, Any]]:
        """Of the tokens of the last delta, which are added to all."""
        assert self.reply.output is not None
        new = token_entries(self.reply.output, self._ctx.manager.tokenizer.vocabulary)
        self._logprobs += new
        return new

    def finish(self) -> None:
        """The reply is complete, and so are its calls."""
        self.status = "incomplete" if self.was_cut else "completed"
        for number, (name, arguments) in enumerate(self.reply.calls):
            item = self.calls[number] if number < len(self.calls) else self.call_item(number, name)
            if item["type"] == "function_call":
                item |= {"arguments": arguments, "status": self.status}
            else:
                set_arguments(item, name, arguments, parsed(arguments) or {})
                if self.was_cut:
                    _set_cut(item)

    def items(self) -> list[dict[str, Any]]:
        """In the order of a reply. Those of calls change when they are run."""
        reply, items = self.reply, []
        if self.reasoning is not None:
            items.append(self.reasoning_item(self.reasoning, self.status))
        if reply.content or not reply.calls:
            items.append(self.message_item(reply.content, self.status))
        return items + self.calls

    def message(self) -> Message:
        calls = tuple(
            ToolCall(name, arguments, call_id)
            for (name, arguments), call_id in zip(self.reply.calls, self._call_ids, strict=True)
        )
        reasoning = self.reply.reasoning or None
        return Message("assistant", self.reply.content, tool_calls=calls, reasoning_content=reasoning)

    # -- calls that are run here -----------------------------------------------------------------------------

    @property
    def to_run(self) -> list[int]:
        return [number for number, (name, _) in enumerate(self.reply.calls) if name in self._run]

    @property
    def has_functions(self) -> bool:
        """Whether there are calls for the client to run."""
        return len(self.to_run) < len(self.reply.calls)

    async def run(self, number: int, sessions: Sessions) -> Message:
        """Run a call; its result for the model."""
        name, arguments = self.reply.calls[number]
        result = await sessions.call(self._run[name], arguments)
        set_result(self.calls[number], result.text, result.is_error)
        return Message("tool", result.text, name=name, tool_call_id=self._call_ids[number])

    def skip(self, number: int) -> Message:
        """Do not run a call; its result for the model if the conversation is continued."""
        self.skipped.append(number)
        _set_cut(self.calls[number])
        name, _ = self.reply.calls[number]
        return Message("tool", "not run: too many calls", name=name, tool_call_id=self._call_ids[number])


def _set_cut(item: dict[str, Any]) -> None:
    item["status"] = "failed" if item["type"] == "web_search_call" else "incomplete"


class StepEvents:
    """The events of a step's items. event: (type, **fields) -> the event's bytes; offset: number of the
    response's earlier items."""

    def __init__(self, step: Step, event: Callable[..., bytes], offset: int) -> None:
        self._step, self._event, self._offset = step, event, offset
        self._positions: dict[str, int] = {}  # an item's id -> its output_index

    def begin(self) -> list[bytes]:
        """The items that are certain to come: a reply that may call need not have a text."""
        step = self._step
        events = [] if step.reasoning is None else self._open_reasoning()
        return events if step.may_call or step.reply.may_reason else events + self._open_message()

    def position(self, item: dict[str, Any]) -> int:
        """The output_index of an item of the finished generation."""
        return self._positions.get(item["id"], self._offset + len(self._positions))

    def _open(self, item: dict[str, Any]) -> list[bytes]:
        position = self._positions[item["id"]] = self._offset + len(self._positions)
        return [self._event("response.output_item.added", output_index=position, item=item)]

    def _of(self, identity: str, kind: str, **fields: Any) -> bytes:
        position = self._positions[identity]
        return self._event(f"response.{kind}", output_index=position, item_id=identity, **fields)

    def _open_reasoning(self) -> list[bytes]:
        if self._step.reasoning_id in self._positions:
            return []
        return self._open(self._step.reasoning_item("", "in_progress"))

    def _open_message(self) -> list[bytes]:
        identity = self._step.message_id
        if identity in self._positions:
            return []
        events = self._open({**self._step.message_item("", "in_progress"), "content": []})
        part = text_part("", ())
        return [*events, self._of(identity, "content_part.added", content_index=0, part=part)]

    def of(self, one: ReplyEvent) -> list[bytes]:
        """The events of one event of the reply."""
        step = self._step
        match one:
            case ReasoningDelta() if not step.shows_reasoning:
                return []
            case ReasoningDelta(text=text):
                events, fields = self._open_reasoning(), {"content_index": 0, "delta": text}
                return [*events, self._of(step.reasoning_id, "reasoning_text.delta", **fields)]
            case ContentDelta(text=text):
                new = step.new_logprobs()
                if not text and (step.may_call or step.reply.may_reason):
                    return []
                events, fields = self._open_message(), {"content_index": 0, "delta": text, "logprobs": new}
                return [*events, self._of(step.message_id, "output_text.delta", **fields)]
            case ToolCallDelta(index=number, name=name, arguments=text):
                events = [] if name is None else self._open_call(step.call_item(number, name))
                item = step.calls[number]
                if text and (kind := _ARGUMENTS.get(item["type"])) is not None:
                    events.append(self._of(item["id"], f"{kind}.delta", delta=text))
                return events

    def end(self) -> list[bytes]:
        """Each item as the model left it. Those of calls that are run here end later."""
        step, events = self._step, []
        if not step.calls:
            events += self._open_message()
        for item in step.calls:
            if item["id"] not in self._positions:
                events += self._open(item)
        items = {one["id"]: one for one in step.items()}
        for identity in self._positions:
            item = items[identity]
            match item["type"]:
                case "reasoning":
                    text = step.reply.reasoning or ""
                    events.append(self._of(identity, "reasoning_text.done", content_index=0, text=text))
                case "message":
                    [part] = item["content"]
                    fields = {"content_index": 0, "text": part["text"], "logprobs": part["logprobs"]}
                    events.append(self._of(identity, "output_text.done", **fields))
                    events.append(self._of(identity, "content_part.done", content_index=0, part=part))
                case _:
                    events += self._arguments(item)
                    if item["status"] == "in_progress":
                        continue
            events.append(self._done(item))
        return events

    def _done(self, item: dict[str, Any]) -> bytes:
        return self._event("response.output_item.done", output_index=self._positions[item["id"]], item=item)

    # -- calls -----------------------------------------------------------------------------------------------

    def _open_call(self, item: dict[str, Any]) -> list[bytes]:
        events, kind = self._open(item), item["type"]
        return events if kind == "function_call" else [*events, self._of(item["id"], f"{kind}.in_progress")]

    def _arguments(self, item: dict[str, Any]) -> list[bytes]:
        """They are complete."""
        of = partial(self._of, item["id"])
        match item["type"]:
            case "function_call":
                return [of("function_call_arguments.done", arguments=item["arguments"], name=item["name"])]
            case "mcp_call":
                return [of("mcp_call_arguments.done", arguments=item["arguments"])]
            case "code_interpreter_call" as kind:
                code = item["code"]
                return [of(f"{kind}_code.delta", delta=code), of(f"{kind}_code.done", code=code)]
        return []

    def runs(self, number: int) -> list[bytes]:
        item = self._step.calls[number]
        kind = item["type"]
        return [self._of(item["id"], f"{kind}.{_RUNS[kind]}")] if kind in _RUNS else []

    def ran(self, number: int) -> list[bytes]:
        item = self._step.calls[number]
        failed = item["type"] == "mcp_call" and item["status"] == "failed"
        ended = self._of(item["id"], f"{item['type']}.{'failed' if failed else 'completed'}")
        return [ended, self._done(item)]

    def skipped(self) -> list[bytes]:
        """The calls that are not run have ended."""
        return [self._done(self._step.calls[number]) for number in self._step.skipped]


_ARGUMENTS = {"function_call": "function_call_arguments", "mcp_call": "mcp_call_arguments"}
"""Items whose arguments are streamed."""
_RUNS = {"code_interpreter_call": "interpreting", "web_search_call": "searching"}
"""Items that have an event for the beginning of a run."""
