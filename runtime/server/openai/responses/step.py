"""One generation of a response: its request, its reply, and the items that come of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from runtime.protocol.io_struct import GenerateReqInput
from runtime.protocol.messages import Message, ToolCall
from runtime.protocol.request_base import new_rid
from runtime.server.context import ServerContext
from runtime.server.openai.logprobs import token_entries
from runtime.server.openai.responses.calls import Sessions, parsed
from runtime.server.openai.responses.items import (
    call_item,
    message_item,
    reasoning_item,
    server_call_item,
    tell_arguments,
    tell_result,
)
from runtime.server.openai.responses.offer import ServerTool
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
