"""One request of /v1/responses: a generation; and while it calls tools that this server runs, their results
and the next generation.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import msgspec

from runtime.formats.chat.render import conversation
from runtime.processes.frontend.client import CLIENT, IN_HAND
from runtime.protocol.errors import BadRequest, InternalFault, NotSupported, RuntimeFault
from runtime.protocol.io_struct import GenerateReqInput
from runtime.protocol.messages import Message
from runtime.protocol.request_base import new_rid
from runtime.protocol.sampling import UNLIMITED
from runtime.server.context import ServerContext
from runtime.server.http.body import check_range
from runtime.server.http.errors import error_type
from runtime.server.http.ignored import refuse_unsupported
from runtime.server.http.sse import event
from runtime.server.openai import params
from runtime.server.openai.messages import template_fields, tool_use
from runtime.server.openai.responses.items import input_items, messages_of
from runtime.server.openai.responses.step import Step, StepEvents
from runtime.server.openai.responses.tools import Sessions, afterwards, chosen, offer
from runtime.server.openai.responses.types import (
    Kept,
    ResponseObject,
    ResponsesRequest,
    Store,
    TextFormat,
    check_metadata,
    no_response,
)
from runtime.server.output_format import ANY_JSON, ANY_OBJECT, constraint_of, structural_tag
from runtime.server.replies import Generation, shown_marks

_REFUSED = {
    "conversation": "use previous_response_id, or send the items",
    "prompt": "stored prompts are not kept here",
    "moderation": "there is no moderation",
    "context_management": "conversations are not truncated",
}
_INCLUDED = {
    "message.output_text.logprobs", "code_interpreter_call.outputs", "reasoning.encrypted_content"
}  # fmt: skip
"""The second is always included. The third has no effect: reasoning comes as text."""
_NAMES = {
    "max_new_tokens": "max_output_tokens", "messages": "input", "json_schema": "text.format.schema",
    "structural_tag": "text.format",
}  # fmt: skip
"""The runtime's names of fields -> those of this route."""
_ECHOED = (
    "instructions", "max_output_tokens", "previous_response_id", "temperature", "top_p", "user",
)  # fmt: skip
"""Fields of the request that the response repeats."""


