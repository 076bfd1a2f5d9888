"""Runs one call of a tool."""

from __future__ import annotations

import asyncio
import functools
import inspect
import json
from collections.abc import Mapping
from typing import Any

from sglang_dsl.concurrency.loop import in_thread
from sglang_dsl.concurrency.threads import awaited
from sglang_dsl.tool_use.offers import Runner, ToolSession


class CallFault(ValueError):
    """A mistake of the model: an unknown tool, or wrong arguments."""


def arguments_of(runners: Mapping[str, Runner], name: str, text: str) -> tuple[Runner, dict[str, Any]]:
    """The runner of a call, and its parsed arguments, not checked yet. Raises CallFault."""
    runner = runners.get(name)
    if runner is None:
        raise CallFault(f"there is no tool {name!r}; the tools are {', '.join(runners)}")
    try:
        data = json.loads(text or "{}")
    except ValueError as error:
        raise CallFault(f"the arguments of {name} are not JSON: {error}") from error
    if not isinstance(data, dict):
        raise CallFault(f"the arguments of {name} are not a JSON object: {text:.80}")
    return runner, data


async def run(
    runner: Runner,
    arguments: dict[str, Any],
    session: ToolSession | None,
    home: asyncio.AbstractEventLoop | None,
) -> tuple[str, bool]:
    """The result of a call as text, and whether the tool reports an error. `home`: the event loop for
    coroutine functions; None: this one. Cancelling stops a coroutine; a function in a thread continues, and
    its result is dropped. Raises CallFault, and what the function raises."""
    try:
        args, kwargs = runner.read(arguments)
    except ValueError as error:
        raise CallFault(f"wrong arguments for {runner.name}: {error}") from error
    if session is not None:
        result = await session.call(runner.name, arguments)
        return str(result.text), bool(result.is_error)
    assert runner.run is not None
    function = functools.partial(runner.run, *args, **kwargs)
    if inspect.iscoroutinefunction(runner.run) or inspect.iscoroutinefunction(type(runner.run).__call__):
        return text_of(await _await_on(home, function())), False
    value = await awaited(in_thread, function)
    return text_of(await _await_on(home, value) if inspect.isawaitable(value) else value), False


def text_of(value: Any) -> str:
    if isinstance(value, str):
        return value
    try:
        from pydantic_core import to_jsonable_python
    except ImportError:
        return json.dumps(value, ensure_ascii=False, default=str)
    return json.dumps(to_jsonable_python(value, fallback=str), ensure_ascii=False)


async def _await_on(home: asyncio.AbstractEventLoop | None, work: Any) -> Any:
    if home is None or home is asyncio.get_running_loop():
        return await work

    async def result() -> Any:
        return await work

    return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(result(), home))
