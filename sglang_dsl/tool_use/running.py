"""One call of a tool, run: its arguments read, its function called in a thread or awaited, what it gave as
text for the model. Knows no programs.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import json
from collections.abc import Callable, Mapping
from typing import Any

from runtime.protocol.registry import MissingExtra, Registry
from sglang_dsl.concurrency.loop import in_thread
from sglang_dsl.tool_use.offers import Runner, ToolSession

_PARTS: Registry[Any] = Registry(
    "part of tools", {"jsonable": "pydantic_core:to_jsonable_python"}, extras={"jsonable": "typed"}
)


class CallFault(ValueError):
    """The model's own mistake: a tool that is not there, or arguments that it does not take."""


def arguments_of(runners: Mapping[str, Runner], name: str, text: str) -> tuple[Runner, dict[str, Any]]:
    """Who runs a call, and its arguments as data, not checked yet. Raises CallFault."""
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
    """What a call gives, as text, and whether the tool calls that an error. home: the loop on which coroutine
    functions run, None: this one. Cancelling stops a coroutine; a function in a thread goes on, and what it
    gives is dropped. Raises CallFault, and what the function raises."""
    try:
        args, kwargs = runner.read(arguments)
    except ValueError as error:
        raise CallFault(f"wrong arguments for {runner.name}: {error}") from error
    if session is not None:
        given = await session.call(runner.name, arguments)
        return str(given.text), bool(given.is_error)
    assert runner.run is not None
    function = functools.partial(runner.run, *args, **kwargs)
    if inspect.iscoroutinefunction(runner.run) or inspect.iscoroutinefunction(type(runner.run).__call__):
        return shown(await _awaited(function(), home)), False
    value = await _in_thread(function)
    return shown(await _awaited(value, home) if inspect.isawaitable(value) else value), False


def shown(value: Any) -> str:
    """A tool's result as the model reads it: text as it is, anything else as JSON."""
    if isinstance(value, str):
        return value
    try:
        plain = _PARTS.load("jsonable")(value, fallback=str)
    except MissingExtra:
        return json.dumps(value, ensure_ascii=False, default=str)
    return json.dumps(plain, ensure_ascii=False)


async def _awaited(work: Any, home: asyncio.AbstractEventLoop | None) -> Any:
    if home is None or home is asyncio.get_running_loop():
        return await work

    async def there() -> Any:
        return await work

    return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(there(), home))


async def _in_thread(function: Callable[[], Any]) -> Any:
    loop = asyncio.get_running_loop()
    done: asyncio.Future[tuple[Any, BaseException | None]] = loop.create_future()

    def settle(value: Any, error: BaseException | None) -> None:
        if not done.done():  # nobody waits any more
            done.set_result((value, error))

    def work() -> None:
        value, error = None, None
        try:
            value = function()
        except BaseException as raised:  # noqa: BLE001 - raised again where it is waited for
            error = raised
        loop.call_soon_threadsafe(settle, value, error)

    in_thread(work)
    value, error = await done
    if error is not None:
        raise error
    return value