class Job:
    def __init__(
        self, ctx: ServerContext, body: ResponsesRequest, store: Store, earlier: Kept | None = None
    ) -> None:
        self._ctx, self._body, self._store = ctx, body, store
        self.streams = bool(body.stream)
        self._adapter = params.check_model(ctx, body.model)
        self._check()
        history: list[Message] = []
        if body.previous_response_id is not None:
            if earlier is None:
                raise no_response(body.previous_response_id, "previous_response_id")
            if earlier.response.status not in ("completed", "incomplete"):
                raise BadRequest(f"is {earlier.response.status}", where="previous_response_id")
            # Instructions and reasoning are not carried over; the new instructions, if any, come first.
            history = [
                msgspec.structs.replace(one, reasoning_content=None)
                for one in earlier.messages
                if one.role != "system"
            ]
        instructions = [Message("system", body.instructions)] if body.instructions else []
        self._messages = [*instructions, *history, *messages_of(body.input)]
        self._items = input_items(body.input)
        self._offer = offer(ctx.tools, body.tools)
        most = 2 * ctx.model.max_prompt_length
        self._sessions = Sessions(ctx.tools, ctx.config.tool_timeout_s, most)
        limits = (ctx.config.max_tool_calls, body.max_tool_calls)
        self._calls_left = min(limit for limit in limits if limit is not None)
        self._usage = [0, 0, 0, 0]
        self._sequence = 0
        self.response = self._blank()
        self._kept = Kept(self.response, self._messages, self._items, owner=CLIENT.get().owner)
        self._choice = chosen(body.tool_choice, self._offer.run)
        self._step: Step | None = self._next(self._choice)

    def _check(self) -> None:
        body = self._body
        check_metadata(body.metadata)
        refuse_unsupported(body, _REFUSED)
        if body.background and body.stream:
            raise NotSupported("a background response cannot be streamed", where="background")
        if body.background and body.store is False:
            raise BadRequest("a background response must be stored", where="store")
        if body.truncation == "auto":
            raise NotSupported("conversations are not truncated", where="truncation")
        check_range(body.top_logprobs, "top_logprobs", 0, params.MAX_TOP_LOGPROBS)
        unknown = set(body.include or ()) - _INCLUDED
        if unknown:
            raise NotSupported(f"{', '.join(sorted(unknown))} cannot be included", where="include")
        check_range(body.max_tool_calls, "max_tool_calls", 1)

    def _next(self, choice: Any) -> Step:
        """A generation after the messages so far. choice: `tool_choice` as chat completions have it."""
        body, model = self._body, self._ctx.model
        limit = body.max_output_tokens
        check_range(limit, "max_output_tokens", 1)
        most = UNLIMITED if limit is None else limit - self._usage[2]
        sampling, fields, names = params.generation_of(self._ctx, body)
        form = _constraint(body.text.format if body.text is not None else None)
        if form and constraint_of(body).sampling:
            raise BadRequest("only one constraint can be used at a time", where="text.format")
        sampling = {**model.default_sampling, "max_new_tokens": most, **sampling, **form}
        fields.setdefault("require_reasoning", None)
        tools, use = tool_use(
            model, self._offer.functions, choice, body.parallel_tool_calls, self._messages, sampling
        )
        shows = body.include_reasoning is not False
        apart = None if shows else True
        sampling |= use.sampling | shown_marks(self._ctx, apart)
        if body.top_logprobs or "message.output_text.logprobs" in (body.include or ()):
            fields = params.with_logprobs(fields, body.top_logprobs or 0)
        fields |= tools | template_fields(body.chat_template_kwargs, (body.reasoning or {}).get("effort"))
        request = GenerateReqInput(
            messages=conversation(self._messages),
            lora_path=self._adapter,
            stream=bool(body.stream),
            sampling_params=sampling,
            **fields,
        )
        container = f"cntr_{self.response.id[5:]}"
        generation = Generation(self._ctx, request, {**_NAMES, **names}, use, apart=apart)
        return Step(self._ctx, generation, use, self._offer.run, container, shows)

    def _blank(self) -> ResponseObject:
        body = self._body
        form = (body.text and body.text.format) or TextFormat()
        shown = {name: value for name, value in msgspec.to_builtins(form).items() if value is not None}
        return ResponseObject(
            id=f"resp_{new_rid()}",
            created_at=int(self._ctx.clock()),
            model=self._ctx.served_name,
            status="in_progress",
            metadata=body.metadata or {},
            parallel_tool_calls=body.parallel_tool_calls is not False,
            reasoning={"effort": None, "summary": None, **(body.reasoning or {})},
            background=bool(body.background),
            store=body.store is not False,
            text={"format": shown},
            tool_choice=body.tool_choice or "auto",
            tools=body.tools or [],
            truncation=body.truncation or "disabled",
            **{name: getattr(body, name) for name in _ECHOED},
        )

    # -- whole -----------------------------------------------------------------------------------------------

    async def whole(self) -> ResponseObject:
        await self._run()
        self._keep()
        return self.response

    def begin(self) -> ResponseObject:
        """Continue in the background; the immediate answer."""
        in_hand = IN_HAND.get()
        self.response.status = "queued"
        self._kept.task = asyncio.create_task(self._work(), name="sglang-dsl-response")
        if in_hand is not None:
            in_hand.work_on()
            self._kept.task.add_done_callback(lambda _: in_hand.done())
        self._keep()
        return msgspec.structs.replace(self.response)

    async def _work(self) -> None:
        self.response.status = "in_progress"
        try:
            await self._run()
        except asyncio.CancelledError:
            self.response.status = "cancelled"
            raise
        except RuntimeFault as fault:
            self._fail(fault)
        except Exception as error:  # noqa: BLE001 - reported in the response
            self._fail(InternalFault(f"{type(error).__name__}: {error}", hint="a defect of the runtime"))
        self._keep()

    def _fail(self, fault: RuntimeFault) -> None:
        self.response.status = "failed"
        self.response.error = {"code": error_type(fault.status), "message": str(fault)}

    def _keep(self) -> None:
        if self.response.store:
            self._store.put(self._kept)

    async def _run(self) -> None:
        async with self._sessions:
            while (step := self._step) is not None:
                await step.generation.run()
                step.new_logprobs()
                self._generated(step)
                self.response.output += step.items()
                async for _ in self._after(step):
                    pass

    # -- streamed --------------------------------------------------------------------------------------------

    async def stream(self) -> AsyncGenerator[bytes, None]:
        begun = False
        async with self._sessions:
            while (step := self._step) is not None:
                events = StepEvents(step, self.event, len(self.response.output))
                async with step.generation.follow() as changes:
                    async for _ in changes:
                        if step.reply.is_first:
                            if not begun:
                                yield self.event("response.created", response=self.response)
                                yield self.event("response.in_progress", response=self.response)
                            begun = True
                            for data in events.begin():
                                yield data
                        for one in step.reply.events:
                            for data in events.of(one):
                                yield data
                if step.reply.output is None:
                    return
                self._generated(step)
                for data in events.end():
                    yield data
                self.response.output += sorted(step.items(), key=events.position)
                async for data in self._after(step, events):
                    yield data
        self._keep()
        yield self.event(f"response.{self.response.status}", response=self.response)

    def failed_event(self, fault: RuntimeFault) -> bytes:
        self._fail(fault)
        self._keep()
        return self.event("response.failed", response=self.response)

    def event(self, kind: str, **facts: Any) -> bytes:
        number, self._sequence = self._sequence, self._sequence + 1
        return event({"type": kind, "sequence_number": number, **facts}, kind)

    # -- between generations ---------------------------------------------------------------------------------

    def _generated(self, step: Step) -> None:
        """Add a generation that has ended to conversation and usage."""
        step.finish()
        self._messages.append(step.message())
        meta = step.reply.meta
        names = ("prompt_tokens", "cached_tokens", "completion_tokens", "reasoning_tokens")
        self._usage = [
            earlier + int(meta.get(name) or 0) for earlier, name in zip(self._usage, names, strict=True)
        ]
        prompt, cached, output, reasoning = self._usage
        self.response.usage = {
            "input_tokens": prompt,
            "input_tokens_details": {"cached_tokens": cached if self._ctx.config.enable_cache_report else 0},
            "output_tokens": output,
            "output_tokens_details": {"reasoning_tokens": reasoning},
            "total_tokens": prompt + output,
        }

    async def _after(self, step: Step, events: StepEvents | None = None) -> AsyncGenerator[bytes, None]:
        """Run the calls of a generation that are run here, with their `events`; then begin the next
        generation, or end the response."""
        self._step = None
        if step.was_cut:
            self._end("max_output_tokens")
            return
        for number in step.to_run:
            if self._calls_left == 0:
                self._messages.append(step.skip(number))
                continue
            self._calls_left -= 1
            for data in events.runs(number) if events is not None else ():
                yield data
            self._messages.append(await step.run(number, self._sessions))
            for data in events.ran(number) if events is not None else ():
                yield data
        if step.skipped:
            for data in events.skipped() if events is not None else ():
                yield data
            self._end("max_tool_calls")
            return
        if not step.to_run or step.has_functions:
            self._end()  # the model has answered, or the client runs its functions
            return
        limit = self._body.max_output_tokens
        if limit is not None and self._usage[2] >= limit:
            self._end("max_output_tokens")
        else:
            self._step = self._next(afterwards(self._choice))

    def _end(self, cut: str | None = None) -> None:
        self.response.status = "completed" if cut is None else "incomplete"
        if cut is not None:
            self.response.incomplete_details = {"reason": cut}


def _constraint(form: TextFormat | None) -> dict[str, Any]:
    """The constraint of a text format, as sampling parameters. Raises BadRequest."""
    if form is None:
        return {}
    tag = ("structures", "triggers", "format")
    parts = {"json_schema": ("schema",), "structural_tag": tag}.get(form.type, ())
    for name in ("schema", *tag):
        if getattr(form, name) is not None and name not in parts:
            raise BadRequest(f"cannot be combined with type {form.type!r}", where=f"text.format.{name}")
    match form.type:
        case "text":
            return {}
        case "json_object":
            return {"json_schema": ANY_OBJECT}
        case "json_schema":
            return {"json_schema": ANY_JSON if form.schema is None else form.schema}
        case "structural_tag":
            return {"structural_tag": structural_tag(form, parts)}
