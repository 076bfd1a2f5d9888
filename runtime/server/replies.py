"""From a request to its replies: what the APIs share, whole or streamed. Each item's output goes through one
ReplyParser, whose events an API renders. Knows no API.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from typing import Any

from runtime.formats.chat.render import conversation
from runtime.formats.reasoning.types import reasoning_type
from runtime.formats.reply import ReplyParser
from runtime.processes.frontend.batch_request import Outcome
from runtime.protocol.errors import Aborted, RuntimeFault
from runtime.protocol.io_struct import EmbeddingOutput, GenerateReqInput, OutputDelta
from runtime.protocol.messages import Message
from runtime.protocol.requests.embedding import EmbeddingReqInput
from runtime.server.context import ServerContext
from runtime.server.http.errors import FieldNames, mapped_errors
from runtime.server.http.sse import closing_stream
from runtime.server.tool_use import ToolUse


def ready(ctx: ServerContext, request: GenerateReqInput, names: FieldNames) -> GenerateReqInput:
    """The request, normalised and with the server's limits. Raises BadRequest."""
    with mapped_errors(names, ctx.model.max_prompt_length):
        return ctx.normalized(request)


def parsers(
    ctx: ServerContext,
    request: GenerateReqInput,
    tools: ToolUse | None = None,
    *,
    apart: bool | None = None,
    held: bool = False,
    whole_calls: bool = False,
) -> list[ReplyParser]:
    """One for each item of the request; they separate reasoning and calls of `tools`. apart: also reasoning
    that only the text shows; None: as the server's reasoning_parser. held: reasoning comes in one piece, at
    its end. whole_calls: see ToolUse.splitter."""
    tools = tools or ToolUse()
    name = ctx.model.reasoning_parser
    apart = name is not None if apart is None else apart
    kind = None if name is None else reasoning_type(name)
    marks = ctx.manager.reasoning
    return [
        ReplyParser(marks, tools.splitter(whole=whole_calls), apart=apart, kind=kind, held=held)
        for _ in range(len(request))
    ]


def shown_marks(ctx: ServerContext, apart: bool | None = None) -> dict[str, Any]:
    """Sampling parameters with which a text contains the marks of reasoning (see parsers)."""
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


async def run(
    ctx: ServerContext,
    request: GenerateReqInput,
    names: FieldNames,
    replies: Sequence[ReplyParser],
    *,
    keep_aborted: bool = False,
) -> None:
    """Feed all items' outputs to `replies`. Raises the first error, after all are done. keep_aborted: what an
    operator cancelled is an answer, with the finish_reason "abort"."""
    with mapped_errors(names, ctx.model.max_prompt_length):
        for reply, outcome in zip(replies, await ctx.manager.submit_batch(request), strict=True):
            reply.feed(_output(outcome, keep_aborted))


async def follow(
    ctx: ServerContext,
    request: GenerateReqInput,
    names: FieldNames,
    replies: Sequence[ReplyParser],
    *,
    keep_aborted: bool = False,
) -> AsyncGenerator[tuple[int, ReplyParser], None]:
    """(item, its reply) after each delta. An item's error ends the stream. keep_aborted: see run."""
    with mapped_errors(names, ctx.model.max_prompt_length):
        async with closing_stream(ctx.manager.stream_batch(request)) as outputs:
            async for index, outcome in outputs:
                reply = replies[index]
                reply.feed(_output(outcome, keep_aborted))
                yield index, reply


async def embed(ctx: ServerContext, request: EmbeddingReqInput, names: FieldNames) -> list[EmbeddingOutput]:
    """The vectors of all items; the first one's error if there is one."""
    with mapped_errors(names):
        outcomes = await ctx.manager.embed(request)
        for outcome in outcomes:
            if isinstance(outcome, RuntimeFault):
                raise outcome
    return [outcome for outcome in outcomes if isinstance(outcome, EmbeddingOutput)]


def _output(outcome: Outcome, keep_aborted: bool) -> OutputDelta:
    match outcome:
        case OutputDelta():
            return outcome
        case Aborted(partial=OutputDelta() as output) if keep_aborted:
            return output
        case fault:
            raise fault
