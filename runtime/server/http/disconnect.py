"""What becomes of work whose client has gone: it is cancelled, within the moment. Knows no route."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.types import Receive

from runtime.protocol.errors import Aborted

T = TypeVar("T")


async def disconnected(receive: Receive) -> None:
    """Return when the client is gone. The request's body must have been read."""
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return


async def unless_gone(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """What `work` returns or raises; cancels it, and raises Aborted, when the client goes before."""
    task = asyncio.create_task(work, name="sglang-dsl-answer")
    gone = asyncio.create_task(disconnected(request.receive), name="sglang-dsl-answer-watch")
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise Aborted("the client disconnected")
    finally:
        for one in (task, gone):
            one.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)
