"""Generations that may call tools: the calls of a reply are run in parallel, and the model continues with
their results until it answers without a call. Without a loop the calls are reported and not run. A reply that
was cut off at max_tokens calls nothing.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Any

import msgspec

from runtime.protocol.messages import ToolCall as MessageCall
from sglang_dsl.backends.base import Backend
from sglang_dsl.conversation.requests import Call, Completion, ToolCall, ToolStep
from sglang_dsl.conversation.transcript import Generation
from sglang_dsl.errors import BadProgram, BudgetExceeded, ProgramError, ReplayMiss, ToolError, ToolLoopLimit
from sglang_dsl.interpreter.calls import CallContext
from sglang_dsl.interpreter.lower import was_cut
from sglang_dsl.interpreter.metering import Ask
from sglang_dsl.interpreter.replies.texts import ReasoningStream
from sglang_dsl.interpreter.run import EvaluatorState, Item
from sglang_dsl.ir import Gen, LoopBegin
from sglang_dsl.tool_use import running
from sglang_dsl.tool_use.offers import Offer, Runner, ToolSession


def may_call(node: Gen, ready: Call, offer: Offer) -> bool:
    """Whether this generation may call tools; one with a constraint cannot. Raises BadProgram."""
    shown = f"gen({node.name!r})" if node.name else "gen()"
    shaped = ready.constraint is not None
    if offer.loop is not None:
        if not offer.runners:
            raise BadProgram(f"{shown} is in a tool_loop, but no tools are offered: s += tools([...])")
        if shaped or ready.peeks:
            raise BadProgram(
                f"{shown} has a constraint, which a tool call would not match; in a tool_loop use free "
                "text, and ask for the value in a turn after the loop"
            )
    if ready.n > 1 and not shaped:
        raise BadProgram(f"{shown} requests {ready.n} replies, and each might call other tools; fork instead")
    return not shaped and not ready.peeks


async def answer(state: EvaluatorState, node: Gen, item: Item, ready: Call, offer: Offer) -> None:
    """Evaluate a generation that may call tools. Raises its error."""
    if state.transcript.role is None:
        raise BadProgram("tools are called in an assistant turn: put the gen into assistant(...)")
    loop, steps = offer.loop, list[ToolStep]()
    if loop is not None:
        ready = msgspec.structs.replace(ready, tool_choice=loop.choice, parallel_tools=loop.parallel)
    async with AsyncExitStack() as stack:
        sessions: dict[tuple[int, str], ToolSession | Exception] = {}
        while True:
            context = state.context("gen", node.name, item, node.timeout)
            call = msgspec.structs.replace(ready, prompt=state.transcript.prompt(), timeout=context.timeout)
            done = await state.run.calls.generate(context, call, state.before)
            calls = [] if was_cut(done.meta) else [_read(one) for one in done.meta.get("tool_calls") or ()]
            unrunnable = any(one.name in offer.runners and not offer.runners[one.name].runs for one in calls)
            if not calls or loop is None or unrunnable:
                _settle(state, node, item, done, calls, steps)
                return
            if len(steps) >= loop.max_steps:
                raise ToolLoopLimit(
                    f"after {loop.max_steps} steps the model still calls {calls[0].name}",
                    hint="pass a larger max_steps to tool_loop",
                )
            await _connect(stack, sessions, calls, offer.runners, loop.timeout)
            step = ToolStep(
                done.texts[0], await _run_all(state, item, calls, sessions, offer, loop), node.name
            )
            steps.append(step)
            if loop.own is not None:
                loop.own.steps.append(step)
            _say(state, node, done, step)
            ready = msgspec.structs.replace(ready, tool_choice="auto")


def _read(plain: Mapping[str, Any]) -> ToolCall:
    """A call as a backend reports it."""
    text = str(plain.get("arguments") or "{}")
    try:
        data = json.loads(text)
    except ValueError:
        data = None
    return ToolCall(str(plain["name"]), data if isinstance(data, dict) else {}, plain.get("id"), text=text)


def _calls(calls: Sequence[ToolCall]) -> tuple[MessageCall, ...]:
    return tuple(MessageCall(one.name, one.text, one.id) for one in calls)


def _say(state: EvaluatorState, node: Gen, done: Completion, step: ToolStep) -> None:
    """The reply with its calls, a turn for each result, and the assistant's next turn."""
    at, first = state.transcript, ReasoningStream.splits(node, done)[0]
    role = at.role or "assistant"
    if first.answer or first.head:
        at = at.say(
            first.answer,
            chosen=node.name or "",
            hidden=first.head,
            reasoning=first.reasoning,
            generation=Generation(node, done.meta),
        )
    at = at.call(_calls(step.calls)).close()
    for call in step.calls:
        at = at.open("tool").say(call.result or "").close()
    state.advance(at.open(role))


