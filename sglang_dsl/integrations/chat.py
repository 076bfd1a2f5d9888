"""A chat request of another library, answered by any backend: at once or streamed, async or not."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable, Iterator, Mapping, Sequence
from contextlib import aclosing
from typing import Any

from msgspec.structs import replace

from runtime.protocol.messages import RAW_ROLE, Message, ToolCall
from sglang_dsl.backends import as_backend
from sglang_dsl.backends.base import Backend, Call, Completion, Prompt
from sglang_dsl.backends.common.prompts import arguments_of as arguments_of
from sglang_dsl.concurrency.loop import background
from sglang_dsl.concurrency.streams import Until, awaiting, blocking, iterate_here, run_here
from sglang_dsl.conversation.requests import Ledger
from sglang_dsl.errors import BadProgram, InvalidValue, NoBackend, ProgramCancelled, ProgramError
from sglang_dsl.interpreter import parameters
from sglang_dsl.interpreter.calls import CallContext, Calls
from sglang_dsl.interpreter.lower import lower
from sglang_dsl.interpreter.run import Variable
from sglang_dsl.ir import Gen
from sglang_dsl.settings import global_config

FORMS = ("regex", "json_schema", "ebnf", "structural_tag")
"""Keyword arguments for the constraint of a reply; at most one of them."""
SAMPLING = frozenset(parameters.PARAMETERS) - {"n"}
_PARTS = ("text", "image_url", "video_url", "audio_url")


class Chat:
    """`backend`: what run's `backend=` takes; None: the default backend. `timeout`: seconds per request.
    `options`: gen's keyword arguments for all requests; those of a request override them."""

    def __init__(self, name: str, backend: Any = None, timeout: float | None = None, **options: Any) -> None:
        self.name, self._backend = name, backend
        self.timeout = parameters.timeout(timeout)
        self.options = {option: value for option, value in options.items() if value is not None}
        self.node()  # wrong options fail here

    @property
    def backend(self) -> Backend:
        """Raises NoBackend."""
        backend = global_config.default_backend if self._backend is None else self._backend
        if backend is None:
            raise NoBackend(
                f"{self.name} needs a backend: pass backend=..., or call set_default_backend(...)"
            )
        return as_backend(backend)

    @property
    def model(self) -> str:
        return self.backend.identity

    def node(self, **options: Any) -> Gen:
        """The generation of a request. Raises BadProgram."""
        merged = self.options | {option: value for option, value in options.items() if value is not None}
        if unknown := sorted(merged.keys() - SAMPLING - {*FORMS}):
            known = ", ".join(sorted({*SAMPLING, *FORMS}))
            raise BadProgram(f"{self.name} has no parameter {', '.join(unknown)}; known: {known}")
        forms = {form: merged.pop(form) for form in FORMS if form in merged}
        if len(forms) > 1:
            raise BadProgram(f"{self.name} takes only one of {', '.join(FORMS)}; got {' and '.join(forms)}")
        constraint = {form: getattr(parameters, form)(value) for form, value in forms.items()}
        return Gen(name=None, sampling=parameters.sampling(merged), **constraint)

    def call(
        self,
        messages: Iterable[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        tool_choice: Any = None,
        parallel_tool_calls: bool = True,
        response_format: Any = None,
        **options: Any,
    ) -> Call:
        """The request for a turn of the assistant after `messages`. Raises BadProgram."""
        tools = tools or ()
        node = self.node(**schema_of(response_format), **options)
        turns = [message_of(one) for one in messages]
        if not turns:
            raise BadProgram(f"{self.name} got no messages")
        prompt = Prompt((*turns, Message("assistant", open=True)), tuple(map(dict, tools)))
        choice = choice_of(tool_choice, tools)
        if tools and choice != "none" and any(getattr(node, form) is not None for form in FORMS):
            raise BadProgram("a reply with a constraint cannot call tools; pass only one of the two")
        choice = choice if tools else "auto"
        return self._template(node, prompt, tool_choice=choice, parallel_tools=parallel_tool_calls)

    def completion(self, prompt: str | Prompt, **options: Any) -> Call:
        if isinstance(prompt, str):
            prompt = Prompt((Message(RAW_ROLE, prompt, open=True),))
        return self._template(self.node(**options), prompt)

    def begin(self, call: Call, *, stream: bool = False) -> Reply:
        """Send a request in the background. Raises NoBackend."""
        return Reply(self.name, self.backend, call, stream)

    async def answer(self, call: Call) -> Completion:
        return await _generate(self.name, self.backend, call)

    def _template(self, node: Gen, prompt: Prompt, **tools: Any) -> Call:
        template = lower(node, global_config.sampling)
        timeout = global_config.timeout_s if self.timeout is None else self.timeout
        return replace(template, prompt=prompt, timeout=timeout, **tools)


async def _generate(name: str, backend: Backend, call: Call, **kwargs: Any) -> Completion:
    """Raises InvalidValue if the reply violates its constraint."""
    context = CallContext("gen", None, (), 0, timeout=call.timeout)
    try:
        done = await Calls(name, backend, Ledger()).generate(context, call, **kwargs)
    except ProgramError as error:
        error.backend = error.backend or backend.name
        raise
    if (fault := done.meta.get("invalid")) is not None:
        raise InvalidValue(f"the reply is not what was asked for: {fault}; it is {done.texts[0]!r:.200}")
    return done


class Reply:
    """The answer to a request that was sent in the background."""

    def __init__(self, name: str, backend: Backend, call: Call, stream: bool) -> None:
        self._task: asyncio.Task[Any] | None = None
        self._cancelled = False
        self._answer = Variable(None)
        background().start(lambda: self._run(name, backend, call, stream))

    async def _run(self, name: str, backend: Backend, call: Call, stream: bool) -> None:
        self._task = asyncio.current_task()
        piece = (lambda delta: self._answer.put(delta.text)) if stream else None
        try:
            if self._cancelled:
                raise asyncio.CancelledError
            done = await _generate(name, backend, call, piece=piece)
        except asyncio.CancelledError:
            self._answer.fail(ProgramCancelled(f"the request of {name} was cancelled"))
        except BaseException as error:  # noqa: BLE001 - raised by the reader
            self._answer.fail(error)
        else:
            self._answer.raw = done.texts[0]
            self._answer.settle(done, done.meta)

    def cancel(self) -> None:
        self._cancelled = True
        background().call(lambda: self._task is not None and self._task.cancel())

    async def _whole(self, until: Until) -> Completion:
        try:
            await until(self._answer, lambda: self._answer.done)
        except BaseException:
            self.cancel()
            raise
        return self._answer.result()  # type: ignore[no-any-return]

    async def _pieces(self, until: Until) -> AsyncGenerator[str, None]:
        try:
            async with aclosing(self._answer.read(self._answer.ended, until)) as pieces:
                async for piece in pieces:
                    if piece.text:
                        yield piece.text
            self._answer.result()
        finally:
            if not self._answer.done:
                self.cancel()

    def whole(self) -> Completion:
        """Waits. Raises the error of the request."""
        return run_here(self._whole(blocking))

    async def awhole(self) -> Completion:
        """whole() for a coroutine; cancelling it cancels the request."""
        return await self._whole(awaiting)

    def pieces(self) -> Iterator[str]:
        """The text while it is generated; leaving early cancels the request. Raises its error."""
        return iterate_here(self._pieces(blocking))

    def apieces(self) -> AsyncGenerator[str, None]:
        """pieces() for a coroutine."""
        return self._pieces(awaiting)


# -- the format of chat APIs ---------------------------------------------------------------------------------


def message_of(message: Mapping[str, Any]) -> Message:
    """Raises BadProgram."""
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str) or not role or role == RAW_ROLE:
        raise BadProgram(f"a message needs a role, got {role!r:.80}")
    if isinstance(content, list):
        for part in content:
            if not isinstance(part, Mapping) or part.get("type") not in _PARTS:
                kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
                raise BadProgram(f"a message's parts are {', '.join(_PARTS)}; got {kind!r:.80}")
        content = [dict(part) for part in content]
        if all(part["type"] == "text" for part in content):
            content = "".join(part["text"] for part in content)
    elif not isinstance(content, str | None):
        raise BadProgram(f"a message's content is text or a list of parts, got {type(content).__name__}")
    calls = tuple(
        ToolCall(one["function"]["name"], one["function"]["arguments"], one.get("id"))
        for one in message.get("tool_calls") or ()
    )
    return Message(role, content or "", tool_calls=calls, tool_call_id=message.get("tool_call_id"))


