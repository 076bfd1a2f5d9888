"""From a request to its replies: what the APIs share, whole or streamed. Each item's output goes through one
ReplyParser, whose events an API renders. Knows no API.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from runtime.formats.chat.render import conversation
from runtime.formats.reasoning.marks import reasoning_type
from runtime.formats.reply import ReplyParser
from runtime.processes.frontend.batch_request import Outcome
from runtime.protocol.errors import Aborted, RuntimeFault
from runtime.protocol.io_struct import EmbeddingOutput, GenerateReqInput, OutputDelta
from runtime.protocol.messages import Message
from runtime.protocol.requests.embedding import EmbeddingReqInput
from runtime.server.context import ServerContext
from runtime.server.http.errors import FieldNames, mapped_errors
from runtime.server.tool_use import ToolUse


class Generation:
    """A request for text, normalised and with the server's limits, and the parsers of its items' replies,
    which separate reasoning and calls of `tools`.

    names: the runtime's names of fields -> the API's; apart: also reasoning that only the text shows; None:
    as the server's reasoning_parser; held: reasoning comes in one piece, at its end; whole_calls: see
    ToolUse.splitter; parsed: false = texts are not split; keep_aborted: what an operator cancelled is an
    answer, with the finish_reason "abort". Raises BadRequest.
    """

    def __init__(
        self,
        ctx: ServerContext,
        request: GenerateReqInput,
        names: FieldNames,
        tools: ToolUse | None = None,
        *,
        apart: bool | None = None,
        held: bool = False,
        whole_calls: bool = False,
        parsed: bool = True,
        keep_aborted: bool = False,
    ) -> None:
        tools = tools or ToolUse()
        self._ctx, self._names, self._keep_aborted = ctx, tools.named(names), keep_aborted
        with self._mapped_errors():
            self.request = ctx.normalized(request)
        name, marks = ctx.model.reasoning_parser, ctx.manager.reasoning
        apart = name is not None if apart is None else apart
        kind = None if name is None else reasoning_type(name)
        self.replies = [
            ReplyParser(marks, tools.splitter(whole=whole_calls), apart=apart, kind=kind, held=held)
            if parsed
            else ReplyParser()
            for _ in range(len(self.request))
        ]

    def _mapped_errors(self) -> contextlib.AbstractContextManager[None]:
        return mapped_errors(self._names, self._ctx.model.max_prompt_length)

    async def run(self) -> None:
        """Feed all outputs to the parsers. Raises the first item's error, after all are done."""
        with self._mapped_errors():
            outcomes = await self._ctx.manager.submit_batch(self.request)
            for reply, outcome in zip(self.replies, outcomes, strict=True):
                reply.feed(self._output(outcome))

    def follow(self) -> contextlib.AbstractAsyncContextManager[AsyncGenerator[tuple[int, ReplyParser], None]]:
        """`async with` it: (item, its reply) after each delta. An item's error ends the stream."""
        return contextlib.aclosing(self._changes())

    async def _changes(self) -> AsyncGenerator[tuple[int, ReplyParser], None]:
        with self._mapped_errors():
            async with contextlib.aclosing(self._ctx.manager.stream_batch(self.request)) as outputs:
                async for index, outcome in outputs:
                    reply = self.replies[index]
                    reply.feed(self._output(outcome))
                    yield index, reply

    def _output(self, outcome: Outcome) -> OutputDelta:
        match outcome:
            case OutputDelta():
                return outcome
            case Aborted(partial=OutputDelta() as output) if self._keep_aborted:
                return output
            case fault:
                raise fault


def shown_marks(ctx: ServerContext, apart: bool | None = None) -> dict[str, Any]:
    """Sampling parameters with which a text contains the marks of reasoning (see Generation)."""
    apart = ctx.model.reasoning_parser is not None if apart is None else apart
    return {"skip_special_tokens": False} if apart and ctx.manager.hides_reasoning else {}


def thinking_switch(ctx: ServerContext, on: bool) -> dict[str, Any]:
    """The variable of a chat template that turns reasoning on or off. Only a checkpoint's own template may
    know it; the others refuse unknown variables."""
    return {"enable_thinking": on} if ctx.model.template_source == "checkpoint jinja" else {}


def continued(messages: Sequence[Message]) -> list[Message]:
    """The conversation; a last reply without calls is continued."""
    last = messages[-1]
    return conversation(messages, continue_final_message=last.role == "assistant" and not last.tool_calls)


async def embed(ctx: ServerContext, request: EmbeddingReqInput, names: FieldNames) -> list[EmbeddingOutput]:
    """The vectors of all items; the first one's error if there is one."""
    with mapped_errors(names):
        outcomes = await ctx.manager.embed(request)
        for outcome in outcomes:
            if isinstance(outcome, RuntimeFault):
                raise outcome
    return [outcome for outcome in outcomes if isinstance(outcome, EmbeddingOutput)]
