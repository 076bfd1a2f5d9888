"""A chat request as other libraries make it, messages and tools as OpenAI's API has them, answered by any
backend: at once or as a stream, for threads and for coroutines of any event loop. Knows none of these
libraries.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Iterable, Iterator, Mapping, Sequence
from contextlib import aclosing
from typing import Any

from msgspec.structs import replace

from runtime.protocol.messages import RAW_ROLE, Message, ToolCall
from sglang_dsl.backends import as_backend
from sglang_dsl.backends.base import Backend, Call, Completion, Prompt
from sglang_dsl.concurrency.loop import background
from sglang_dsl.concurrency.streams import Piece, Until, awaiting, blocking, iterate_here, run_here
from sglang_dsl.conversation.requests import Ledger
from sglang_dsl.errors import BadProgram, InvalidValue, NoBackend, ProgramCancelled
from sglang_dsl.interpreter import parameters
from sglang_dsl.interpreter.calls import CallContext, Calls
from sglang_dsl.interpreter.lower import lower
from sglang_dsl.interpreter.run import Variable
from sglang_dsl.ir import Gen
from sglang_dsl.settings import global_config

FORMS = ("regex", "json_schema", "ebnf", "structural_tag")
"""Keyword arguments that say what a reply must match; at most one of them."""
SAMPLING = frozenset(parameters.PARAMETERS) - {"n"}
_PARTS = ("text", "image_url", "video_url", "audio_url")


class Chat:
    """`backend`: what run's `backend=` takes; None: the default backend. `timeout`: seconds a request may
    take. `words`: gen's keyword arguments for all requests; those of one request go over them."""

    def __init__(self, name: str, backend: Any = None, timeout: float | None = None, **words: Any) -> None:
        self.name, self._given = name, backend
        self.timeout = parameters.timeout(timeout)
        self.words = {word: value for word, value in words.items() if value is not None}
        self.node()  # a wrong argument is told here

    @property
    def backend(self) -> Backend:
        """Raises NoBackend."""
        given = global_config.default_backend if self._given is None else self._given
        if given is None:
            raise NoBackend(
                f"{self.name} needs a backend: pass backend=..., or call set_default_backend(...)"
            )
        return as_backend(given)

    @property
    def model(self) -> str:
        """Which model answers, and where."""
        return self.backend.identity

    def node(self, **words: Any) -> Gen:
        """The generation of a request. Raises BadProgram."""
        said = self.words | {word: value for word, value in words.items() if value is not None}
        if unknown := sorted(said.keys() - SAMPLING - {*FORMS}):
            known = ", ".join(sorted({*SAMPLING, *FORMS}))
            raise BadProgram(f"{self.name} has no parameter {', '.join(unknown)}; known: {known}")
        forms = {word: said.pop(word) for word in FORMS if word in said}
        if len(forms) > 1:
            raise BadProgram(f"{self.name} takes only one of {', '.join(FORMS)}; got {' and '.join(forms)}")
        made = {word: getattr(parameters, word)(value) for word, value in forms.items()}
        return Gen(name=None, sampling=parameters.sampling(said), **made)

    def call(
        self,
        messages: Iterable[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        tool_choice: Any = None,
        parallel_tools: bool = True,
        **words: Any,
    ) -> Call:
        """The request: an open turn of the assistant behind `messages`. Raises BadProgram."""
        node = self.node(**words)
        turns = [message_of(one) for one in messages]
        if not turns:
            raise BadProgram(f"{self.name} got no messages")
        prompt = Prompt((*turns, Message("assistant", open=True)), tuple(map(dict, tools)))
        choice = choice_of(tool_choice, tools)
        if tools and choice != "none" and any(getattr(node, form) is not None for form in FORMS):
            raise BadProgram("a reply with a constraint cannot call tools; pass only one of the two")
        choice = choice if tools else "auto"
        return self._call(node, prompt, tool_choice=choice, parallel_tools=parallel_tools)

    def completion(self, text: str, **words: Any) -> Call:
        """A request to go on with a plain text."""
        return self.behind(Prompt((Message(RAW_ROLE, text, open=True),)), **words)

    def behind(self, prompt: Prompt, **words: Any) -> Call:
        """A request to go on with any prompt."""
        return self._call(self.node(**words), prompt)

    def begin(self, call: Call, *, stream: bool = False) -> Reply:
        """Send it; returns at once. Raises NoBackend."""
        return Reply(self.name, self.backend, call, stream)

    async def answer(self, call: Call) -> Completion:
        """Send it, on the language's own event loop."""
        context = CallContext("gen", None, (), 0, timeout=call.timeout)
        return _fitting(await Calls(self.name, self.backend, Ledger()).generate(context, call))

    @property
    def _limit(self) -> float | None:
        return global_config.timeout_s if self.timeout is None else self.timeout

    def _call(self, node: Gen, prompt: Prompt, **tools: Any) -> Call:
        template = lower(node, global_config.sampling)
        return replace(template, prompt=prompt, timeout=self._limit, **tools)


class Reply:
    """The answer to one call, which is on its way."""

    def __init__(self, name: str, backend: Backend, call: Call, stream: bool) -> None:
        self._task: asyncio.Task[Any] | None = None
        self._dropped = False
        self._answer = Variable(None)
        self._work = name, backend, call, stream
        background().start(self._run)

    async def _run(self) -> None:
        name, backend, call, stream = self._work
        self._task = asyncio.current_task()
        context = CallContext("gen", None, (), 0, timeout=call.timeout)
        calls = Calls(name, backend, Ledger())
        piece = (lambda delta: self._answer.put(delta.text)) if stream else None
        try:
            if self._dropped:
                raise asyncio.CancelledError
            done = _fitting(await calls.generate(context, call, piece=piece))
        except asyncio.CancelledError:
            self._answer.fail(ProgramCancelled(f"the request of {name} was cancelled"))
        except BaseException as error:  # noqa: BLE001 - raised where the answer is read
            self._answer.fail(error)
        else:
            self._answer.raw = done.texts[0]
            self._answer.settle(done, done.meta)

    def cancel(self) -> None:
        """Nobody wants it any more."""
        self._dropped = True
        background().call(lambda: self._task is not None and self._task.cancel())

    async def _whole(self, until: Until) -> Completion:
        try:
            await until(self._answer, lambda: self._answer.done)
        except BaseException:
            self.cancel()
            raise
        answer: Completion = self._answer.result()
        return answer

    async def _pieces(self, until: Until) -> AsyncGenerator[Piece, None]:
        try:
            async with aclosing(self._answer.read(self._answer.ended, until)) as pieces:
                async for piece in pieces:
                    if piece.text:
                        yield piece
            self._answer.result()
        finally:
            if not self._answer.done:
                self.cancel()

    def whole(self) -> Completion:
        """Waits. Raises what went wrong."""
        return run_here(self._whole(blocking))

    async def awhole(self) -> Completion:
        """whole() for a coroutine; cancelling it cancels the request."""
        return await self._whole(awaiting)

    def pieces(self) -> Iterator[str]:
        """The text as it comes; leaving early cancels the request. Raises what went wrong."""
        return (piece.text for piece in iterate_here(self._pieces(blocking)))

    async def apieces(self) -> AsyncGenerator[str, None]:
        """pieces() for a coroutine."""
        async with aclosing(self._pieces(awaiting)) as pieces:
            async for piece in pieces:
                yield piece.text


def _fitting(done: Completion) -> Completion:
    """A reply, if it is what its constraint requires. Raises InvalidValue."""
    if (fault := done.meta.get("invalid")) is not None:
        raise InvalidValue(f"the reply is not what was asked for: {fault}; it is {done.texts[0]!r:.200}")
    return done


def message_of(said: Mapping[str, Any]) -> Message:
    """One message of a chat API. Raises BadProgram."""
    role, content = said.get("role"), said.get("content")
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
        for one in said.get("tool_calls") or ()
    )
    return Message(role, content or "", tool_calls=calls, tool_call_id=said.get("tool_call_id"))


def choice_of(said: Any, tools: Sequence[Mapping[str, Any]]) -> str:
    """Which tools a reply calls, as a Call says it. Raises BadProgram."""
    names = [tool["function"]["name"] for tool in tools]
    match said:
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
            raise BadProgram(f"tool_choice must be one of {known}; got {said!r:.80}")


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


def arguments_of(call: Mapping[str, Any]) -> dict[str, Any] | None:
    """The arguments of a call that the model made; None where they are no JSON object."""
    try:
        found = json.loads(call["arguments"])
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def finish_of(meta: Mapping[str, Any]) -> str:
    """Why a reply ended, in the words of chat APIs."""
    reason = meta.get("finish_reason")
    kind = str(reason.get("type", "stop") if isinstance(reason, Mapping) else reason or "stop")
    return "tool_calls" if meta.get("tool_calls") and kind != "length" else kind


def usage_of(meta: Mapping[str, Any]) -> tuple[int, int, int]:
    """Tokens of the prompt, of the reply, and of the prompt those that were cached."""
    said = (meta.get(word) or 0 for word in ("prompt_tokens", "completion_tokens", "cached_tokens"))
    prompt, completion, cached = map(int, said)
    return prompt, completion, cached