def choice_of(choice: Any, tools: Sequence[Mapping[str, Any]]) -> str:
    """A tool_choice as a Call has it. Raises BadProgram."""
    names = [tool["function"]["name"] for tool in tools]
    match choice:
        case None | False | "auto":
            return "auto"
        case "none":
            return "none"
        case True | "required" | "any":
            return "required"
        case {"function": {"name": str(name)}} | str(name) if name in names:
            return f"={name}"
        case _:
            known = ", ".join(("auto", "none", "required", *names))
            raise BadProgram(f"tool_choice must be one of {known}; got {choice!r:.80}")


def schema_of(response_format: Any) -> dict[str, Any]:
    """The keyword argument for a chat API's response_format. Raises BadProgram."""
    match response_format:
        case None | {"type": "text"}:
            return {}
        case {"type": "json_schema", "json_schema": {"schema": schema}} | {
            "type": "json_schema",
            "schema": schema,  # as OpenAI's Responses API has it
        }:
            return {"json_schema": schema}
        case {"type": "json_object"}:
            return {"json_schema": {"type": "object"}}
        case type():
            return {"json_schema": response_format}
        case _:
            raise BadProgram(
                "response_format must be a type, or have the type text, json_object or json_schema; got "
                f"{response_format!r:.80}"
            )


def finish_of(meta: Mapping[str, Any]) -> str:
    """The finish reason of a reply, as chat APIs name it."""
    reason = meta.get("finish_reason")
    kind = str(reason.get("type", "stop") if isinstance(reason, Mapping) else reason or "stop")
    return "tool_calls" if meta.get("tool_calls") and kind != "length" else kind


def usage_of(meta: Mapping[str, Any]) -> tuple[int, int, int]:
    """Tokens of the prompt, of the reply, and cached tokens of the prompt."""
    names = ("prompt_tokens", "completion_tokens", "cached_tokens")
    prompt, completion, cached = (int(meta.get(name) or 0) for name in names)
    return prompt, completion, cached