def _settle(
    state: EvaluatorState,
    node: Gen,
    item: Item,
    done: Completion,
    calls: Sequence[ToolCall],
    steps: Sequence[ToolStep],
) -> None:
    """Set the answer. `calls`: those that nothing runs, which are left to the program."""
    plain = [msgspec.to_builtins(step) for step in steps]
    if calls:
        plain.append(msgspec.to_builtins(ToolStep(done.texts[0], tuple(calls), node.name)))
    meta = {**done.meta, "tool_steps": plain}
    state.settle(node, item, Completion(done.texts, meta), ReasoningStream.splits(node, done))
    if calls:
        state.advance(state.transcript.call(_calls(calls)))


async def _connect(
    stack: AsyncExitStack,
    sessions: dict[tuple[int, str], ToolSession | Exception],
    calls: Sequence[ToolCall],
    runners: Mapping[str, Runner],
    timeout: float,
) -> None:
    """Open a session with each server that is called, from its first call to the generation's end."""
    for one in calls:
        runner = runners.get(one.name)
        if runner is None or runner.server is None:
            continue
        server, namespace = runner.server
        key = id(server), namespace
        if key in sessions:
            continue
        try:
            async with asyncio.timeout(timeout):
                sessions[key] = await stack.enter_async_context(server.get_tool_session(namespace))
        except Exception as error:  # noqa: BLE001 - the result of its calls, or raised
            sessions[key] = error


async def _run_all(
    state: EvaluatorState,
    item: Item,
    calls: Sequence[ToolCall],
    sessions: Mapping[tuple[int, str], ToolSession | Exception],
    offer: Offer,
    loop: LoopBegin,
) -> tuple[ToolCall, ...]:
    """Run all calls of a reply in parallel. The first error that is raised cancels the others."""
    left = [left for meter in state.meters if (left := meter.left_s) is not None]
    limit = max(0.0, min(loop.timeout, *left)) if left else loop.timeout
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(
                    _run(state, state.context("tool", one.name, item, limit), one, sessions, offer, loop)
                )
                for one in calls
            ]
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from errors.exceptions[0].__cause__
    return tuple(task.result() for task in tasks)


async def _run(
    state: EvaluatorState,
    context: CallContext,
    call: ToolCall,
    sessions: Mapping[tuple[int, str], ToolSession | Exception],
    offer: Offer,
    loop: LoopBegin,
) -> ToolCall:
    context = msgspec.structs.replace(context, meters=())
    try:
        runner, data = running.arguments_of(offer.runners, call.name, call.text)
        session = None if runner.server is None else sessions[id(runner.server[0]), runner.server[1]]
        home = None if loop.own is None else loop.own.home
        reports = loop.on_error == "tell"
        ran = await state.run.calls.tool(context, _Running(runner, data, session, home, reports))
    except running.CallFault as fault:
        return dataclasses.replace(call, result=f"Error: {fault}", failed=True)
    except TimeoutError as error:
        if loop.on_error != "tell":
            raise ToolError(f"the tool {call.name} did not finish within {context.timeout:g} s") from error
        late = f"Error: {call.name} did not finish within {context.timeout:g} s"
        return dataclasses.replace(call, result=late, failed=True)
    return dataclasses.replace(call, result=ran.text, failed=ran.failed)


class _Ran(msgspec.Struct, frozen=True, eq=False):
    text: str
    failed: bool
    meta: dict[str, Any] = {}


class _Running(msgspec.Struct, frozen=True, eq=False):
    """One call, ready to be made or replayed. `reports`: an error of the tool is its result."""

    runner: Runner
    arguments: dict[str, Any]
    session: ToolSession | Exception | None
    home: asyncio.AbstractEventLoop | None
    reports: bool

    def ask(self, fresh: int) -> Ask:
        return Ask(fresh, 0)

    def within(self, most: int) -> _Running:
        return self

    def request(self) -> dict[str, Any]:
        return {"kind": "Tool", "name": self.runner.name, "arguments": self.arguments}

    async def make(self, backend: Backend, clock: Any) -> _Ran:
        try:
            if isinstance(self.session, Exception):
                raise self.session
            text, failed = await running.run(self.runner, self.arguments, self.session, self.home)
        except (running.CallFault, BudgetExceeded, ReplayMiss):
            raise
        except Exception as error:
            if self.reports:
                return _Ran(f"Error: {type(error).__name__}: {_message(error)}", True)
            raise ToolError(f"the tool {self.runner.name} failed: {_message(error)}") from error
        if failed and not self.reports:
            raise ToolError(f"the tool {self.runner.name} failed: {text}")
        return _Ran(f"Error: {text}" if failed else text, failed)

    def checked(self, done: _Ran) -> _Ran:
        return done

    def write(self, done: _Ran) -> dict[str, Any]:
        return {"text": done.text, "failed": done.failed}

    def read(self, reply: dict[str, Any], *, streamed: bool) -> _Ran:
        return _Ran(str(reply["text"]), bool(reply["failed"]))


def _message(error: Exception) -> str:
    return error.message if isinstance(error, ProgramError) else str(error)
