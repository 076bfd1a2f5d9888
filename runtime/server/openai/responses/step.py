"""One generation of a response: its request, its reply, and the items that come of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from runtime.formats.reply import ContentDelta, ReasoningDelta, ReplyEvent, ToolCallDelta
from runtime.protocol.io_struct import GenerateReqInput
from runtime.protocol.messages import Message, ToolCall
from runtime.protocol.request_base import new_rid
from runtime.server.context import ServerContext
from runtime.server.openai.logprobs import token_entries
from runtime.server.openai.responses.items import (
    call_item,
    message_item,
    reasoning_item,
    server_call_item,
    tell_arguments,
    tell_result,
    text_part,
)
from runtime.server.openai.responses.tools import ServerTool, Sessions, parsed
from runtime.server.replies import parsers
from runtime.server.tool_use import ToolUse

_PREFIXES = {"mcp_call": "mcp", "code_interpreter_call": "ci", "web_search_call": "ws"}


class Step:
    """run: the tools that the server runs. container: the name of the place where code of this response is
    run. calls: the items of its calls; left_out: numbers of those that were
    not run, as there may be no more."""

    def __init__(
        self,
        ctx: ServerContext,
        request: GenerateReqInput,
        use: ToolUse,
        run: Mapping[str, ServerTool],
        container: str,
        shows_reasoning: bool = True,
    ) -> None:
        self._ctx, self._use, self._run, self._container = ctx, use, run, container
        self.request = request
        self.shows_reasoning = shows_reasoning
        [self.reply] = parsers(ctx, request, use, apart=None if shows_reasoning else True)
        self.message_id, self.thought_id = f"msg_{new_rid()}", f"rs_{new_rid()}"
        self.calls: list[dict[str, Any]] = []
        self._call_ids: list[str] = []
        self._logprobs: list[dict[str, Any]] = []
        self.status = "in_progress"
        self.left_out: list[int] = []

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

    def call(self, number: int, name: str) -> dict[str, Any]:
        """The item of a call that begins."""
        identity = self._use.new_id(number, name)
        tool = self._run.get(name)
        if tool is None:
            item = call_item(f"fc_{new_rid()}", identity, name, "", "in_progress")
        else:
            own = f"{_PREFIXES[tool.kind]}_{new_rid()}"
            item = server_call_item(tool.kind, own, name, tool.namespace, self._container)
        self.calls.append(item)
        self._call_ids.append(identity)
        return item

    def thought(self, text: str, status: str) -> dict[str, Any]:
        return reasoning_item(self.thought_id, text, status)

    def said(self, text: str, status: str) -> dict[str, Any]:
        """The item of the message."""
        return message_item(self.message_id, text, status, self._logprobs)

    def new_logprobs(self) -> list[dict[str, Any]]:
        """Of the tokens of the last delta, which are added to all."""
        assert self.reply.output is not None
        new = token_entries(self.reply.output, self._ctx.manager.tokenizer.vocabulary)
        self._logprobs += new
        return new

    def finish(self) -> None:
        """The reply is whole: so are the calls, as far as the model is concerned."""
        self.status = "incomplete" if self.was_cut else "completed"
        for number, (name, arguments) in enumerate(self.reply.calls):
            item = self.calls[number] if number < len(self.calls) else self.call(number, name)
            if item["type"] == "function_call":
                item |= {"arguments": arguments, "status": self.status}
            else:
                tell_arguments(item, name, arguments, parsed(arguments) or {})
                if self.was_cut:
                    item["status"] = "failed" if item["type"] == "web_search_call" else "incomplete"

    def items(self) -> list[dict[str, Any]]:
        """In the order in which a reply has them. Those of calls change when they are run."""
        reply = self.reply
        made = [] if self.reasoning is None else [self.thought(self.reasoning, self.status)]
        if reply.content or not reply.calls:
            made.append(self.said(reply.content, self.status))
        return made + self.calls

    def message(self) -> Message:
        """The reply as a turn of the conversation."""
        calls = tuple(
            ToolCall(name, arguments, identity)
            for (name, arguments), identity in zip(self.reply.calls, self._call_ids, strict=True)
        )
        return Message(
            "assistant",
            self.reply.content,
            tool_calls=calls,
            reasoning_content=self.reply.reasoning or None,
        )

    # -- calls that are run here -----------------------------------------------------------------------------

    @property
    def to_run(self) -> list[int]:
        """Numbers of the calls that are run here."""
        return [number for number, (name, _) in enumerate(self.reply.calls) if name in self._run]

    @property
    def has_functions(self) -> bool:
        """There are calls that the client runs."""
        return len(self.to_run) < len(self.reply.calls)

    async def run(self, number: int, sessions: Sessions) -> Message:
        """Run a call; its result for the model."""
        name, arguments = self.reply.calls[number]
        result = await sessions.call(self._run[name], arguments)
        tell_result(self.calls[number], result.text, result.is_error)
        return Message("tool", result.text, name=name, tool_call_id=self._call_ids[number])

    def not_run(self, number: int) -> Message:
        """Leave a call out; what the model reads when the conversation goes on."""
        self.left_out.append(number)
        name, _ = self.reply.calls[number]
        item = self.calls[number]
        item["status"] = "failed" if item["type"] == "web_search_call" else "incomplete"
        text = "not run: too many calls"
        return Message("tool", text, name=name, tool_call_id=self._call_ids[number])


class MakeEvent(Protocol):
    def __call__(self, kind: str, **facts: Any) -> bytes: ...


class StepEvents:
    """event: makes an event of a type. offset: how many items the response has from generations before."""

    def __init__(self, step: Step, event: MakeEvent, offset: int) -> None:
        self._step, self._event, self._offset = step, event, offset
        self._places: dict[str, int] = {}  # item -> output_index

    def begin(self) -> list[bytes]:
        """What is known to come: a reply that may call need not say anything."""
        step, made = self._step, []
        if step.reasoning is not None:
            made += self._thought()
        return made if step.may_call or step.reply.may_reason else made + self._message()

    def _thought(self) -> list[bytes]:
        if "reasoning" in self._places:
            return []
        return self._open("reasoning", {**self._step.thought("", "in_progress"), "content": []})

    def place(self, item: dict[str, Any]) -> int:
        """Where an item of the finished generation stands."""
        kind = item["type"]
        if kind not in ("reasoning", "message"):
            kind = f"call {next(at for at, one in enumerate(self._step.calls) if one is item)}"
        return self._places.get(kind, self._offset + len(self._places))

    def _open(self, kind: str, item: dict[str, Any]) -> list[bytes]:
        place = self._places[kind] = self._offset + len(self._places)
        return [self._event("response.output_item.added", output_index=place, item=item)]

    def _message(self) -> list[bytes]:
        if "message" in self._places:
            return []
        made = self._open("message", {**self._step.said("", "in_progress"), "content": []})
        part = text_part("", ())
        return [*made, self._event("response.content_part.added", **self._at("message"), part=part)]

    def _at(self, kind: str) -> dict[str, Any]:
        identity = self._step.message_id if kind == "message" else self._step.thought_id
        return {"output_index": self._places[kind], "item_id": identity, "content_index": 0}

    def of(self, one: ReplyEvent) -> list[bytes]:
        step = self._step
        match one:
            case ReasoningDelta() if not step.shows_reasoning:
                return []
            case ReasoningDelta(text=text):
                begun = self._thought()
                delta = self._event("response.reasoning_text.delta", **self._at("reasoning"), delta=text)
                return [*begun, delta]
            case ContentDelta(text=text):
                new = step.new_logprobs()
                if not text and (step.may_call or step.reply.may_reason):
                    return []
                begun = self._message()
                told = {**self._at("message"), "delta": text, "logprobs": new}
                return [*begun, self._event("response.output_text.delta", **told)]
            case ToolCallDelta(index=number, name=name, arguments=text):
                begun = [] if name is None else self._call(number, name)
                deltas = _ARGUMENTS.get(step.calls[number]["type"])
                if not text or deltas is None:
                    return begun
                return [*begun, self._told(number, f"{deltas}.delta", delta=text)]
        raise TypeError(f"no event of a reply: {one!r}")

    def end(self) -> list[bytes]:
        """Each item as the model left it. Those of calls that are run here come to their end later."""
        step, made = self._step, []
        if not step.calls:
            made += self._message()
        items = {one["type"]: one for one in step.items()}
        for number in range(len(step.calls)):
            if f"call {number}" not in self._places:
                made += self._open(f"call {number}", step.calls[number])
        for kind, place in self._places.items():
            item = step.calls[int(kind[5:])] if kind.startswith("call ") else items[kind]
            match item["type"]:
                case "reasoning":
                    text = step.reply.reasoning or ""
                    made.append(self._event("response.reasoning_text.done", **self._at(kind), text=text))
                case "message":
                    [part] = item["content"]
                    told = {"text": part["text"], "logprobs": part["logprobs"]}
                    made.append(self._event("response.output_text.done", **self._at(kind), **told))
                    made.append(self._event("response.content_part.done", **self._at(kind), part=part))
                case _:
                    made += self._arguments(int(kind[5:]))
                    if item["status"] == "in_progress":
                        continue
            made.append(self._event("response.output_item.done", output_index=place, item=item))
        return made

    # -- calls -----------------------------------------------------------------------------------------------

    def _told(self, number: int, kind: str, **facts: Any) -> bytes:
        """An event of a call."""
        place = {"output_index": self._places[f"call {number}"], "item_id": self._step.calls[number]["id"]}
        return self._event(f"response.{kind}", **place, **facts)

    def _call(self, number: int, name: str) -> list[bytes]:
        item = self._step.call(number, name)
        begun = self._open(f"call {number}", item)
        if item["type"] == "function_call":
            return begun
        return [*begun, self._told(number, f"{item['type']}.in_progress")]

    def _arguments(self, number: int) -> list[bytes]:
        """They are whole."""
        item = self._step.calls[number]
        match item["type"]:
            case "function_call":
                told = {"arguments": item["arguments"], "name": item["name"]}
                return [self._told(number, "function_call_arguments.done", **told)]
            case "mcp_call":
                return [self._told(number, "mcp_call_arguments.done", arguments=item["arguments"])]
            case "code_interpreter_call":
                code = item["code"]
                return [
                    self._told(number, "code_interpreter_call_code.delta", delta=code),
                    self._told(number, "code_interpreter_call_code.done", code=code),
                ]
        return []

    def runs(self, number: int) -> list[bytes]:
        """A call is about to be run."""
        kind = self._step.calls[number]["type"]
        return [self._told(number, f"{kind}.{_RUNS[kind]}")] if kind in _RUNS else []

    def ran(self, number: int) -> list[bytes]:
        """A call has been run."""
        item = self._step.calls[number]
        failed = item["type"] == "mcp_call" and item["status"] == "failed"
        return [
            self._told(number, f"{item['type']}.{'failed' if failed else 'completed'}"),
            self._done(number),
        ]

    def left_out(self) -> list[bytes]:
        """Calls that are not run have ended."""
        return [self._done(number) for number in self._step.left_out]

    def _done(self, number: int) -> bytes:
        place, item = self._places[f"call {number}"], self._step.calls[number]
        return self._event("response.output_item.done", output_index=place, item=item)


_ARGUMENTS = {"function_call": "function_call_arguments", "mcp_call": "mcp_call_arguments"}
"""Items whose arguments are told in pieces."""
_RUNS = {"code_interpreter_call": "interpreting", "web_search_call": "searching"}
"""What is said when a call is run, where there is an event of it."""
